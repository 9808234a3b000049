"""What must be done before what, and how that contracts as several of the things to do are done at once.

A set of units is an integer with bit ``u`` for unit ``u``: to unite or compare sets of thousands is one operation.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence


class Dependencies:
    """What must be done before and after each unit, directly or not, where joined units count as one."""

    def __init__(self, needs: Sequence[int]) -> None:
        """``needs[u]``: the units that ``u`` reads, all of them before it."""
        count = len(needs)
        self._needs = needs
        self._users = [0] * count
        self._joined = [1 << u for u in range(count)]
        self._before = list(self._joined)  # each set includes the unit itself
        self._after = list(self._joined)
        for u, read in enumerate(needs):
            for n in members(read):
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

    def after(self, units: int) -> int:
        """``units``, which are joined, and all that must be done after them."""
        return self._after[lowest(units)]

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
