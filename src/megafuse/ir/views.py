"""Strided views: which nodes are views of a buffer, and which layout of a buffer makes a view contiguous."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.index import Affine, Axis, Index, NeedSplit, NotAffine, combine, pull_back
from megafuse.ir.types import Expand, Permute, Reshape, Slice

VIEW_MOVES = (Permute, Reshape, Expand, Slice)


@dataclass(frozen=True)
class Strided:
    """Shape, strides and offset in elements of a view into its base."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def view_base(node: Node) -> Node:
    """Walk back through moves that can be views to the value that holds the elements."""
    while isinstance(node.attrs, VIEW_MOVES):
        node = node.args[0]
    return node


def memory_of(node: Node, materialised: frozenset[Node]) -> Node:
    """The materialised value of which ``node`` is a view (itself, where it has memory of its own)."""
    base = node
    while base not in materialised and base is not view_base(base):
        base = base.args[0]
    return base


def index_into_base(node: Node, base: Node | None = None) -> tuple[list[list[Axis]], Index, dict[str, int]]:
    """Index of ``base`` (``view_base(node)``) in fresh axes: (axes of each dim of ``node``, base index, axis sizes).

    Raises:
        NotAffine: a reshape on the way shares no factorisation with the dims.
    """
    dims = [[Axis(f"v{d}", n)] if n != 1 else [] for d, n in enumerate(node.shape)]
    for _ in range(64):
        sizes = {a.name: a.size for dim in dims for a in dim}
        index: Index = tuple(_dim_index(dim) for dim in dims)
        current = node
        try:
            while current is not base and isinstance(current.attrs, VIEW_MOVES):
                ((current, index, _),) = pull_back(current, index, sizes)
            return dims, index, sizes
        except NeedSplit as need:
            dims = [_split_dim(dim, need.axis, need.inner) for dim in dims]
    raise NotAffine("axes were split 64 times without an end")


def _dim_index(dim: Sequence[Axis]) -> Affine:
    strides = contiguous_strides([a.size for a in dim])
    return Affine(tuple((a.name, s) for a, s in zip(dim, strides, strict=True)))


def _split_dim(dim: list[Axis], axis: str, inner: int) -> list[Axis]:
    out: list[Axis] = []
    for a in dim:
        out.extend([Axis(axis + "a", a.size // inner), Axis(axis + "b", inner)] if a.name == axis else [a])
    return out


def strided_view(node: Node, base_strides: Sequence[int], base: Node | None = None) -> Strided | None:
    """``node`` as a view of ``base`` (``view_base(node)``) laid out with ``base_strides``; None where it is none."""
    if 0 in node.shape:
        return Strided(node.shape, contiguous_strides(node.shape), 0)
    try:
        dims, index, _ = index_into_base(node, base)
    except NotAffine:
        return None
    offset = combine(index, base_strides)
    steps = dict(offset.terms)
    strides = []
    for dim in dims:
        if not dim:
            strides.append(0)
            continue
        inner = steps.get(dim[-1].name, 0)
        expected = inner
        for a in reversed(dim):
            if steps.get(a.name, 0) != expected:
                return None
            expected *= a.size
        if inner < 0:
            return None  # a flip: PyTorch has no negative strides
        strides.append(inner)
    return Strided(node.shape, _fill_unit_dims(node.shape, strides), offset.const)


def _fill_unit_dims(shape: Sequence[int], strides: list[int]) -> tuple[int, ...]:
    """Give dims of size 1 the stride a dense tensor would have there."""
    following = 1
    out = list(strides)
    for d in range(len(shape) - 1, -1, -1):
        if shape[d] == 1:
            out[d] = following
        else:
            following = max(following, abs(out[d]) * shape[d])
    return tuple(out)


def layout_for(node: Node, strides: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of ``view_base(node)`` under which ``node`` has ``strides``; None where no dense layout does.

    ``strides`` must describe ``node`` as dense and non-overlapping.
    """
    base = view_base(node)
    try:
        dims, index, _ = index_into_base(node)
    except NotAffine:
        return None
    step = {a.name: s for dim, stride in zip(dims, strides, strict=True) for a, s in _axis_strides(dim, stride)}
    out = []
    for ix, n in zip(index, base.shape, strict=True):
        unit = [(name, s) for name, s in ix.terms if abs(s) == 1]
        if n == 1:
            out.append(0)
            continue
        if len(unit) != 1 or ix.const or any(step[nm] != s * step[unit[0][0]] for nm, s in ix.terms):
            return None
        out.append(step[unit[0][0]])
    filled = _fill_unit_dims(base.shape, out)
    return filled if is_dense(base.shape, filled) and _same(node, strides, filled) else None


def _axis_strides(dim: Sequence[Axis], stride: int) -> list[tuple[Axis, int]]:
    inner = contiguous_strides([a.size for a in dim])
    return [(a, stride * s) for a, s in zip(dim, inner, strict=True)]


def _same(node: Node, strides: Sequence[int], base_strides: Sequence[int]) -> bool:
    view = strided_view(node, base_strides)
    return view is not None and same_strides(node.shape, view.strides, strides)


def same_strides(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Equal strides where the size is not 1."""
    return all(n == 1 or x == y for n, x, y in zip(shape, a, b, strict=True)) or math.prod(shape) == 0


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True when the strides are a permutation of a contiguous layout (no gaps, no overlap)."""
    expected = 1
    for stride, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= n
    return True


def is_disjoint(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True when no two elements share memory by the order of strides alone; there may be gaps."""
    reach = 0
    for stride, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride <= reach:
            return False
        reach += stride * (n - 1)
    return True
