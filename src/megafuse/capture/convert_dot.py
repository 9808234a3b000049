"""Converters of contractions: every one becomes ``[P, M, K] x [P, K, N]`` in the ATen result's type."""

from __future__ import annotations

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


@converts("linear")
def linear(cx: Context, x: Node, weight: Node, bias: Node | None = None) -> Node:
    """x @ weight^T + bias, on all leading dims at once."""
    rows = cx.b.reshape(x, (-(-x.type.numel // max(x.shape[-1], 1)), x.shape[-1]))
    out = matmul(cx, rows, cx.b.permute(weight, (1, 0)), cx.out.dtype, bias)
    return cx.b.reshape(out, cx.out.shape)
