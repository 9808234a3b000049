"""Cover a graph by nests: start with one nest per anchor, join the pair that saves most time, until none saves any."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from megafuse.core.dependencies import Dependencies, lowest, members, union
from megafuse.fusion.anchors import Anchors
from megafuse.fusion.items import Item, Items
from megafuse.fusion.merge import merge_nests
from megafuse.fusion.plan import Boundary
from megafuse.fusion.units import Units, number_units
from megafuse.ir.graph import Graph, Node
from megafuse.ir.nest import Anchor
from megafuse.ir.trace import NestError


class Search:
    """Greedy joining of nests under a cost model.

    Items are numbered as they appear. ``units[item]`` is the set of units that an item computes. Only pairs that touch
    a common value and have nothing between them are ever looked at: what stands between two items stays there,
    whatever is joined later. A pair is queued once, when the later of both appears, by a bound of what joining it can
    save; the join is made only when no other pair can save more.
    """

    def __init__(self, graph: Graph, anchors: Anchors, items: Items, closed: Sequence[Item] = ()) -> None:
        """Start with one item per anchor, but for those that ``closed`` items (epilogues of dots, chains) compute.

        Raises:
            NestError: a closed item needs something that needs its dots.
        """
        self.anchors, self.known = anchors, items
        self.materialised = anchors.materialised
        numbered = number_units(graph, anchors)
        self.dependencies = Dependencies(numbered.needs)
        self.units: dict[Item, int] = {}
        self._number: dict[Item, int] = {}
        self._owner: dict[int, Item] = {}  # by unit
        self._readers: dict[Node, int] = {}  # units of the items that read a value
        self._makers: dict[Node, int] = {}
        self._side = {True: 0, False: 0}  # units of forward and of backward items
        # (minus the seconds saved or, where not joined yet, their bound; numbers of the pair; the pair; joined)
        self._queue: list[tuple[float, int, int, Item, Item, Item | None]] = []
        self._followers: list[tuple[Item, Item]] | None = []  # pairs that wait for the second round
        taken: set[Anchor] = set()
        for item in closed:
            self._add_closed(item, numbered)
            taken.update(item.nest.anchors)
        for anchor, unit in numbered.of_anchor.items():
            self._makers[anchor.node] = self._makers.get(anchor.node, 0) | 1 << unit
            if anchor not in taken:
                self._add(items.initial(anchor, anchors, self.materialised), 1 << unit)

    def _add_closed(self, item: Item, numbered: Units) -> None:
        """An item that is computed together with its dots, and joins nothing else."""
        dots = [s.node for s in item.chain.dots if s.node not in item.chain.again] if item.chain else [item.dot]
        units = union(1 << numbered.of_anchor[anchor] for anchor in item.nest.anchors)
        units |= union(1 << numbered.of_call[dot] for dot in dots if dot is not None)
        if self.dependencies.separated(units) & units:
            raise NestError("something between its dots and what follows needs the first and is needed by the second")
        self.dependencies.join(units)
        self._add(item, units)

    def run(self) -> list[Item]:
        """Join until no join saves time; the items in an order in which they can run.

        Maps of a reduction's result wait for a second round: until then the reduction may join a large nest as a
        column reduction, and the finisher that sums its partials takes such followers in for nothing.
        """
        for item in list(self.units):
            for other in self._partners(item):
                if self._number[other] < self._number[item]:
                    self._consider(other, item)
        self._join_all()
        waiting, self._followers = self._followers or [], None
        for a, b in waiting:
            if a in self.units and b in self.units:
                self._consider(a, b)
        self._join_all()
        return self._ordered()

    def separated(self, a: Item, b: Item) -> bool:
        """Joining a and b would make something both need each other."""
        return bool(self.dependencies.separated(self.units[a]) & self.units[b])

    def _join_all(self) -> None:
        while self._queue:
            _, _, _, a, b, joined = heapq.heappop(self._queue)
            if a not in self.units or b not in self.units or self.separated(a, b):
                continue
            if joined is None:
                found = self.known.join(a, b, self.anchors, self.materialised)
                if found is not None:
                    self._push(found[0], a, b, found[1])
                continue
            units = self._remove(a) | self._remove(b)
            self.dependencies.join(units)
            self._add(joined, units)
            for other in self._partners(joined):
                self._consider(other, joined)

    def _add(self, item: Item, units: int) -> None:
        self.units[item] = units
        self._number[item] = len(self._number)
        self._side[item.forward] |= units
        for node in item.trace.loaded():
            self._readers[node] = self._readers.get(node, 0) | units
        for unit in members(units):
            self._owner[unit] = item

    def _remove(self, item: Item) -> int:
        units = self.units.pop(item)
        for node in item.trace.loaded():
            self._readers[node] &= ~units
        return units

    def _partners(self, item: Item) -> Iterator[Item]:
        """Items of the same direction that touch a value that ``item`` touches, with nothing between them and it."""
        units = self.units[item]
        reads = item.trace.loaded()
        touching = union(self._readers.get(n, 0) for n in (*reads, *item.made))
        touching |= union(self._makers.get(n, 0) for n in reads)
        left = touching & self._side[item.forward] & ~units
        left &= ~self.dependencies.separated(units)
        while left:
            other = self._owner[lowest(left)]
            yield other
            left &= ~self.units[other]

    def _consider(self, a: Item, b: Item) -> None:
        """Queue two items (``a`` appeared first) if joining them could save time."""
        if a.closed or b.closed or not a.comparable(b):
            return
        if self._followers is not None and (a.follows(b) or b.follows(a)):
            self._followers.append((a, b))
            return
        most = self.known.most_saved(a, b)
        if most > 0:
            self._push(most, a, b, None)

    def _push(self, seconds: float, a: Item, b: Item, joined: Item | None) -> None:
        heapq.heappush(self._queue, (-seconds, self._number[a], self._number[b], a, b, joined))

    def _ordered(self) -> list[Item]:
        """Topological order of the items, library calls taken into account; ties by first unit."""
        return sorted(
            self.units, key=lambda i: (self.dependencies.before(self.units[i]).bit_count(), lowest(self.units[i]))
        )


def boundaries(search: Search, items: list[Item]) -> tuple[Boundary, ...]:
    """For each pair of nests where one reads the other's result: why they stayed apart."""
    readers: dict[Node, list[int]] = {}
    for number, item in enumerate(items):
        for node in item.trace.loaded():
            readers.setdefault(node, []).append(number)
    pairs = sorted({(n, m) for n, item in enumerate(items) for node in item.made for m in readers.get(node, ())})
    return tuple(
        Boundary(n, m, _reason(search, items[n], items[m]))
        for n, m in pairs
        if n < m and items[n].forward == items[m].forward
    )


def _reason(search: Search, a: Item, b: Item) -> str:
    if a.closed or b.closed:
        return "one of them is computed from the tiles of a product, in the product's own kernel"
    if search.separated(a, b):
        return "something between them (a library call or another kernel) needs the first and is needed by the second"
    try:
        merge_nests(a.trace, b.trace, search.materialised)
    except NestError as error:
        return str(error)
    return "joining them is predicted to be slower"
