"""The dependency graph over anchors and library calls, and how it contracts as some of them are joined.

A set of units is an integer with bit ``u`` for unit ``u``: to unite or compare sets of thousands is one operation.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from megafuse.fusion.anchors import Anchors
from megafuse.ir.graph import Graph, Node
from megafuse.ir.nest import Anchor
from megafuse.ir.types import Dot, Opaque


@dataclass(frozen=True)
class Units:
    """Anchors and library calls, numbered in topological order. ``needs[u]``: the set of units that ``u`` reads."""

    of_anchor: Mapping[Anchor, int]
    needs: tuple[int, ...]
    of_call: Mapping[Node, int] = field(default_factory=dict)


def number_units(graph: Graph, anchors: Anchors) -> Units:
    """Number anchors and library calls and find what each reads."""
    by_node: dict[Node, list[Anchor | None]] = {}
    for one in anchors.order:
        by_node.setdefault(one.node, []).append(one)
    of_anchor: dict[Anchor, int] = {}
    of_call: dict[Node, int] = {}
    needs: list[int] = []
    read: dict[Node, int] = {}  # the units that an evaluation of a node reads: its own where it is in memory
    for node in graph.nodes:
        below = union(read[a] for a in node.args)
        own = 0
        for anchor in by_node.get(node) or ([None] if node.is_a(Dot, Opaque) else []):
            own |= 1 << len(needs)
            if anchor is not None:
                of_anchor[anchor] = len(needs)
            else:
                of_call[node] = len(needs)
            needs.append(below if anchor is None or anchor.part is None else read[anchor.value])
        read[node] = own or below
    return Units(of_anchor, tuple(needs), of_call)


class Dependencies:
    """What must be done before and after each unit, directly or not, where joined units count as one."""

    def __init__(self, units: Units) -> None:
        count = len(units.needs)
        self._needs = units.needs
        self._users = [0] * count
        self._joined = [1 << u for u in range(count)]
        self._before = list(self._joined)  # each set includes the unit itself
        self._after = list(self._joined)
        for u, needs in enumerate(units.needs):
            for n in members(needs):
                self._users[n] |= 1 << u
                self._before[u] |= self._before[n]
        for u in reversed(range(count)):
            for n in members(self._users[u]):
                self._after[u] |= self._after[n]

    def copy(self) -> Dependencies:
        """The same state, to be contracted further on its own."""
        new = object.__new__(Dependencies)
        new._needs, new._users = self._needs, self._users
        new._joined, new._before, new._after = list(self._joined), list(self._before), list(self._after)
        return new

    def join(self, units: int) -> None:
        """From now on ``units`` (each set that was joined before wholly inside or outside) are done at once."""
        before = [self._before[u] for u in members(units)]
        after = [self._after[u] for u in members(units)]
        for u in members(units):
            self._joined[u] = units
        for sets, new, reached in ((self._before, before, after), (self._after, after, before)):
            everything = union(new)
            for u in members(union(reached) & ~functools.reduce(operator.and_, reached)):  # the others have it already
                sets[u] |= everything

    def before(self, units: int) -> int:
        """``units``, which are joined, and all that must be done before them."""
        return self._before[lowest(units)]

    def separated(self, units: int) -> int:
        """The units that cannot be joined with ``units``: one of both needs something that needs the other."""
        out = 0
        for near, beyond in ((self._needs, self._before), (self._users, self._after)):
            rest = union(near[u] for u in members(units)) & ~units
            while rest:
                u = lowest(rest)
                out |= beyond[u] & ~self._joined[u]
                rest &= ~self._joined[u]
        return out


def members(units: int) -> Iterator[int]:
    """The units of a set, in rising order."""
    while units:
        u = lowest(units)
        yield u
        units &= units - 1


def lowest(units: int) -> int:
    """The first unit of a set that is not empty."""
    return (units & -units).bit_length() - 1


def union(sets: Iterable[int]) -> int:
    """All units of some sets."""
    out = 0
    for one in sets:
        out |= one
    return out
