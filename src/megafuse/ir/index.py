"""Index algebra: affine indices over named axes, and how each move maps an index of its result to one of its argument.

Every tensor dim inside a loop nest is indexed by an :class:`Affine` expression over *atomic* axes. All moves keep
indices affine as long as axes are fine enough: a reshape that cuts through an axis asks for it to be split
(:class:`NeedSplit`), after which the whole nest is traced again with the two finer axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megafuse.core.sizes import OpenSize, typical
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.types import Concat, Expand, Pad, Permute, Reshape, Slice


@dataclass(frozen=True)
class Axis:
    """An atomic loop axis. Names are unique in a phase; a fixed axis has one name in all phases of its kernel."""

    name: str
    size: int


class Affine:
    """``sum(stride * axis) + const``: an element offset in a buffer, or an index value. ``terms``: (axis name, stride).

    Immutable; its hash and axes are computed once, since planning compares millions of them.
    """

    __slots__ = ("_hash", "axes", "const", "terms")

    def __init__(self, terms: tuple[tuple[str, int], ...], const: int = 0) -> None:
        self.terms = terms
        self.const = const
        self.axes = frozenset(name for name, _ in terms)
        self._hash = hash((terms, const))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Affine):
            return NotImplemented
        return self._hash == other._hash and self.terms == other.terms and self.const == other.const

    def __repr__(self) -> str:
        return f"Affine(terms={self.terms}, const={self.const})"

    def shift(self, amount: int) -> Affine:
        """The same plus ``amount``."""
        return Affine(self.terms, self.const + amount) if amount else self

    def scale(self, factor: int) -> Affine:
        """The same times ``factor``."""
        return self if factor == 1 else Affine(tuple((n, s * factor) for n, s in self.terms), self.const * factor)


ZERO = Affine(())
Index = tuple[Affine, ...]


@dataclass(frozen=True)
class Guard:
    """``lo <= index < hi``: where an access is allowed (parts of a concat or the inside of a pad)."""

    index: Affine
    lo: int
    hi: int


class NeedSplit(Exception):
    """A reshape cuts through ``axis``: split it into (size / inner, inner) and trace again."""

    def __init__(self, axis: str, inner: int) -> None:
        super().__init__(f"axis {axis} must be split at {inner}")
        self.axis, self.inner = axis, inner


class NotAffine(Exception):
    """The index of a reshape's argument is not affine in the nest's axes (the two shapes share no factorisation)."""


def axis_index(axes: Sequence[Axis]) -> Affine:
    """The row-major flattened index of ``axes``."""
    strides = contiguous_strides([a.size for a in axes])
    return Affine(tuple((a.name, s) for a, s in zip(axes, strides, strict=True) if a.size != 1))


def combine(index: Sequence[Affine], strides: Sequence[int]) -> Affine:
    """``sum(index[d] * strides[d])``: the element offset of a tensor element, terms by falling stride."""
    total: dict[str, int] = {}
    const = 0
    for ix, stride in zip(index, strides, strict=True):
        const += ix.const * stride
        for name, s in ix.terms:
            total[name] = total.get(name, 0) + s * stride
    terms = sorted(((n, s) for n, s in total.items() if s), key=lambda t: -abs(typical(t[1])))
    return Affine(tuple(terms), const)


def split_linear(linear: Affine, shape: Sequence[int], sizes: Mapping[str, int]) -> Index:
    """Write a row-major linear index as one affine index per dim of ``shape``.

    Raises:
        NeedSplit: an axis straddles a dim boundary and can be cut there.
        NotAffine: it cannot.
    """
    strides = contiguous_strides(shape)
    terms: list[list[tuple[str, int]]] = [[] for _ in shape]
    consts = [0] * len(shape)
    base = linear.const - sum(-s * (sizes[n] - 1) for n, s in linear.terms if s < 0)
    for name, stride in linear.terms:
        dim = _dim_of(abs(stride), sizes[name], shape, strides, name)
        step = abs(stride) // strides[dim]
        terms[dim].append((name, step if stride > 0 else -step))
        if stride < 0:
            consts[dim] += step * (sizes[name] - 1)
    if base < 0:
        raise NotAffine(f"negative base of {linear}")
    for dim, stride in enumerate(strides):
        consts[dim] += base // stride if shape[dim] != 1 else 0
        base = base % stride if shape[dim] != 1 else base
    out = tuple(Affine(tuple(t), c) for t, c in zip(terms, consts, strict=True))
    if base or any(not _within(ix, n, sizes) for ix, n in zip(out, shape, strict=True)):
        raise NotAffine(f"{linear} does not fall into dims {tuple(shape)}")
    return out


def _dim_of(stride: int, size: int, shape: Sequence[int], strides: Sequence[int], name: str) -> int:
    for dim, n in enumerate(shape):
        if n != 1 and n == size and strides[dim] == stride:
            return dim
    for dim in range(len(shape) - 1, -1, -1):
        below, above = strides[dim], strides[dim] * shape[dim]
        if shape[dim] == 1 or not below <= stride < above:
            continue
        if stride % below:
            raise NotAffine(f"axis {name} of stride {stride} is not a multiple of {below}")
        if stride * size <= above:
            return dim
        inner, rest = divmod(above, stride)
        if rest == 0 and inner > 1 and size % inner == 0:
            raise NeedSplit(name, inner)
        raise NotAffine(f"axis {name} ({size} steps of {stride}) straddles a boundary at {above}")
    raise NotAffine(f"axis {name} of stride {stride} lies outside {tuple(shape)}")


def _within(index: Affine, size: int, sizes: Mapping[str, int]) -> bool:
    low = high = index.const
    for name, stride in index.terms:
        if stride > 0:
            high += stride * (sizes[name] - 1)
        else:
            low += stride * (sizes[name] - 1)
    return low >= 0 and high < max(size, 1)


def pull_back(node: Node, index: Index, sizes: Mapping[str, int]) -> list[tuple[Node, Index, tuple[Guard, ...]]]:
    """For a move at ``index``: the arguments read, their indices, and where each is the one read.

    All moves but ``Concat`` have one argument; ``Pad`` and ``Concat`` guard theirs.

    Raises:
        NeedSplit, NotAffine: see :func:`split_linear`.
    """
    attrs = node.attrs
    arg = node.args[0]
    if isinstance(attrs, Permute):
        out = [ZERO] * len(index)
        for i, p in enumerate(attrs.perm):
            out[p] = index[i]
        return [(arg, tuple(out), ())]
    if isinstance(attrs, Expand):
        return [(arg, tuple(ZERO if n == 1 else ix for ix, n in zip(index, arg.shape, strict=True)), ())]
    if isinstance(attrs, Slice):
        moved = tuple(ix.scale(st).shift(s) for ix, s, st in zip(index, attrs.starts, attrs.steps, strict=True))
        return [(arg, moved, ())]
    if isinstance(attrs, Pad):
        moved = tuple(ix.shift(-lo) for ix, lo in zip(index, attrs.lo, strict=True))
        ranges = zip(moved, arg.shape, node.shape, strict=True)
        return [(arg, moved, tuple(Guard(ix, 0, n) for ix, n, full in ranges if n != full))]
    if isinstance(attrs, Reshape):
        return [(arg, _reshape_index(index, node.shape, arg.shape, sizes), ())]
    assert isinstance(attrs, Concat)
    return _pull_back_concat(node, index, attrs.axis)


def _reshape_index(index: Index, shape: tuple[int, ...], into: tuple[int, ...], sizes: Mapping[str, int]) -> Index:
    """Index under shape ``into``: dims that the reshape leaves alone keep theirs, runs that it cuts anew are split."""
    out: list[Affine] = []
    try:
        for ours, theirs, kept in _reshape_plan(shape, into):
            if kept is None:
                out.extend(split_linear(combine(index[ours], contiguous_strides(shape[ours])), into[theirs], sizes))
            else:
                out.extend(ZERO if dim is None else index[dim] for dim in kept)
    except OpenSize as question:
        raise NotAffine(f"{question}: it depends on the size") from None
    return tuple(out)


@functools.lru_cache(maxsize=4096)
def _reshape_plan(
    shape: tuple[int, ...], into: tuple[int, ...]
) -> tuple[tuple[slice, slice, tuple[int | None, ...] | None], ...]:
    """Per run of dims: (dims of ``shape``, dims of ``into``, where each of the latter comes from; None: cut anew)."""
    plan: list[tuple[slice, slice, tuple[int | None, ...] | None]] = []
    for ours, theirs in _dim_runs(shape, into):
        real = [d for d in range(ours.start, ours.stop) if shape[d] != 1]
        if [shape[d] for d in real] == [n for n in into[theirs] if n != 1]:
            left = iter(real)
            plan.append((ours, theirs, tuple(next(left) if n != 1 else None for n in into[theirs])))
        else:
            plan.append((ours, theirs, None))
    return tuple(plan)


def _dim_runs(a: Sequence[int], b: Sequence[int]) -> list[tuple[slice, slice]]:
    """Cut two shapes of equal size into the shortest runs of dims with equal products."""
    runs = []
    i = j = 0
    while i < len(a) or j < len(b):
        start_i, start_j = i, j
        left = right = 1
        while i == start_i or j == start_j or left != right:
            if i < len(a) and (left <= right or j == len(b)):
                left *= a[i]
                i += 1
            elif j < len(b):
                right *= b[j]
                j += 1
            else:
                break
        runs.append((slice(start_i, i), slice(start_j, j)))
    return runs


def _pull_back_concat(node: Node, index: Index, axis: int) -> list[tuple[Node, Index, tuple[Guard, ...]]]:
    out: list[tuple[Node, Index, tuple[Guard, ...]]] = []
    start = 0
    for part in node.args:
        moved = tuple(ix.shift(-start) if d == axis else ix for d, ix in enumerate(index))
        out.append((part, moved, (Guard(moved[axis], 0, part.shape[axis]),)))
        start += part.shape[axis]
    return out


def guard_decides(guard: Guard, sizes: Mapping[str, int]) -> bool | None:
    """True or False where the guard holds or fails for every value of its axes, else None."""
    low = high = guard.index.const
    try:
        for name, stride in guard.index.terms:
            low += min(0, stride * (sizes[name] - 1))
            high += max(0, stride * (sizes[name] - 1))
        if guard.lo <= low and high < guard.hi:
            return True
        return False if high < guard.lo or low >= guard.hi else None
    except OpenSize:
        return None


def substitute_axis(index: Affine, axis: str, parts: Sequence[tuple[str, int]]) -> Affine:
    """Replace ``axis`` by ``sum(stride * part)``."""
    out: list[tuple[str, int]] = []
    for name, stride in index.terms:
        out.extend((p, stride * s) for p, s in parts) if name == axis else out.append((name, stride))
    return Affine(tuple(out), index.const)


def footprint(index: Affine, sizes: Mapping[str, int]) -> int:
    """Number of distinct elements that an affine offset touches (axes with a non-zero stride)."""
    return math.prod(sizes[name] for name, stride in index.terms if stride)
