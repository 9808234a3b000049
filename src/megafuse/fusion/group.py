"""Run nests as phases of one kernel where they share outer rows: a block re-reads its own data from cache, not DRAM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megafuse.core.dependencies import union
from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import typical
from megafuse.fusion.cover import Search
from megafuse.fusion.epilogue import product_axes
from megafuse.fusion.items import Item
from megafuse.ir.graph import Node
from megafuse.ir.index import Affine, Index
from megafuse.ir.nest import Nest, Root
from megafuse.ir.trace import Trace
from megafuse.ir.traffic import read_bytes

BLOCKS_PER_SM = (4, 2, 1)  # programs per SM tried, most first: what they re-read must stay in the L2 cache


@dataclass(frozen=True, eq=False)
class Group:
    """Items that become phases of one kernel. ``fixed[i]``: row axes of item ``i`` that the program id fixes."""

    items: tuple[Item, ...]
    fixed: tuple[tuple[str, ...], ...]
    seconds: float
    blocks_per_sm: int = 0


def single_groups(items: Sequence[Item], device: DeviceSpec) -> list[Group]:
    """Every item as a kernel of its own."""
    return [_single(i, device) for i in items]


def _single(item: Item, device: DeviceSpec) -> Group:
    """A kernel of one item. An epilogue's is the product's, whose launch is not counted here; nor is a chain's."""
    if item.chain is not None:
        return Group((item,), ((),), item.cost.seconds)
    if item.dot is not None:
        fixed, _, _ = product_axes(item.trace, item.dot)
        return Group((item,), (tuple(a.name for a in fixed),), item.cost.seconds)
    return Group((item,), (default_fixed(item.nest),), item.cost.seconds + device.launch_seconds)


def group_items(search: Search, items: Sequence[Item], device: DeviceSpec) -> list[Group]:
    """Greedily append each item to the latest group that it continues with a gain in predicted time."""
    return _Grouping(search, items, device).run()


class _Grouping:
    def __init__(self, search: Search, items: Sequence[Item], device: DeviceSpec) -> None:
        self.units, self.device = search.units, device
        self.dependencies = search.dependencies.copy()
        self.groups = single_groups(items, device)

    def run(self) -> list[Group]:
        """A pair of groups that cannot be joined never can be, so one walk over the first of both is enough."""
        first = 0
        while first < len(self.groups):
            found = self._continued(first)
            if found is None:
                first += 1
                continue
            second, joined = found
            self.dependencies.join(self._units(joined))
            self.groups[first : second + 1] = self._placed(joined, self.groups[first + 1 : second])
        return self.groups

    def _continued(self, first: int) -> tuple[int, Group] | None:
        """The first later group that group ``first`` can take in with a gain, and both as one."""
        group = self.groups[first]
        if group.items[0].closed:
            return None
        made = frozenset().union(*(i.made for i in group.items))
        for second in range(first + 1, len(self.groups)):
            other = self.groups[second]
            if (
                len(other.items) > 1
                or other.items[0].closed
                or made.isdisjoint(other.items[0].trace.loaded())
                or self._separated(group, other)
            ):
                continue
            joined = _join(group, other, self.device)
            if joined is not None:
                return second, joined
        return None

    def _placed(self, joined: Group, between: list[Group]) -> list[Group]:
        """Order a joined group among the groups that stood between its parts: those that it needs go first."""
        before = self.dependencies.before(self._units(joined))
        needed = [g for g in between if self._units(g) & before]
        return [*needed, joined, *(g for g in between if g not in needed)]

    def _separated(self, a: Group, b: Group) -> bool:
        return bool(self.dependencies.separated(self._units(a)) & self._units(b))

    def _units(self, group: Group) -> int:
        return union(self.units[i] for i in group.items)


def default_fixed(nest: Nest) -> tuple[str, ...]:
    """Row axes that some column reduction keeps: they must not be walked by one program."""
    by_rows = [r for r in nest.roots if r.by_rows]
    if not by_rows:
        return ()
    common = frozenset.intersection(*(r.reduced_axes for r in by_rows))
    return tuple(a.name for a in nest.space.rows if a.name not in common)


def _join(first: Group, second: Group, device: DeviceSpec) -> Group | None:
    """The group that one item makes with the group before it; None where it cannot, or gains nothing."""
    item = second.items[0]
    if first.items[0].forward != item.forward:
        return None
    pairing = _pair_fixed(first, item)
    if pairing is None:
        return None
    old_fixed, new_fixed = pairing
    fixed = (*old_fixed, new_fixed)
    members = (*first.items, item)
    if not all(_loops_reduced(i.nest, f) for i, f in zip(members, fixed, strict=True)):
        return None
    seconds, per_sm = _grouped_cost(members, fixed[0], device)
    return Group(members, fixed, seconds, per_sm) if seconds < first.seconds + second.seconds else None


