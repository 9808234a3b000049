"""Simplification rules of moves: index maps compose, and constants do not move.

Each rule's docstring is its proof; none changes a value, since a move computes nothing. Nested permutations, reshapes
and expansions compose in the builder already.
"""

from __future__ import annotations

import math
import struct

from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Node
from megafuse.ir.rewrite import Rule, rule
from megafuse.ir.types import Concat, Const, Expand, Pad, Permute, Reshape, Slice


def full_value(node: Node) -> Node | None:
    """The constant that fills ``node`` when it is a constant under reshapes and expansions, else None."""
    while node.is_a(Reshape, Expand):
        node = node.args[0]
    return node if node.is_a(Const) else None


def scalar_of(node: Node) -> Node | None:
    """``full_value`` when a map may read the constant itself: when the tensor's type does not round it."""
    c = full_value(node)
    return c if c and isinstance(c.attrs, Const) and representable(c.attrs.value, c.dtype) else None


def representable(value: float, dtype: DType) -> bool:
    """True when a constant of this value is the same in ``dtype`` as in the type ``dtype`` computes in."""
    if dtype.compute is dtype or not math.isfinite(value):
        return True
    try:
        wide = struct.pack("<f", value)
        if dtype is DType.BF16:
            return wide[:2] == b"\0\0"
        return struct.unpack("<e", struct.pack("<e", value)) == struct.unpack("<f", wide)
    except OverflowError:
        return False


def zero_pad(node: Node) -> tuple[int, int, int] | None:
    """``(axis, lo, hi)`` of a node that is its argument at ``lo:hi`` of one axis and zero elsewhere, else None."""
    if not isinstance(node.attrs, Pad) or node.attrs.value != 0:
        return None
    inner = node.args[0].shape
    axes = [i for i, (a, n) in enumerate(zip(inner, node.shape, strict=True)) if a != n]
    if len(axes) != 1:
        return None
    lo = node.attrs.lo[axes[0]]
    return axes[0], lo, lo + inner[axes[0]]


def _swap(sizes: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*sizes[:axis], value, *sizes[axis + 1 :])


def move_of_full(b: Builder, node: Node) -> Node | None:
    """Every element of the argument is one constant, so every element of the result is."""
    c = full_value(node.args[0]) if node.shape else scalar_of(node.args[0])
    return b.broadcast(c, node.shape) if c else None


permute_of_full = Rule(Permute, move_of_full)
reshape_of_full = Rule(Reshape, move_of_full)
expand_of_full = Rule(Expand, move_of_full)
slice_of_full = Rule(Slice, move_of_full)


@rule(Permute)
def permute_of_units(b: Builder, node: Node) -> Node | None:
    """A permutation that keeps the order of the dims larger than 1 keeps the row-major order: it is a reshape."""
    assert isinstance(node.attrs, Permute)
    x = node.args[0]
    order = [p for p in node.attrs.perm if x.shape[p] != 1]
    return b.reshape(x, node.shape) if order == sorted(order) else None


# ---- slices


@rule(Slice)
def unit_step(b: Builder, node: Node) -> Node | None:
    """The step of a dim of one element is never taken: 1 is as good as any."""
    assert isinstance(node.attrs, Slice)
    steps = tuple(1 if size == 1 else step for step, size in zip(node.attrs.steps, node.shape, strict=True))
    return b.slice(node.args[0], node.attrs.starts, node.shape, steps)


@rule(Slice)
def slice_of_slice(b: Builder, node: Node) -> Node | None:
    """s1 + t1 * (s2 + t2 * i) = (s1 + t1 * s2) + (t1 * t2) * i."""
    assert isinstance(node.attrs, Slice)
    x = node.args[0]
    if not isinstance(x.attrs, Slice) or not node.type.numel:
        return None
    dims = list(zip(x.attrs.starts, x.attrs.steps, node.attrs.starts, node.attrs.steps, strict=True))
    return b.slice(x.args[0], [s1 + t1 * s2 for s1, t1, s2, _ in dims], node.shape, [t1 * t2 for _, t1, _, t2 in dims])


def _range(node: Node, axis: int) -> tuple[int, int]:
    """Smallest and largest index that a non-empty slice reads along ``axis``."""
    assert isinstance(node.attrs, Slice)
    first = node.attrs.starts[axis]
    last = first + node.attrs.steps[axis] * (node.shape[axis] - 1)
    return min(first, last), max(first, last)


