"""Converters of contractions: every one becomes ``[P, M, K] x [P, K, N]`` in the ATen result's type."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megafuse.capture.context import Context, Unconverted
from megafuse.capture.convert_pointwise import scaled
from megafuse.capture.registry import converts
from megafuse.core.dtypes import DType
from megafuse.ir.graph import Node


def check(cx: Context, *xs: Node | None) -> None:
    """One floating-point type; integer products stay with the library."""
    if all(x is None or not x.dtype.is_float for x in xs):
        raise Unconverted("integer matrix product")
    cx.same_types(*xs)


def matmul(cx: Context, a: Node, b: Node, dtype: DType, bias: Node | None = None) -> Node:
    """[M, K] x [K, N] (+ [N]) -> [M, N]."""
    check(cx, a, b, bias)
    out = cx.b.dot(cx.b.reshape(a, (1, *a.shape)), cx.b.reshape(b, (1, *b.shape)), dtype, bias)
    return cx.b.reshape(out, out.shape[1:])


@converts("mm.default")
def mm(cx: Context, a: Node, b: Node) -> Node:
    """[M, K] x [K, N]."""
    return matmul(cx, a, b, cx.out.dtype)


@converts("bmm.default")
def bmm(cx: Context, a: Node, b: Node) -> Node:
    """[P, M, K] x [P, K, N]."""
    check(cx, a, b)
    return cx.b.dot(a, b, cx.out.dtype)


@converts("mv")
def mv(cx: Context, a: Node, x: Node) -> Node:
    """[M, K] x [K]."""
    return cx.b.reshape(matmul(cx, a, cx.b.reshape(x, (*x.shape, 1)), cx.out.dtype), cx.out.shape)


@converts("dot", "vdot")
def dot(cx: Context, a: Node, b: Node) -> Node:
    """[K] x [K] -> []."""
    row, column = cx.b.reshape(a, (1, *a.shape)), cx.b.reshape(b, (*b.shape, 1))
    return cx.b.reshape(matmul(cx, row, column, cx.out.dtype), ())


def accumulate(cx: Context, c: Node, product: Node, beta: float, alpha: float) -> Node:
    """beta * c + alpha * product, computed in the compute type and rounded once."""
    p = scaled(cx, cx.up(product), alpha)
    if beta == 0:
        return cx.finish(p)
    return cx.finish(cx.b.map("add", scaled(cx, cx.operand(c, cx.out.dtype), beta), p))


@converts("addmm.default")
def addmm(cx: Context, c: Node, a: Node, b: Node, *, beta: float = 1, alpha: float = 1) -> Node:
    """beta * c + alpha * a @ b; a plain [N] bias goes into the dot."""
    if c.type.rank == 1 and c.shape == b.shape[1:] and beta == alpha == 1 and c.dtype is cx.out.dtype:
        return matmul(cx, a, b, cx.out.dtype, bias=c)
    return accumulate(cx, c, matmul(cx, a, b, cx.out.dtype), beta, alpha)


@converts("addmv")
def addmv(cx: Context, c: Node, a: Node, x: Node, *, beta: float = 1, alpha: float = 1) -> Node:
    """beta * c + alpha * a @ x."""
    return accumulate(cx, c, mv(cx, a, x), beta, alpha)


@converts("addr")
def addr(cx: Context, c: Node, x: Node, y: Node, *, beta: float = 1, alpha: float = 1) -> Node:
    """beta * c + alpha * outer(x, y): pointwise."""
    u, v = cx.operands(cx.b.reshape(x, (*x.shape, 1)), y)
    return accumulate(cx, c, cx.b.map("mul", u, v), beta, alpha)


@converts("baddbmm.default")
def baddbmm(cx: Context, c: Node, a: Node, b: Node, *, beta: float = 1, alpha: float = 1) -> Node:
    """beta * c + alpha * a @ b, batched."""
    check(cx, a, b)
    return accumulate(cx, c, cx.b.dot(a, b, cx.out.dtype), beta, alpha)


@converts("addbmm")
def addbmm(cx: Context, c: Node, a: Node, b: Node, *, beta: float = 1, alpha: float = 1) -> Node:
    """beta * c + alpha * sum_p a[p] @ b[p]: one product over all [P, K] at once."""
    p, m, k = a.shape
    rows = cx.b.reshape(cx.b.permute(a, (1, 0, 2)), (m, p * k))
    columns = cx.b.reshape(b, (p * k, b.shape[2]))
    return accumulate(cx, c, matmul(cx, rows, columns, cx.out.dtype), beta, alpha)


def _contract(cx: Context, a: Node, b: Node, summed: Sequence[int]) -> Node:
    """sum over ``summed`` of ``a * b``, of one rank, with 1 for a dim that one side lacks; summed dims stay as 1.

    A product with one row or one column for each of many batch entries is no work for the library: it is summed up.
    """
    dims = range(a.type.rank)
    a, b = (_without(cx, n, [d for d in summed if m.shape[d] == 1]) for n, m in ((a, b), (b, a)))
    size = [max(s) for s in zip(a.shape, b.shape, strict=True)]
    shared = [a.shape[d] == b.shape[d] for d in dims]
    over = [d for d in dims if d in summed and shared[d]]
    both = [d for d in dims if d not in over and shared[d]]
    rows = [d for d in dims if not shared[d] and a.shape[d] > 1]
    columns = [d for d in dims if not shared[d] and a.shape[d] == 1]
    p, m, k, n = (math.prod(size[d] for d in group) for group in (both, rows, over, columns))
    if p > 1 and 1 in (m, n):
        return cx.b.cast(cx.b.reduce("sum", cx.b.map("mul", cx.up(a), cx.up(b)), over, keepdim=True), a.dtype)
    left = cx.b.reshape(cx.b.permute(a, (*both, *rows, *over, *columns)), (p, m, k))
    right = cx.b.reshape(cx.b.permute(b, (*both, *over, *columns, *rows)), (p, k, n))
    order = (*both, *rows, *columns, *over)
    wide = cx.b.reshape(cx.b.dot(left, right, a.dtype), [1 if d in over else size[d] for d in order])
    return cx.b.permute(wide, [order.index(d) for d in dims])


def _without(cx: Context, x: Node, summed: Sequence[int]) -> Node:
    """``x`` summed over dims that the other factor lacks."""
    return cx.b.cast(cx.b.reduce("sum", cx.up(x), summed, keepdim=True), x.dtype) if summed else x


@converts("_trilinear")
def trilinear(
    cx: Context, x: Node, y: Node, z: Node, expand1: Sequence[int], expand2: Sequence[int], expand3: Sequence[int],
    sumdim: Sequence[int], unroll_dim: int = 1,
) -> Node:  # fmt: skip
    """sum over ``sumdim`` of x * y * z, each with new dims of size 1: two products, the smaller between first."""
    check(cx, x, y, z)
    pads = zip((x, y, z), (expand1, expand2, expand3), strict=True)
    u, v, w = (_with_ones(cx, n, dims) for n, dims in pads)
    rank = u.type.rank
    early = [d for d in sumdim if w.shape[d] == 1]
    late = [d for d in sumdim if w.shape[d] > 1]
    out = _contract(cx, _contract(cx, u, v, early), w, late)
    return cx.b.reshape(out, [out.shape[d] for d in range(rank) if d not in sumdim])


def _with_ones(cx: Context, x: Node, dims: Sequence[int]) -> Node:
    shape = iter(x.shape)
    return cx.b.reshape(x, [1 if d in dims else next(shape) for d in range(x.type.rank + len(dims))])


@converts("linear")
def linear(cx: Context, x: Node, weight: Node, bias: Node | None = None) -> Node:
    """x @ weight^T + bias, on all leading dims at once."""
    rows = cx.b.reshape(x, (-(-x.type.numel // max(x.shape[-1], 1)), x.shape[-1]))
    out = matmul(cx, rows, cx.b.permute(weight, (1, 0)), cx.out.dtype, bias)
    return cx.b.reshape(out, cx.out.shape)
