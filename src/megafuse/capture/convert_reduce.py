"""Converters of reductions and softmaxes: 16-bit inputs are reduced in fp32 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megafuse.capture.context import Context, Unconverted
from megafuse.capture.convert_pointwise import as_bool
from megafuse.capture.registry import converts
from megafuse.core.dtypes import DType
from megafuse.ir.graph import Node
from megafuse.ir.types import TensorType

Dims = int | Sequence[int] | None


def wide(cx: Context, x: Node) -> Node:
    """The input in the result's type, widened."""
    return cx.up(cx.b.cast(x, cx.out.dtype) if not x.dtype.is_float or cx.out.dtype is DType.F64 else x)


@converts("sum")
def sum_(cx: Context, x: Node, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Node:
    """Sum over dims; none given means all."""
    v = wide(cx, x)
    return cx.finish(cx.b.reduce("sum", v, cx.axes(x, dim), keepdim))


@converts("nansum")
def nansum(cx: Context, x: Node, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Node:
    """Sum over dims, NaN as 0."""
    v = wide(cx, x)
    kept = cx.b.map("where", cx.b.map("isnan", v), 0.0, v) if x.dtype.is_float else v
    return cx.finish(cx.b.reduce("sum", kept, cx.axes(x, dim), keepdim))


@converts("count_nonzero")
def count_nonzero(cx: Context, x: Node, dim: Dims = None) -> Node:
    """How many elements are not 0."""
    return cx.finish(cx.b.reduce("sum", cx.b.cast(as_bool(cx, x), cx.out.dtype), cx.axes(x, dim)))


@converts("mean")
def mean(cx: Context, x: Node, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Node:
    """Mean over dims; none given means all."""
    return cx.finish(cx.mean(wide(cx, x), cx.axes(x, dim), keepdim))


@converts("prod")
def prod(cx: Context, x: Node, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Node:
    """Product over a dim, or all."""
    return cx.finish(cx.b.reduce("prod", wide(cx, x), cx.axes(x, dim), keepdim))


def extreme(cx: Context, fn: str, x: Node, dim: Dims, keepdim: bool) -> Node:
    """Maximum or minimum: exact, so no widening."""
    if x.dtype is DType.BOOL:
        raise Unconverted("extreme of bools")
    return cx.finish(cx.b.reduce(fn, x, cx.axes(x, dim), keepdim))


@converts("amax", "max.default")
def amax(cx: Context, x: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    """Maximum."""
    return extreme(cx, "max", x, dim, keepdim)


@converts("amin", "min.default")
def amin(cx: Context, x: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    """Minimum."""
    return extreme(cx, "min", x, dim, keepdim)


@converts("aminmax")
def aminmax(cx: Context, x: Node, *, dim: int | None = None, keepdim: bool = False) -> tuple[Node, Node]:
    """Minimum and maximum."""
    if x.dtype is DType.BOOL:
        raise Unconverted("extreme of bools")
    low, high = (cx.b.reduce(fn, x, cx.axes(x, dim), keepdim) for fn in ("min", "max"))
    return cx.finish(cx.b.reshape(low, cx.out.shape)), cx.finish(cx.b.reshape(high, cx.out.shape), 1)


def _truth(cx: Context, fn: str, x: Node, dim: Dims, keepdim: bool) -> Node:
    ones = cx.b.cast(as_bool(cx, x), DType.I32)
    return cx.b.cast(cx.b.map("ne", cx.b.reduce(fn, ones, cx.axes(x, dim), keepdim), 0), cx.out.dtype)


@converts("any")
def any_(cx: Context, x: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    """True where any element is."""
    return _truth(cx, "max", x, dim, keepdim)


@converts("all")
def all_(cx: Context, x: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    """True where every element is."""
    return _truth(cx, "min", x, dim, keepdim)


def _variance(cx: Context, v: Node, axes: Sequence[int], correction: float) -> tuple[Node, Node]:
    """Variance and mean in two passes, reduced dims kept."""
    count = math.prod(v.shape[a] for a in axes)
    centre = cx.mean(v, axes)
    d = cx.b.map("sub", v, centre)
    total = cx.b.reduce("sum", cx.b.map("mul", d, d), axes, keepdim=True)
    left = max(count - correction, 0)
    return (cx.b.map("mul", total, 1.0 / left) if left else cx.b.map("div", total, 0.0)), centre


def _spread(cx: Context, x: Node, dim: Dims, keepdim: bool, correction: float | None, root: bool) -> tuple[Node, Node]:
    axes = cx.axes(x, dim)
    var, centre = _variance(cx, cx.up(x), axes, 1 if correction is None else correction)
    var = cx.b.map("sqrt", var) if root else var
    shape = var.shape if keepdim else tuple(s for i, s in enumerate(x.shape) if i not in axes)
    return cx.b.reshape(var, shape), cx.b.reshape(centre, shape)


@converts("var.correction")
def var(cx: Context, x: Node, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Node:
    """Variance with ``count - correction`` in the denominator."""
    return cx.finish(_spread(cx, x, dim, keepdim, correction, False)[0])


@converts("std.correction")
def std(cx: Context, x: Node, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Node:
    """Square root of the variance."""
    return cx.finish(_spread(cx, x, dim, keepdim, correction, True)[0])


@converts("var_mean.correction")
def var_mean(
    cx: Context, x: Node, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Node, Node]:
    """Variance and mean."""
    v, m = _spread(cx, x, dim, keepdim, correction, False)
    return cx.finish(v), cx.finish(m, 1)


@converts("std_mean.correction")
def std_mean(
    cx: Context, x: Node, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Node, Node]:
    """Standard deviation and mean."""
    v, m = _spread(cx, x, dim, keepdim, correction, True)
    return cx.finish(v), cx.finish(m, 1)


@converts("linalg_vector_norm")
def vector_norm(
    cx: Context, x: Node, order: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Node:
    """(sum |x|^p)^(1/p); p = inf, -inf and 0 by their limits."""
    b, v, axes = cx.b, wide(cx, x), cx.axes(x, dim)
    if order in (math.inf, -math.inf):
        return cx.finish(b.reduce("max" if order > 0 else "min", b.map("abs", v), axes, keepdim))
    if order == 0:
        return cx.finish(b.reduce("sum", b.cast(b.map("ne", v, 0), v.dtype), axes, keepdim))
    if order == 2:
        return cx.finish(b.map("sqrt", b.reduce("sum", b.map("mul", v, v), axes, keepdim)))
    a = b.map("abs", v)
    total = b.reduce("sum", a if order == 1 else b.map("pow", a, order), axes, keepdim)
    return cx.finish(total if order == 1 else b.map("pow", total, 1.0 / order))


@converts("norm")
def norm(
    cx: Context, x: Node, p: float | None = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Node:
    """The older name of the vector norm."""
    return vector_norm(cx, x, 2 if p is None else p, dim, keepdim)


@converts("dist")
def dist(cx: Context, x: Node, y: Node, p: float = 2) -> Node:
    """Norm of the difference, which is rounded to its type first, as in the composite."""
    d = cx.b.map("sub", *cx.operands(x, y))
    return vector_norm(cx, cx.b.cast(d, cx.out.dtype), p)


@converts("renorm")
def renorm(cx: Context, x: Node, p: float, dim: int, maxnorm: float) -> Node:
    """Slices along ``dim`` whose norm n is above ``maxnorm`` times maxnorm / (n + 1e-7)."""
    b, axis = cx.b, dim % x.type.rank
    others = [i for i in range(x.type.rank) if i != axis]
    kind = TensorType(tuple(x.shape[i] if i == axis else 1 for i in range(x.type.rank)), x.dtype.compute)
    norm_ = vector_norm(Context(b, (kind,)), cx.up(x), p, others, keepdim=True)
    factor = b.map("div", maxnorm, b.map("add", norm_, 1e-7))
    return cx.finish(b.map("mul", cx.up(x), b.map("where", b.map("gt", norm_, maxnorm), factor, 1.0)))


def _shifted(cx: Context, x: Node, dim: int) -> tuple[Node, tuple[int, ...]]:
    """x - max(x) along a dim, in the compute type."""
    axes = cx.axes(x, dim)
    v = cx.up(cx.b.cast(x, DType.F32) if not x.dtype.is_float else x)
    return cx.b.map("sub", v, cx.b.reduce("max", v, axes, keepdim=True)), axes


@converts("_softmax")
def softmax(cx: Context, x: Node, dim: int, half_to_float: bool = False) -> Node:
    """exp(x - max) / sum(exp(x - max))."""
    shifted, axes = _shifted(cx, x, dim)
    e = cx.b.map("exp", shifted)
    return cx.finish(cx.b.map("div", e, cx.b.reduce("sum", e, axes, keepdim=True)))


@converts("_safe_softmax")
def safe_softmax(cx: Context, x: Node, dim: int, dtype: Any = None) -> Node:
    """Softmax that is 0 in rows that are -inf throughout."""
    b, axes = cx.b, cx.axes(x, dim)
    top = b.reduce("max", cx.up(x), axes, keepdim=True)
    shifted = b.map("sub", cx.up(x), b.map("where", b.map("eq", top, -math.inf), 0.0, top))
    e = b.map("exp", shifted)
    total = b.reduce("sum", e, axes, keepdim=True)
    return cx.finish(b.map("div", e, b.map("where", b.map("eq", total, 0.0), 1.0, total)))


@converts("_softmax_backward_data")
def softmax_backward(cx: Context, g: Node, y: Node, dim: int, input_dtype: Any = None) -> Node:
    """y * (g - sum(g * y))."""
    b = cx.b
    dy, v = cx.up(g), cx.up(y)
    total = b.reduce("sum", b.map("mul", dy, v), cx.axes(y, dim), keepdim=True)
    return cx.finish(b.map("mul", v, b.map("sub", dy, total)))


@converts("_log_softmax")
def log_softmax(cx: Context, x: Node, dim: int, half_to_float: bool = False) -> Node:
    """x - max - log(sum(exp(x - max)))."""
    shifted, axes = _shifted(cx, x, dim)
    total = cx.b.reduce("sum", cx.b.map("exp", shifted), axes, keepdim=True)
    return cx.finish(cx.b.map("sub", shifted, cx.b.map("log", total)))


@converts("_log_softmax_backward_data")
def log_softmax_backward(cx: Context, g: Node, y: Node, dim: int, input_dtype: Any = None) -> Node:
    """g - exp(y) * sum(g)."""
    b = cx.b
    dy, v = cx.up(g), cx.up(y)
    total = b.reduce("sum", dy, cx.axes(y, dim), keepdim=True)
    return cx.finish(b.map("sub", dy, b.map("mul", b.map("exp", v), total)))


@converts("logsumexp")
def logsumexp(cx: Context, x: Node, dim: Dims, keepdim: bool = False) -> Node:
    """log(sum(exp(x - m))) + m, with m the maximum, or 0 where that is infinite."""
    b, axes = cx.b, cx.axes(x, dim)
    v = cx.up(cx.b.cast(x, cx.out.dtype) if not x.dtype.is_float else x)
    top = b.reduce("max", v, axes, keepdim=True)
    top = b.map("where", b.map("isinf", top), 0.0, top)
    total = b.reduce("sum", b.map("exp", b.map("sub", v, top)), axes, keepdim=True)
    return cx.finish(b.reshape(b.map("add", b.map("log", total), top), cx.out.shape))