@rule(Slice)
def slice_of_concat(b: Builder, node: Node) -> Node | None:
    """A slice that reads within one part is a slice of that part."""
    assert isinstance(node.attrs, Slice)
    x = node.args[0]
    if not isinstance(x.attrs, Concat) or not node.type.numel:
        return None
    axis, offset = x.attrs.axis, 0
    lowest, highest = _range(node, axis)
    for part in x.args:
        end = offset + part.shape[axis]
        if offset <= lowest and highest < end:
            starts = _swap(node.attrs.starts, axis, node.attrs.starts[axis] - offset)
            return b.slice(part, starts, node.shape, node.attrs.steps)
        offset = end
    return None


@rule(Slice)
def slice_of_pad(b: Builder, node: Node) -> Node | None:
    """A slice that reads only the padded value's own range slices it; one that misses it in some dim is constant."""
    assert isinstance(node.attrs, Slice)
    x = node.args[0]
    if not isinstance(x.attrs, Pad) or not node.type.numel:
        return None
    lo, inner = x.attrs.lo, x.args[0]
    ranges = [_range(node, i) for i in range(node.type.rank)]
    dims = list(zip(ranges, lo, inner.shape, strict=True))
    if any(high < start or low >= start + size for (low, high), start, size in dims):
        return b.broadcast(b.const(x.attrs.value, node.dtype), node.shape)
    if all(start <= low and high < start + size for (low, high), start, size in dims):
        starts = [s - start for s, start in zip(node.attrs.starts, lo, strict=True)]
        return b.slice(inner, starts, node.shape, node.attrs.steps)
    return None


@rule(Slice)
def slice_of_expand(b: Builder, node: Node) -> Node | None:
    """Along a repeated dim every index reads the same element: slice the other dims, then repeat."""
    assert isinstance(node.attrs, Slice)
    x = node.args[0]
    if not x.is_a(Expand) or not node.type.numel:
        return None
    inner = x.args[0]
    one = [size == 1 for size in inner.shape]
    starts = [0 if u else s for u, s in zip(one, node.attrs.starts, strict=True)]
    steps = [1 if u else t for u, t in zip(one, node.attrs.steps, strict=True)]
    sizes = [1 if u else n for u, n in zip(one, node.shape, strict=True)]
    return b.expand(b.slice(inner, starts, sizes, steps), node.shape)


# ---- pads and concatenations


@rule(Pad)
def pad_of_pad(b: Builder, node: Node) -> Node | None:
    """Two pads with one value are one pad; the offsets add."""
    assert isinstance(node.attrs, Pad)
    x = node.args[0]
    if not isinstance(x.attrs, Pad) or repr(x.attrs.value) != repr(node.attrs.value):
        return None
    lo = [p + q for p, q in zip(x.attrs.lo, node.attrs.lo, strict=True)]
    return b.pad(x.args[0], lo, node.shape, node.attrs.value)


@rule(Concat)
def concat_of_concat(b: Builder, node: Node) -> Node | None:
    """A concatenation inside one along the same axis: its parts take its place."""
    assert isinstance(node.attrs, Concat)
    axis = node.attrs.axis
    if not any(isinstance(a.attrs, Concat) and a.attrs.axis == axis for a in node.args):
        return None
    nested = ((a.args if isinstance(a.attrs, Concat) and a.attrs.axis == axis else (a,)) for a in node.args)
    return b.concat([part for parts in nested for part in parts], axis)


@rule(Concat)
def concat_of_slices(b: Builder, node: Node) -> Node | None:
    """Slices of one value that follow each other along the axis are one slice; of the whole value, the value."""
    assert isinstance(node.attrs, Concat)
    parts: list[Node] = []
    for part in node.args:
        joined = _join(b, parts[-1], part, node.attrs.axis) if parts else None
        parts[-1:] = [joined] if joined else [*parts[-1:], part]
    return b.concat(parts, node.attrs.axis) if len(parts) < len(node.args) else None


def _join(b: Builder, left: Node, right: Node, axis: int) -> Node | None:
    """The slice that reads what ``left`` and then ``right`` read, when there is one."""
    if not (isinstance(left.attrs, Slice) and isinstance(right.attrs, Slice)) or left.args != right.args:
        return None
    step = left.attrs.steps[axis]
    follows = left.attrs.starts[axis] + step * left.shape[axis]
    moved = Slice(_swap(right.attrs.starts, axis, left.attrs.starts[axis]), right.attrs.steps)
    if moved != left.attrs or right.attrs.starts[axis] != follows:
        return None
    sizes = _swap(left.shape, axis, left.shape[axis] + right.shape[axis])
    return b.slice(left.args[0], left.attrs.starts, sizes, left.attrs.steps)


MOVE_RULES: tuple[Rule, ...] = (
    permute_of_full,
    reshape_of_full,
    expand_of_full,
    slice_of_full,
    permute_of_units,
    unit_step,
    slice_of_slice,
    slice_of_concat,
    slice_of_pad,
    slice_of_expand,
    pad_of_pad,
    concat_of_concat,
    concat_of_slices,
)
