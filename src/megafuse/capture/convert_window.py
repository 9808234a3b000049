"""Converters of diagonals, windows and other index maps whose backward is a sum of index maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from megafuse.capture.context import Context, Unconverted
from megafuse.capture.convert_activation import mul
from megafuse.capture.convert_move import band, cut, flip, place, roll, spread, transpose
from megafuse.capture.registry import converts
from megafuse.ir.graph import Node

MOST_TERMS = 16  # overlapping elements that one element of a window op adds up or chooses from; more are the library's


def _last(rank: int, a: int, b: int) -> tuple[int, ...]:
    """The permutation that moves two dims to the end."""
    a, b = a % rank, b % rank
    return (*(i for i in range(rank) if i not in (a, b)), a, b)


def _inverse(perm: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(perm)), key=perm.__getitem__))


@converts("diagonal", "diagonal_copy")
def diagonal(cx: Context, x: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Node:
    """Elements (i, i + offset) of two dims, as the last dim: every (columns + 1)-th of the flattened matrix."""
    matrix = cx.b.permute(x, _last(x.type.rank, dim1, dim2))
    *lead, rows, columns = matrix.shape
    flat = cx.b.reshape(matrix, (*lead, rows * columns))
    start = max(-offset, 0) * columns + max(offset, 0)
    return cut(cx, flat, len(lead), start, cx.out.shape[-1], columns + 1) if flat.type.numel else cx.full(0, cx.out)


def _on_diagonal(cx: Context, x: Node, shape: Sequence[int], offset: int, dim1: int, dim2: int) -> Node:
    """``x``, a diagonal as the last dim, in its place among zeros of ``shape``."""
    perm = _last(len(shape), dim1, dim2)
    wide = [shape[i] for i in perm]
    column = cx.b.reshape(place(cx, x, x.type.rank - 1, max(-offset, 0), wide[-2]), (*wide[:-1], 1))
    mask = band(cx, wide, "eq", offset)
    return cx.b.permute(cx.b.map("where", mask, cx.b.expand(column, wide), 0), _inverse(perm))


@converts("diag_embed")
def diag_embed(cx: Context, x: Node, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Node:
    """The last dim as a diagonal of two new dims."""
    return _on_diagonal(cx, x, cx.out.shape, offset, dim1, dim2)


@converts("diagonal_backward")
def diagonal_backward(cx: Context, g: Node, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Node:
    """The gradient on the diagonal, zeros elsewhere."""
    return _on_diagonal(cx, g, sizes, offset, dim1, dim2)


@converts("trace")
def trace(cx: Context, x: Node) -> Node:
    """Sum of the diagonal, kept of the matrix by a mask."""
    v = cx.up(cx.b.cast(x, cx.out.dtype))
    kept = cx.b.map("where", band(cx, x.shape, "eq", 0), v, 0)
    return cx.finish(cx.b.reduce("sum", kept, (0, 1)))


@converts("rot90")
def rot90(cx: Context, x: Node, k: int = 1, dims: Sequence[int] = (0, 1)) -> Node:
    """Quarter turns from the first dim to the second."""
    first, second = dims
    turns = k % 4
    if turns == 2:
        return flip(cx, x, dims)
    if turns == 0:
        return x
    return transpose(cx, flip(cx, x, [second if turns == 1 else first]), first % x.type.rank, second % x.type.rank)


@converts("linalg_cross")
def cross(cx: Context, x: Node, y: Node, *, dim: int = -1) -> Node:
    """(x1 y2 - x2 y1, ...) over a dim of size 3, from shifted copies."""
    u, v = (cx.b.broadcast(n, cx.out.shape) for n in cx.operands(x, y))
    left = mul(cx.b, roll(cx, u, [-1], [dim]), roll(cx, v, [-2], [dim]))
    return cx.finish(cx.b.map("sub", left, mul(cx.b, roll(cx, u, [-2], [dim]), roll(cx, v, [-1], [dim]))))


@converts("block_diag")
def block_diag(cx: Context, xs: Sequence[Node]) -> Node:
    """Matrices along the diagonal, zeros elsewhere."""
    parts = [cx.b.cast(cx.b.reshape(x, (1,) * (2 - x.type.rank) + x.shape), cx.out.dtype) for x in xs]
    starts = accumulate((p.shape[1] for p in parts), initial=0)
    rows = [place(cx, p, 1, s, cx.out.shape[1]) for p, s in zip(parts, starts, strict=False)]
    return cx.b.concat(rows, 0)


# ---- windows of one dim: element j of window i is element i * step + j


def _apart(size: int, step: int, windows: int, total: int) -> bool:
    """True when the windows are the steps, one after another, but for what each step leaves out at its end."""
    return step >= size and windows * step <= total


@converts("unfold", "unfold_copy")
def unfold(cx: Context, x: Node, dim: int, size: int, step: int) -> Node:
    """Windows of a dim; their elements are a new last dim."""
    b, rank = cx.b, x.type.rank
    if not rank:
        return b.reshape(x, cx.out.shape)
    dim %= rank
    windows = cx.out.shape[dim]
    if _apart(size, step, windows, x.shape[dim]):
        whole = cut(cx, x, dim, 0, windows * step)
        steps = b.reshape(whole, (*x.shape[:dim], windows, step, *x.shape[dim + 1 :]))
        kept = cut(cx, steps, dim + 1, 0, size)
        return b.permute(kept, (*(i for i in range(rank + 1) if i != dim + 1), dim + 1))
    _few(size)
    parts = [cut(cx, x, dim, j, windows, step) for j in range(size)]
    return b.concat([b.reshape(p, (*p.shape, 1)) for p in parts], rank)


@converts("unfold_backward")
def unfold_backward(cx: Context, g: Node, sizes: Sequence[int], dim: int, size: int, step: int) -> Node:
    """Each window's gradient added back to its elements."""
    b, rank = cx.b, len(sizes)
    if not rank:
        return b.reshape(g, ())
    dim %= rank
    windows = g.shape[dim]
    if _apart(size, step, windows, sizes[dim]):
        order = [*range(dim + 1), rank, *range(dim + 1, rank)]
        steps = place(cx, b.permute(g, order), dim + 1, 0, step)
        return place(cx, b.reshape(steps, (*g.shape[:dim], windows * step, *g.shape[dim + 1 : -1])), dim, 0, sizes[dim])
    _few(size)
    v = cx.up(g)
    parts = [b.reshape(cut(cx, v, rank, j, 1), v.shape[:-1]) for j in range(size)]
    return cx.finish(_overlapped(cx, parts, dim, step, sizes[dim]))


