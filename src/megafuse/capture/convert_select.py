"""Converters that find the place of an extreme value, and that write one position of each line of a tensor.

One position a line is a comparison with the index along the dim: no scatter, no atomics. It writes the whole line, as a
result of that size does anyway. An index out of range gives NaN, where ATen's kernel stops the device.
"""

from __future__ import annotations

import math

from megafuse.capture.context import Context, Operand, Unconverted
from megafuse.capture.convert_reduce import extreme
from megafuse.capture.opaque import IN_NO_ORDER
from megafuse.capture.registry import converts
from megafuse.core.dtypes import DType
from megafuse.ir.graph import Node


def place_of(cx: Context, fn: str, x: Node, axis: int) -> Node:
    """Index of the first extreme along a dim, which stays as 1; NaN is more extreme than any number."""
    b, v = cx.b, cx.up(x)
    top = b.reduce(fn, v, [axis], keepdim=True)
    hit = b.map("eq", v, top)
    if x.dtype.is_float:
        hit = b.map("or", hit, b.map("isnan", v))
    index = b.iota(x.shape, axis, DType.I32 if x.shape[axis] < 2**31 else DType.I64)
    first = b.reduce("min", b.map("where", hit, index, x.shape[axis]), [axis], keepdim=True)
    return b.cast(first, DType.I64)


def _place(cx: Context, fn: str, x: Node, dim: int | None, index: int) -> Node:
    if x.dtype is DType.BOOL:
        raise Unconverted("extreme of bools")
    type_ = cx.outs[index]
    assert type_ is not None
    if not x.type.rank:
        return cx.full(0, type_)
    flat = cx.b.reshape(x, (x.type.numel,)) if dim is None else x
    return cx.b.reshape(place_of(cx, fn, flat, 0 if dim is None else dim % x.type.rank), type_.shape)


@converts("argmax")
def argmax(cx: Context, x: Node, dim: int | None = None, keepdim: bool = False) -> Node:
    """Place of the first maximum along a dim, or in the flattened tensor."""
    return _place(cx, "max", x, dim, 0)


@converts("argmin")
def argmin(cx: Context, x: Node, dim: int | None = None, keepdim: bool = False) -> Node:
    """Place of the first minimum along a dim, or in the flattened tensor."""
    return _place(cx, "min", x, dim, 0)


@converts("max.dim")
def max_dim(cx: Context, x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
    """Maximum along a dim and its (first) place."""
    return extreme(cx, "max", x, dim, keepdim), _place(cx, "max", x, dim, 1)


@converts("min.dim")
def min_dim(cx: Context, x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
    """Minimum along a dim and its (first) place."""
    return extreme(cx, "min", x, dim, keepdim), _place(cx, "min", x, dim, 1)


class OnePlace:
    """An index of one position for each line of ``x`` along a dim: where it points, and which lines it misses."""

    def __init__(self, cx: Context, x: Node, dim: int, index: Node) -> None:
        b, self.axis = cx.b, dim % x.type.rank
        index = b.cast(index, DType.I64)
        self.hit = b.map("eq", b.iota(x.shape, self.axis), b.broadcast(index, x.shape))
        self.outside = b.map("or", b.map("lt", index, 0), b.map("ge", index, x.shape[self.axis]))

    @staticmethod
    def fits(x: Node, dim: int, index: Node) -> bool:
        """Whether ``index`` is one, for floats."""
        axis = dim % max(x.type.rank, 1)
        return x.dtype.is_float and x.type.rank > 0 and index.shape == (*x.shape[:axis], 1, *x.shape[axis + 1 :])


def _scatter(cx: Context, x: Node, dim: int, index: Node, new: Operand) -> Node:
    if not OnePlace.fits(x, dim, index):
        raise Unconverted("scatters by index")
    place = OnePlace(cx, x, dim, index)
    written = cx.b.map("where", place.hit, new, x)
    return cx.finish(cx.b.map("where", place.outside, math.nan, written))


@converts("scatter.src")
def scatter(cx: Context, x: Node, dim: int, index: Node, source: Node) -> Node:
    """``x`` with one position of each line replaced."""
    if source.shape != index.shape:
        raise Unconverted("scatters by index")
    return _scatter(cx, x, dim, index, source)


@converts("scatter.value")
def scatter_value(cx: Context, x: Node, dim: int, index: Node, value: float) -> Node:
    """``x`` with one position of each line set to a number."""
    return _scatter(cx, x, dim, index, value)


@converts("scatter_add")
def scatter_add(cx: Context, x: Node, dim: int, index: Node, source: Node) -> Node:
    """``x`` with a value added to one position of each line."""
    if source.shape != index.shape or not OnePlace.fits(x, dim, index):
        raise Unconverted(IN_NO_ORDER)
    total = cx.b.map("add", cx.up(x), cx.b.broadcast(cx.up(source), x.shape))
    return _scatter(cx, x, dim, index, cx.finish(total))
