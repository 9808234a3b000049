"""Run nests as phases of one kernel where they share outer rows: a block re-reads its own data from cache, not DRAM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.fusion.cost import read_bytes
from megafuse.fusion.cover import Item, Search
from megafuse.ir.graph import Node
from megafuse.ir.index import Affine, Index
from megafuse.ir.nest import Nest, Root
from megafuse.ir.trace import Trace

BLOCKS_PER_SM = (4, 2, 1)  # programs per SM tried, most first: what they re-read must stay in the L2 cache


@dataclass(frozen=True)
class Group:
    """Items that become phases of one kernel. ``fixed[i]``: row axes of item ``i`` that the program id fixes."""

    items: tuple[Item, ...]
    fixed: tuple[tuple[str, ...], ...]
    seconds: float
    blocks_per_sm: int = 0


def single_groups(items: Sequence[Item], device: DeviceSpec) -> list[Group]:
    """Every item as a kernel of its own."""
    return [Group((i,), (default_fixed(i.nest),), i.cost.seconds + device.launch_seconds) for i in items]


def group_items(search: Search, items: Sequence[Item], device: DeviceSpec) -> list[Group]:
    """Greedily append each item to the latest group that it continues with a gain in predicted time."""
    groups = single_groups(items, device)
    changed = True
    while changed:
        changed = False
        for a in range(len(groups)):
            for b in range(a + 1, len(groups)):
                joined = _join(search, groups, a, b, device)
                if joined is not None:
                    groups[a : b + 1] = _place(search, joined, groups[a + 1 : b])
                    changed = True
                    break
            if changed:
                break
    return groups


def _place(search: Search, joined: Group, between: list[Group]) -> list[Group]:
    """Order a joined group among the groups that stood between its parts: those that it needs go first."""
    needed = [g for g in between if _needs_any(search, joined, [g])]
    return [*needed, joined, *(g for g in between if g not in needed)]


def _needs_any(search: Search, group: Group, others: Sequence[Group]) -> bool:
    """The group reads (directly or not) something that one of ``others`` makes."""
    made = {u for g in others for i in g.items for u in i.units}
    seen: set[int] = set()
    stack = [u for i in group.items for u in i.units]
    while stack:
        unit = stack.pop()
        if unit in seen:
            continue
        seen.add(unit)
        stack.extend(search.units.needs[unit])
    return bool(made & seen)


def default_fixed(nest: Nest) -> tuple[str, ...]:
    """Row axes that some column reduction keeps: they must not be walked by one program."""
    by_rows = [r for r in nest.roots if r.by_rows]
    if not by_rows:
        return ()
    common = frozenset.intersection(*(r.reduced_axes for r in by_rows))
    return tuple(a.name for a in nest.space.rows if a.name not in common)


def _join(search: Search, groups: list[Group], a: int, b: int, device: DeviceSpec) -> Group | None:
    first, second = groups[a], groups[b]
    if len(second.items) > 1 or first.items[0].forward != second.items[0].forward:
        return None
    item = second.items[0]
    if _blocked(search, groups, a, b):
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


def _blocked(search: Search, groups: list[Group], a: int, b: int) -> bool:
    """Something outside needs the first group and is needed by the second."""
    ours = {u for i in groups[a].items for u in i.units}
    theirs = {u for i in groups[b].items for u in i.units}
    owner = {u: {v for i in g.items for v in i.units} for g in groups for i in g.items for u in i.units}
    together = ours | theirs
    stack = list({n for u in theirs for n in search.units.needs[u]} - together)
    seen: set[int] = set()
    while stack:
        for member in owner.get(unit := stack.pop(), {unit}):
            if member in seen:
                continue
            seen.add(member)
            if search.units.needs[member] & together:
                return True
            stack.extend(search.units.needs[member] - seen)
    return False


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
    blocks = math.prod(sizes[a] for a in fixed)
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