def _few(terms: int) -> None:
    if terms > MOST_TERMS:
        raise Unconverted(f"overlapping windows of {terms} elements")


def _overlapped(cx: Context, parts: Sequence[Node], dim: int, step: int, size: int) -> Node:
    """Sum over j of ``parts[j]`` whose i-th element stands at i * step + j."""
    placed = []
    for j, part in enumerate(parts):
        reach = (part.shape[dim] - 1) * step + 1
        wide = cut(cx, spread(cx, part, dim, step), dim, 0, reach) if step > 1 else part
        placed.append(place(cx, wide, dim, j, size))
    total, *rest = placed
    for term in rest:
        total = cx.b.map("add", total, term)
    return total


# ---- average pooling: a sum over windows of each spatial dim in turn


class _Pool:
    """Sizes of an average pooling over the last dims, one entry for each."""

    def __init__(
        self, x: Node, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool,
        include_pad: bool, divisor: int | None,
    ) -> None:  # fmt: skip
        n = len(kernel)
        self.kernel, self.stride = list(kernel), list(stride) or list(kernel)
        self.padding = list(padding) if len(padding) == n else list(padding) * n
        self.dims, self.sizes = range(x.type.rank - n, x.type.rank), x.shape[-n:]
        self.divisor = divisor or math.prod(kernel)
        if ceil_mode or (any(self.padding) and not include_pad and not divisor):
            raise Unconverted("windows of different sizes")
        self.apart = not any(self.padding) and all(
            k == s and total % k == 0 for k, s, total in zip(self.kernel, self.stride, self.sizes, strict=True)
        )
        if not self.apart:
            _few(math.prod(self.kernel))

    def split(self, x: Node) -> tuple[int, ...]:
        """``x``'s shape with each spatial dim as windows and elements of a window."""
        pairs = zip(self.sizes, self.kernel, strict=True)
        return (*x.shape[: self.dims[0]], *(s for total, k in pairs for s in (total // k, k)))

    @property
    def inner(self) -> tuple[int, ...]:
        """The dims of ``split`` that are elements of a window."""
        return tuple(self.dims[0] + 2 * i + 1 for i in range(len(self.kernel)))


@converts("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    cx: Context, x: Node, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Node:  # fmt: skip
    """Mean over windows of the last dims, padded by zeros that count."""
    b, pool = cx.b, _Pool(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
    v = cx.up(x)
    if pool.apart:
        total = b.reduce("sum", b.reshape(v, pool.split(x)), pool.inner)
        return cx.finish(b.map("div", total, pool.divisor))
    for i, dim in enumerate(pool.dims):
        size = x.shape[dim] + 2 * pool.padding[i]
        v = place(cx, v, dim, pool.padding[i], size)
        parts = [cut(cx, v, dim, j, cx.out.shape[dim], pool.stride[i]) for j in range(pool.kernel[i])]
        v, *rest = parts
        for part in rest:
            v = b.map("add", v, part)
    return cx.finish(b.map("div", v, pool.divisor))


@converts("avg_pool2d_backward", "avg_pool3d_backward")
def avg_pool_backward(
    cx: Context, g: Node, x: Node, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    ceil_mode: bool, count_include_pad: bool, divisor_override: int | None,
) -> Node:  # fmt: skip
    """Each window's gradient, over its divisor, added to its elements."""
    b, pool = cx.b, _Pool(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
    v = b.map("div", cx.up(g), pool.divisor)
    if pool.apart:
        wide = pool.split(x)
        ones = tuple(1 if i in pool.inner else s for i, s in enumerate(wide))
        return cx.finish(b.reshape(b.expand(b.reshape(v, ones), wide), x.shape))
    for i, dim in enumerate(pool.dims):
        size = x.shape[dim] + 2 * pool.padding[i]
        v = _overlapped(cx, [v] * pool.kernel[i], dim, pool.stride[i], size)
        v = cut(cx, v, dim, pool.padding[i], x.shape[dim])
    return cx.finish(v)