def _pair_fixed(group: Group, item: Item) -> tuple[list[tuple[str, ...]], tuple[str, ...]] | None:
    """Row axes, per member and for the new item, that every value passed between them has in common."""
    result: list[tuple[str, ...]] | None = None
    new: tuple[str, ...] = ()
    linked = False
    for n, member in enumerate(group.items):
        made = {r.anchor.node: r for r in member.nest.roots if r.anchor.part is None}
        reads = [load for load in item.trace.loads() if load.node in made]
        if any(made[load.node].by_rows for load in reads):
            return None
        if any(r.anchor.part is not None and r.anchor.node in item.trace.loaded() for r in member.nest.roots):
            return None
        if not reads:
            continue
        linked = True
        candidates = group.fixed[n] if len(group.items) > 1 else tuple(a.name for a in member.nest.space.rows)
        pairs = _common_pairs(member.trace, item.trace, [(made[ld.node], ld.index) for ld in reads])
        kept = [p for p in candidates if p in pairs]
        if result is None:
            keep_at = [candidates.index(p) for p in kept]
            result = [tuple(f[k] for k in keep_at) for f in group.fixed] if len(group.items) > 1 else [tuple(kept)]
            new = tuple(pairs[p] for p in kept)
        elif [pairs.get(p) for p in result[n]] != list(new):
            return None
    if not linked or not result or not new:
        return None
    return result, new


def _common_pairs(first: Trace, second: Trace, reads: list[tuple[Root, Index]]) -> dict[str, str]:
    rows, others = first.nest.space.row_names, second.nest.space.row_names
    sizes, other_sizes = first.nest.space.sizes, second.nest.space.sizes
    common: dict[str, str] | None = None
    for root, index in reads:
        found = {}
        for made, read in zip(root.index, index, strict=True):
            if len(made.terms) != 1 or made != _plain(made.terms[0][0]) or len(read.terms) != 1:
                continue
            ours, theirs = made.terms[0][0], read.terms[0][0]
            if read == _plain(theirs) and ours in rows and theirs in others and sizes[ours] == other_sizes[theirs]:
                found[ours] = theirs
        common = found if common is None else {k: v for k, v in common.items() if found.get(k) == v}
    return common or {}


def _plain(name: str) -> Affine:
    return Affine(((name, 1),))


def _loops_reduced(nest: Nest, fixed: tuple[str, ...]) -> bool:
    """Every column reduction runs over all rows that are not fixed."""
    loop = nest.space.row_names - set(fixed)
    return all(loop <= r.reduced_axes for r in nest.roots if r.by_rows)


def _grouped_cost(members: Sequence[Item], fixed: tuple[str, ...], device: DeviceSpec) -> tuple[float, int]:
    """Predicted time of the members as phases of one kernel, and programs per SM; infinite where no block fits."""
    sizes = members[0].nest.space.sizes
    blocks = typical(math.prod(sizes[a] for a in fixed))
    made = {r.anchor.node for i in members for r in i.nest.roots if not r.by_rows}
    reads: dict[Node, int] = {}
    times: dict[Node, int] = {}
    for item in members:
        for load in item.trace.loads():
            times[load.node] = times.get(load.node, 0) + 1
        for node, size in read_bytes(item.trace).items():
            if node not in made:
                reads[node] = max(reads.get(node, 0), size)
    reread = sum(b for n, b in reads.items() if times[n] > 1) + sum(n.type.nbytes for n in made if n in times)
    per_sm = next((k for k in BLOCKS_PER_SM if reread / blocks * min(blocks, device.sms * k) <= device.l2_bytes), 0)
    if not per_sm:
        return math.inf, 0
    dram = sum(reads.values()) + sum(_writes(i, blocks) for i in members)
    touched = sum(sum(b for _, b in i.cost.reads) + i.cost.cache_bytes + i.cost.write_bytes for i in members)
    memory = max(dram / device.dram_bandwidth, touched / device.block_bandwidth)
    results = sum(i.cost.results for i in members) / device.fp32_rate
    slots = device.sms * per_sm
    waves = math.ceil(blocks / slots) * slots / blocks
    return max(memory, results) * waves + device.launch_seconds, per_sm


def _writes(item: Item, blocks: int) -> int:
    total = 0
    for root in item.nest.roots:
        node = root.anchor.value
        total += 2 * blocks * node.type.nbytes if root.by_rows else node.type.nbytes
    return total


def total_seconds(groups: Sequence[Group]) -> float:
    """Predicted time of all kernels."""
    return sum(g.seconds for g in groups)
