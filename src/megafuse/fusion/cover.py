"""Cover a graph by nests: start with one nest per anchor, join the pair that saves most time, until none saves any."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from megafuse.core.device import DeviceSpec
from megafuse.fusion.anchors import Anchors
from megafuse.fusion.cost import NestCost, nest_cost
from megafuse.fusion.initial import initial_nests
from megafuse.fusion.merge import merge_nests
from megafuse.fusion.plan import Boundary
from megafuse.ir.graph import Graph, Node
from megafuse.ir.nest import Anchor, Nest
from megafuse.ir.trace import NestError, Trace, trace_nest
from megafuse.ir.types import Dot, Opaque, Pick


@dataclass
class Item:
    """One nest during the search: its trace(s), cost and the units it computes."""

    traces: tuple[Trace, ...]  # alternative forms; the first is the preferred one
    cost: NestCost
    forward: bool
    units: frozenset[int]

    @property
    def trace(self) -> Trace:
        """The preferred form."""
        return self.traces[0]

    @property
    def nest(self) -> Nest:
        """The nest of the preferred form."""
        return self.trace.nest


@dataclass
class Units:
    """The dependency graph over anchors and library calls. ``needs[u]``: units that ``u`` reads directly."""

    of_anchor: dict[Anchor, int] = field(default_factory=dict)
    of_node: dict[Node, list[int]] = field(default_factory=dict)
    needs: dict[int, frozenset[int]] = field(default_factory=dict)


def build_units(graph: Graph, anchors: Anchors) -> Units:
    """Number anchors and library calls in topological order and find what each reads."""
    units = Units()
    materialised = anchors.materialised
    by_node: dict[Node, list[Anchor]] = {}
    for one in anchors.order:
        by_node.setdefault(one.node, []).append(one)
    counter = itertools.count()
    for node in graph.nodes:
        made: list[Anchor | None] = list(by_node.get(node, ()))
        if not made and node.is_a(Dot, Opaque):
            made = [None]
        for anchor in made:
            unit = next(counter)
            sources = [anchor.value] if anchor is not None and anchor.part is not None else list(node.args)
            stop = _stops_at(sources, materialised)
            units.needs[unit] = frozenset(u for n in stop for u in _units_of(units, n))
            units.of_node.setdefault(node, []).append(unit)
            if anchor is not None:
                units.of_anchor[anchor] = unit
    return units


def _units_of(units: Units, node: Node) -> list[int]:
    if node in units.of_node:
        return units.of_node[node]
    return _units_of(units, node.args[0]) if node.is_a(Pick) else []


def _stops_at(sources: Iterable[Node], materialised: frozenset[Node]) -> list[Node]:
    """Materialised nodes that an evaluation of ``sources`` reads."""
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = list(sources)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in materialised:
            found[node] = None
        else:
            stack.extend(node.args)
    return list(found)


def _comparable(a: Item, b: Item) -> bool:
    """Some form of one walks as many elements as some form of the other, or as many as it has rows."""
    sizes_a = {n for t in a.traces for n in _volumes(t)}
    sizes_b = {n for t in b.traces for n in _volumes(t)}
    full_a = a.nest.space.num_rows * a.nest.space.num_cols
    full_b = b.nest.space.num_rows * b.nest.space.num_cols
    return full_a in sizes_b or full_b in sizes_a


def _follows(a: Item, b: Item) -> bool:
    """``a`` is a map over nothing but the result of a reduction of ``b``."""
    if not a.nest.flexible:
        return False
    results = {r.anchor.node: r for r in b.nest.roots if r.arg_index is not None}
    volume = a.nest.space.num_rows * a.nest.space.num_cols
    return any(n in results and n.type.numel == volume for n in a.trace.loaded())


def _volumes(trace: Trace) -> tuple[int, int]:
    space = trace.nest.space
    return space.num_rows * space.num_cols, space.num_rows


PRODUCER_BONUS = 1.05  # of two joins that save the same read, the one with the value's producer is preferred
# (nests of a, nests of b) -> (values read from memory, all values touched, the legal joins)
Memo = dict[tuple[tuple[Nest, ...], tuple[Nest, ...]], tuple[frozenset[Node], frozenset[Node], list[Trace]]]


class Search:
    """Greedy joining of nests under a cost model."""

    def __init__(self, graph: Graph, anchors: Anchors, device: DeviceSpec, memo: Memo | None = None) -> None:
        self.graph, self.anchors, self.device = graph, anchors, device
        self.memo: Memo = {} if memo is None else memo
        self.materialised = anchors.materialised
        self.units = build_units(graph, anchors)
        self.forward = graph.forward_nodes()
        self.items: dict[int, Item] = {}
        self.ids = itertools.count()
        self.followers_wait = True
        self.gains: dict[tuple[int, int], tuple[float, Item] | None] = {}
        for anchor in anchors.order:
            self.add(self._initial(anchor, f"n{anchor.node.uid}p{anchor.part or 0}_"))

    def _initial(self, anchor: Anchor, prefix: str) -> Item:
        traces = tuple(trace_nest(n, self.materialised) for n in initial_nests(anchor, prefix))
        unit = self.units.of_anchor[anchor]
        return Item(
            traces,
            nest_cost(traces[0], self.device, self.anchors.strides),
            anchor.node in self.forward,
            frozenset({unit}),
        )

    def add(self, item: Item) -> int:
        """Register an item and forget nothing else."""
        ident = next(self.ids)
        self.items[ident] = item
        return ident

    def run(self) -> list[Item]:
        """Join until no join saves time; the items in an order in which they can run.

        Maps of a reduction's result wait for a second round: until then the reduction may join a large nest as a
        column reduction, and the finisher that sums its partials takes such followers in for nothing.
        """
        for self.followers_wait in (True, False):
            self.gains.clear()
            while (best := self._best_pair()) is not None:
                (a, b), item = best
                del self.items[a], self.items[b]
                self.gains = {k: v for k, v in self.gains.items() if a not in k and b not in k}
                self.add(item)
        return self._ordered()

    def _best_pair(self) -> tuple[tuple[int, int], Item] | None:
        best: tuple[float, tuple[int, int], Item] | None = None
        for a, b in itertools.combinations(sorted(self.items), 2):
            if (a, b) not in self.gains:
                self.gains[a, b] = self._gain(self.items[a], self.items[b])
            found = self.gains[a, b]
            if found is None or (best is not None and found[0] <= best[0]):
                continue
            if self._cyclic(a, b):
                continue
            best = (found[0], (a, b), found[1])
        return None if best is None else (best[1], best[2])

    def _gain(self, a: Item, b: Item) -> tuple[float, Item] | None:
        if a.forward != b.forward or not _comparable(a, b) or not self._touching(a, b):
            return None
        if self.followers_wait and (_follows(a, b) or _follows(b, a)):
            return None
        options = self._options(a, b)
        bonus = PRODUCER_BONUS if self._feeds(a, b) or self._feeds(b, a) else 1.0
        best: tuple[float, Item] | None = None
        for trace in options:
            cost = nest_cost(trace, self.device, self.anchors.strides)
            gain = bonus * (a.cost.seconds + b.cost.seconds + self.device.launch_seconds - cost.seconds)
            if gain > 0 and (best is None or gain > best[0]):
                best = (gain, Item((trace,), cost, a.forward, a.units | b.units))
        return best

    @staticmethod
    def _feeds(a: Item, b: Item) -> bool:
        """``b`` reads what ``a`` makes."""
        return any(r.anchor.node in b.trace.loaded() for r in a.nest.roots)

    def _options(self, a: Item, b: Item) -> list[Trace]:
        """All legal joins, remembered between searches over different anchors as long as these do not matter."""
        key = (tuple(t.nest for t in a.traces), tuple(t.nest for t in b.traces))
        known = self.memo.get(key)
        if known is not None and known[0] == known[1] & self.materialised:
            return known[2]
        options: list[Trace] = []
        for first, second in itertools.product(a.traces, b.traces):
            try:
                options.extend(merge_nests(first, second, self.materialised))
            except NestError:
                continue
        touched = frozenset(i.node for t in (*a.traces, *b.traces, *options) for i in t.insts)
        self.memo[key] = (touched & self.materialised, touched, options)
        return options

    def _touching(self, a: Item, b: Item) -> bool:
        """They read a common value, or one reads what the other makes."""
        made_a = {r.anchor.node for r in a.nest.roots}
        made_b = {r.anchor.node for r in b.nest.roots}
        read_a, read_b = a.trace.loaded(), b.trace.loaded()
        return bool(made_a & read_b or made_b & read_a or read_a & read_b)

    def _cyclic(self, a: int, b: int) -> bool:
        """Joining a and b would make something both need each other."""
        together = self.items[a].units | self.items[b].units
        group = {u: i.units for i in self.items.values() for u in i.units}
        seen: set[int] = set()
        outside = {n for u in together for n in self.units.needs[u]} - together
        stack = list(outside)
        while stack:
            for member in group.get(unit := stack.pop(), frozenset({unit})):
                if member in seen:
                    continue
                seen.add(member)
                needs = self.units.needs[member]
                if needs & together:
                    return True
                stack.extend(needs - seen)
        return False

    def _ordered(self) -> list[Item]:
        """Topological order of the items, library calls taken into account; ties by first unit."""
        return sorted(self.items.values(), key=lambda i: (self._rank(i), min(i.units)))

    def _rank(self, item: Item) -> int:
        """Number of units that must be done before the item."""
        group = {u: i.units for i in self.items.values() for u in i.units}
        seen: set[int] = set()
        stack = list(item.units)
        while stack:
            for member in group.get(unit := stack.pop(), frozenset({unit})):
                if member not in seen:
                    seen.add(member)
                    stack.extend(self.units.needs[member])
        return len(seen)


def boundaries(search: Search, items: list[Item]) -> tuple[Boundary, ...]:
    """For each pair of nests where one reads the other's result: why they stayed apart."""
    out = []
    ids = {id(i): k for k, i in search.items.items()}
    for (n, a), (m, b) in itertools.combinations(enumerate(items), 2):
        made = {r.anchor.node for r in a.nest.roots}
        if a.forward != b.forward:
            continue
        if not made & b.trace.loaded():
            continue
        out.append(Boundary(n, m, _reason(search, ids[id(a)], ids[id(b)], a, b)))
    return tuple(out)


def _reason(search: Search, ia: int, ib: int, a: Item, b: Item) -> str:
    if search._cyclic(min(ia, ib), max(ia, ib)):
        return "something between them (a library call or another kernel) needs the first and is needed by the second"
    try:
        merge_nests(a.trace, b.trace, search.materialised)
    except NestError as error:
        return str(error)
    return "joining them is predicted to be slower"
