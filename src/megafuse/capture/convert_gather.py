"""Converters that read a tensor by index: embeddings, selections, gathers.

They become loads by index, which need the table in memory. One element of each line of a computed value (the class in a
loss, after a softmax) is a comparison with the index instead: the line is at hand, and needs no memory. An index out of
range gives NaN (0 in tables of integers), where ATen's kernels stop the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megafuse.capture.context import Context, Unconverted
from megafuse.capture.convert_move import cut
from megafuse.capture.convert_select import OnePlace
from megafuse.capture.registry import converts
from megafuse.core.dtypes import DType
from megafuse.ir.graph import Node, broadcast_shapes
from megafuse.ir.types import Dot, Input, Opaque, Pick
from megafuse.ir.views import view_base


def read_at(cx: Context, x: Node, first: int, indices: Sequence[Node]) -> Node:
    """``x`` with neighbouring dims, from ``first`` on, replaced by the common shape of their indices.

    [before, n1, n2, ..., after] at indices of shape S: [before, S, after]. One load by index for each dim; of several,
    none but the last has memory.
    """
    b = cx.b
    places = broadcast_shapes([i.shape for i in indices])
    before, rest = x.shape[:first], x.shape[first:]
    x = b.expand(b.reshape(x, (*before, *(1 for _ in places), *rest)), (*before, *places, *rest))  # [before, S, rest]
    axis = first + len(places)
    for index in indices:
        after = x.shape[axis + 1 :]
        wide = b.reshape(b.broadcast(index, places), (*(1 for _ in before), *places, *(1 for _ in x.shape[axis:])))
        x = b.gather(x, b.expand(wide, (*before, *places, 1, *after)), axis)
        x = b.reshape(x, (*before, *places, *after))
    return x


def whole(cx: Context, index: Node) -> Node:
    """An index as 32- or 64-bit integers.

    Raises:
        Unconverted: it is a mask.
    """
    if index.dtype in (DType.BOOL, DType.U8):
        raise Unconverted("selects by a mask")
    return index if index.dtype is DType.I32 else cx.b.cast(index, DType.I64)


def from_either_end(cx: Context, index: Node, size: int) -> Node:
    """An index as PyTorch's subscripts take it: negative numbers count from the end."""
    return cx.b.map("where", cx.b.map("lt", index, 0), cx.b.map("add", index, size), index)


@converts("embedding")
def embedding(
    cx: Context, weight: Node, indices: Node, padding_idx: int = -1, scale_by_freq: bool = False, sparse: bool = False
) -> Node:
    """Rows of a matrix; all other arguments concern the gradient alone."""
    return read_at(cx, weight, 0, [whole(cx, indices)])


@converts("index_select")
def index_select(cx: Context, x: Node, dim: int, index: Node) -> Node:
    """Positions of one dim, in a vector."""
    x = x if x.type.rank else cx.b.reshape(x, (1,))
    flat = cx.b.reshape(whole(cx, index), (index.type.numel,))
    return cx.b.reshape(read_at(cx, x, dim % x.type.rank, [flat]), cx.out.shape)


@converts("index.Tensor", "_unsafe_index.Tensor")
def subscript(cx: Context, x: Node, indices: Sequence[Node | None]) -> Node:
    """``x[i, :, j]``: indexed dims that are no neighbours move to the front, as in NumPy."""
    dims = [d for d, index in enumerate(indices) if index is not None]
    if not dims:
        return x
    found = [from_either_end(cx, whole(cx, i), x.shape[d]) for d, i in enumerate(indices) if i is not None]
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    others = [d for d in range(x.type.rank) if d not in dims]
    return read_at(cx, cx.b.permute(x, (*others[:first], *dims, *others[first:])), first, found)


@converts("take")
def take(cx: Context, x: Node, index: Node) -> Node:
    """Elements of the flattened tensor."""
    size = x.type.numel
    return read_at(cx, cx.b.reshape(x, (size,)), 0, [from_either_end(cx, whole(cx, index), size)])


@converts("gather")
def gather(cx: Context, x: Node, dim: int, index: Node, sparse_grad: bool = False) -> Node:
    """``x[..., index[..., i, ...], ...]`` at place ``i`` of a dim; the other dims of the index may be shorter."""
    if not view_base(x).is_a(Input, Dot, Opaque, Pick) and OnePlace.fits(x, dim, index):
        return _compared(cx, x, dim, index)
    x = x if x.type.rank else cx.b.reshape(x, (1,))
    index = cx.b.reshape(whole(cx, index), index.shape or (1,))
    dim %= x.type.rank
    for other, size in enumerate(index.shape):
        if other != dim and size != x.shape[other]:
            x = cut(cx, x, other, 0, size)
    return cx.b.reshape(cx.b.gather(x, index, dim), cx.out.shape)


def _compared(cx: Context, x: Node, dim: int, index: Node) -> Node:
    """One element of each line: the sum of a line in which all others are 0."""
    place = OnePlace(cx, x, dim, index)
    found = cx.b.reduce("sum", cx.b.map("where", place.hit, cx.up(x), 0.0), [place.axis], keepdim=True)
    return cx.finish(cx.b.map("where", place.outside, math.nan, found))
