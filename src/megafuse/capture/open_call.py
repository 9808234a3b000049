"""Which sizes of a call are open: found by holding two calls, alike but for the sizes of their arguments, together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megafuse.core.sizes import LEAST, Dim, is_open, open_size, settle

NAMES = ("n", "m", "k")  # of the open sizes; more than these differ at once in no call that is worth sharing
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides in elements


@dataclass(frozen=True)
class OpenCall:
    """Layouts of a call's tensors in open sizes; the i-th size is read at ``where[i]``: (tensor, dim)."""

    where: tuple[tuple[int, int], ...]
    layouts: tuple[Layout, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the open sizes."""
        return NAMES[: len(self.where)]

    def at(self, values: dict[str, int]) -> tuple[Layout, ...]:
        """The layouts at given sizes."""
        return settle(self.layouts, values)

    def values(self, layouts: Sequence[Layout]) -> dict[str, int] | None:
        """The sizes at which the call has these layouts; None where it has them at no sizes from 2 on."""
        if len(layouts) != len(self.layouts) or any(dim >= len(layouts[t][0]) for t, dim in self.where):
            return None
        values = {name: layouts[t][0][dim] for name, (t, dim) in zip(self.names, self.where, strict=True)}
        if min(values.values()) < LEAST:
            return None
        return values if all(map(_same, self.at(values), layouts)) else None


def _same(wanted: Layout, found: Layout) -> bool:
    """Equal shapes, and equal strides where these matter."""
    return wanted[0] == found[0] and all(
        n == 1 or s == t for n, s, t in zip(found[0], wanted[1], found[1], strict=True)
    )


def open_calls(first: Sequence[Layout], second: Sequence[Layout], arguments: int) -> list[OpenCall]:
    """How the sizes in which two calls differ may depend on open sizes, the most general way first.

    Only the first ``arguments`` tensors may differ. Sizes that differ in the same way are one open size; where several
    differ in several ways, these may be independent, or all follow the first.
    """
    if len(first) != len(second) or list(first[arguments:]) != list(second[arguments:]):
        return []
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    for t, ((a, _), (b, _)) in enumerate(zip(first, second, strict=True)):
        if len(a) != len(b):
            return []
        for d, pair in enumerate(zip(a, b, strict=True)):
            if pair[0] != pair[1]:
                pairs.setdefault(pair, (t, d))
    if not pairs or any(min(pair) < LEAST for pair in pairs):
        return []
    ways = [{pair: _size(n) for n, pair in enumerate(pairs)}] if len(pairs) <= len(NAMES) else []
    ways += [_following(list(pairs))] if len(pairs) > 1 else []
    out = []
    for sizes in filter(None, ways):
        where = tuple(place for pair, place in pairs.items() if repr(sizes.get(pair)) in NAMES)
        layouts = [_layout(a, b, sizes) for a, b in zip(first, second, strict=True)]
        if all(layouts):
            out.append(OpenCall(where, tuple(layout for layout in layouts if layout)))
    return out


def _size(number: int) -> Any:
    return open_size(Dim(NAMES[number], 64))


def _following(pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Any]:
    """Every size as a whole multiple of the first plus a number; empty where one is not."""
    low, high = pairs[0]
    sizes: dict[tuple[int, int], Any] = {}
    for a, b in pairs:
        slope, rest = divmod(b - a, high - low)
        if rest or slope < 1:
            return {}
        sizes[a, b] = _size(0) * slope + (a - slope * low)
    return sizes


def _layout(first: Layout, second: Layout, sizes: dict[tuple[int, int], Any]) -> Layout | None:
    """One tensor's layout; None where its strides change in another way than those of a dense tensor."""
    shape = tuple(a if a == b else sizes[a, b] for a, b in zip(first[0], second[0], strict=True))
    if first[1] == second[1]:
        return shape, first[1]
    order = sorted(range(len(shape)), key=lambda d: (first[1][d], -d))
    if order != sorted(range(len(shape)), key=lambda d: (second[1][d], -d)):
        return None
    strides = [0] * len(shape)
    step: Any = 1
    for d in order:
        strides[d] = step
        step = step * shape[d]
    found = shape, tuple(strides)
    names = {repr(s): (a, b) for (a, b), s in sizes.items() if is_open(s) and repr(s) in NAMES}
    at = [settle(found, {name: pair[i] for name, pair in names.items()}) for i in (0, 1)]
    return found if _same(at[0], first) and _same(at[1], second) else None
