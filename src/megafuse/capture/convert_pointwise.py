"""Converters of arithmetic, comparisons, rounding, selection and constants.

A 16-bit float op computes in fp32 and rounds once, at its end, as its CUDA kernel does; Python numbers are fp32 there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megafuse.capture.context import Context, Operand, Unconverted, promote
from megafuse.capture.registry import converts
from megafuse.core.dtypes import DType
from megafuse.ir.graph import Node

UNARY = {
    "neg": "neg", "abs": "abs", "sign": "sign", "sgn": "sign", "floor": "floor", "ceil": "ceil", "trunc": "trunc",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "reciprocal": "recip", "exp": "exp", "exp2": "exp2", "expm1": "expm1",
    "log": "log", "log2": "log2", "log1p": "log1p", "log10": "log10", "sin": "sin", "cos": "cos", "tan": "tan",
    "tanh": "tanh", "sigmoid": "sigmoid", "erf": "erf", "erfc": "erfc", "asin": "asin", "acos": "acos",
    "atan": "atan", "sinh": "sinh", "cosh": "cosh", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh",
    "lgamma": "lgamma", "digamma": "digamma", "round.default": "round", "erfinv": "erfinv",
    "special_erfcx": "erfcx", "special_ndtri": "ndtri",
}  # fmt: skip
BINARY = {
    "maximum": "maximum", "minimum": "minimum", "fmod": "fmod", "remainder": "remainder", "atan2": "atan2",
    "copysign": "copysign", "hypot": "hypot",
}  # fmt: skip
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_ON_BOOL = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}


def _unary(fn: str) -> Callable[[Context, Node], Node]:
    def convert(cx: Context, x: Node) -> Node:
        return cx.pointwise(fn, x)

    return convert


def _binary(fn: str) -> Callable[[Context, Operand, Operand], Node]:
    def convert(cx: Context, a: Operand, b: Operand) -> Node:
        return arithmetic(cx, fn, a, b)

    return convert


def _compare(fn: str) -> Callable[[Context, Operand, Operand], Node]:
    def convert(cx: Context, a: Operand, b: Operand) -> Node:
        x, y = cx.operands(a, b, common=promote([a, b]))
        return cx.finish(cx.b.map(fn, x, y))

    return convert


for _name, _fn in UNARY.items():
    converts(_name)(_unary(_fn))
for _name, _fn in BINARY.items():
    converts(_name)(_binary(_fn))
for _name in COMPARE:
    converts(_name)(_compare(_name))


def arithmetic(cx: Context, fn: str, a: Operand, b: Operand) -> Node:
    """One binary map; on bools the logical op that PyTorch means by it."""
    return cx.pointwise(_ON_BOOL.get(fn, fn) if cx.out.dtype is DType.BOOL else fn, a, b)


def scaled(cx: Context, x: Node, alpha: float | int | bool) -> Node:
    """``alpha * x``; no op for 1."""
    return x if alpha == 1 else cx.b.map("mul", x, alpha)


@converts("add")
def add(cx: Context, a: Operand, b: Operand, alpha: float = 1) -> Node:
    """a + alpha * b, one rounding."""
    if cx.out.dtype is DType.BOOL:
        return arithmetic(cx, "add", a, b)
    x, y = cx.operands(a, b)
    return cx.finish(cx.b.map("add", x, scaled(cx, y, alpha)))


@converts("sub")
def sub(cx: Context, a: Operand, b: Operand, alpha: float = 1) -> Node:
    """a - alpha * b, one rounding."""
    x, y = cx.operands(a, b)
    return cx.finish(cx.b.map("sub", x, scaled(cx, y, alpha)))


@converts("rsub")
def rsub(cx: Context, a: Operand, b: Operand, alpha: float = 1) -> Node:
    """b - alpha * a, one rounding."""
    return sub(cx, b, a, alpha)


@converts("mul")
def mul(cx: Context, a: Operand, b: Operand) -> Node:
    """a * b."""
    return arithmetic(cx, "mul", a, b)


@converts("div")
def div(cx: Context, a: Operand, b: Operand, rounding_mode: str | None = None) -> Node:
    """a / b; by a Python number the CUDA kernel multiplies with its reciprocal."""
    if rounding_mode is None and isinstance(b, int | float) and b != 0:
        return cx.finish(cx.b.map("mul", *cx.operands(a, 1.0 / b)))
    if rounding_mode == "floor":
        return cx.pointwise("floordiv", a, b)
    x, y = cx.operands(a, b)
    quotient = cx.b.map("div", x, y)
    if rounding_mode == "trunc" and quotient.dtype.is_float:
        quotient = cx.b.map("trunc", quotient)
    return cx.finish(quotient)


@converts("floor_divide")
def floor_divide(cx: Context, a: Operand, b: Operand) -> Node:
    """floor(a / b)."""
    return cx.pointwise("floordiv", a, b)


@converts("pow.Tensor_Scalar")
def pow_scalar(cx: Context, x: Node, exponent: float) -> Node:
    """x ** n; the exponents that the CUDA kernel writes out are written out, each step rounded."""
    if not cx.out.dtype.is_float:
        return _integer_power(cx, x, exponent)
    (v,) = cx.operands(x)
    return cx.finish(_power(cx, v, float(exponent)))


def _integer_power(cx: Context, x: Node, exponent: float) -> Node:
    v = cx.b.cast(x, cx.out.dtype)
    return cx.finish(_power(cx, v, float(exponent)) if exponent in (0, 1, 2, 3) else cx.b.map("pow", v, int(exponent)))


def _power(cx: Context, v: Node, n: float) -> Node:
    square = cx.each("mul", v, v)
    if n == 0:
        return cx.full(1, type(v.type)(v.shape, v.dtype))
    if n == 1:
        return v
    if n == 2:
        return square
    if n == 3:
        return cx.b.map("mul", square, v)
    if n == -2:
        return cx.b.map("recip", square)
    names = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "recip"}
    return cx.b.map(names[n], v) if n in names else cx.b.map("pow", v, n)


@converts("pow.Tensor_Tensor", "pow.Scalar")
def pow_tensor(cx: Context, a: Operand, b: Operand) -> Node:
    """a ** b; of integers with a negative exponent 0, unless the base is 1 or -1."""
    if cx.out.dtype is DType.BOOL:
        raise Unconverted("power of bools")
    return cx.pointwise("pow", a, b)


@converts("square")
def square(cx: Context, x: Node) -> Node:
    """x * x."""
    return cx.pointwise("mul", x, x)


@converts("frac")
def frac(cx: Context, x: Node) -> Node:
    """x - trunc(x)."""
    (v,) = cx.operands(x)
    return cx.finish(cx.b.map("sub", v, cx.b.map("trunc", v)))


@converts("addcmul")
def addcmul(cx: Context, x: Node, a: Node, b: Node, value: float = 1) -> Node:
    """x + value * a * b, one rounding."""
    v, p, q = cx.operands(x, a, b)
    return cx.finish(cx.b.map("add", v, cx.b.map("mul", scaled(cx, p, value), q)))


@converts("addcdiv")
def addcdiv(cx: Context, x: Node, a: Node, b: Node, value: float = 1) -> Node:
    """x + value * (a / b), one rounding."""
    v, p, q = cx.operands(x, a, b)
    return cx.finish(cx.b.map("add", v, scaled(cx, cx.b.map("div", p, q), value)))


@converts("lerp")
def lerp(cx: Context, x: Node, end: Node, weight: Operand) -> Node:
    """x + w * (end - x) for |w| < 0.5, else end - (end - x) * (1 - w), as PyTorch does."""
    v, e, w = cx.operands(x, end, weight)
    b = cx.b
    span = b.map("sub", e, v)
    near = b.map("add", v, b.map("mul", w, span))
    far = b.map("sub", e, b.map("mul", span, b.map("sub", b.const(1, w.dtype), w)))
    return cx.finish(b.map("where", b.map("lt", b.map("abs", w), 0.5), near, far))


@converts("clamp")
def clamp(cx: Context, x: Node, low: Operand | None = None, high: Operand | None = None) -> Node:
    """min(max(x, low), high)."""
    v = cx.operand(x, cx.out.dtype)
    if low is not None:
        v = cx.b.map("maximum", v, cx.operand(low, cx.out.dtype))
    if high is not None:
        v = cx.b.map("minimum", v, cx.operand(high, cx.out.dtype))
    return cx.finish(v)


@converts("clamp_min")
def clamp_min(cx: Context, x: Node, low: Operand) -> Node:
    """max(x, low)."""
    return clamp(cx, x, low)


@converts("clamp_max")
def clamp_max(cx: Context, x: Node, high: Operand) -> Node:
    """min(x, high)."""
    return clamp(cx, x, None, high)


@converts("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(cx: Context, condition: Node, a: Operand, b: Operand) -> Node:
    """a where the condition holds, else b; no arithmetic, so no rounding beyond the promotion."""
    return select(cx, condition, a, b)


def select(cx: Context, condition: Node, a: Operand, b: Operand) -> Node:
    """``where`` in the result's own type."""
    kind = cx.out.dtype
    values = [cx.b.cast(x, kind) if isinstance(x, Node) else cx.b.const(x, kind) for x in (a, b)]
    return cx.finish(cx.b.map("where", as_bool(cx, condition), *values))


@converts("masked_fill")
def masked_fill(cx: Context, x: Node, mask: Node, value: Operand) -> Node:
    """value where the mask holds, else x."""
    return select(cx, mask, value, x)


def as_bool(cx: Context, x: Node) -> Node:
    """x != 0."""
    return x if x.dtype is DType.BOOL else cx.b.map("ne", cx.up(x), 0)


@converts("logical_not")
def logical_not(cx: Context, x: Node) -> Node:
    """x == 0."""
    return cx.finish(cx.b.map("not", as_bool(cx, x)))


def _logical(fn: str) -> Callable[[Context, Node, Node], Node]:
    def convert(cx: Context, a: Node, b: Node) -> Node:
        return cx.finish(cx.b.map(fn, as_bool(cx, a), as_bool(cx, b)))

    return convert


def _bitwise(fn: str) -> Callable[[Context, Operand, Operand], Node]:
    def convert(cx: Context, a: Operand, b: Operand) -> Node:
        x, y = (v if isinstance(v, Node) else cx.const(v, cx.out.dtype) for v in (a, b))
        return cx.finish(cx.b.map(fn, cx.b.cast(x, cx.out.dtype), cx.b.cast(y, cx.out.dtype)))

    return convert


for _fn in ("and", "or", "xor"):
    converts(f"logical_{_fn}")(_logical(_fn))
    converts(f"bitwise_{_fn}")(_bitwise(_fn))


@converts("bitwise_not")
def bitwise_not(cx: Context, x: Node) -> Node:
    """Bits of x flipped."""
    return cx.finish(cx.b.map("not", x))


@converts("isnan")
def isnan(cx: Context, x: Node) -> Node:
    """x != x."""
    return cx.finish(cx.b.map("isnan", cx.up(x))) if x.dtype.is_float else cx.full(False, cx.out)


@converts("isinf")
def isinf(cx: Context, x: Node) -> Node:
    """|x| == inf."""
    return cx.finish(cx.b.map("isinf", cx.up(x))) if x.dtype.is_float else cx.full(False, cx.out)


@converts("nan_to_num")
def nan_to_num(
    cx: Context, x: Node, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Node:
    """NaN, inf and -inf replaced; by 0 and the largest finite values unless given."""
    if not x.dtype.is_float:
        return x
    largest = {DType.F16: 65504.0, DType.BF16: 3.3895313892515355e38, DType.F32: 3.4028234663852886e38}
    top = largest.get(x.dtype, 1.7976931348623157e308)
    (v,) = cx.operands(x)
    b = cx.b
    out = b.map("where", b.map("isnan", v), 0.0 if nan is None else nan, v)
    out = b.map("where", b.map("eq", v, math.inf), top if posinf is None else posinf, out)
    return cx.finish(b.map("where", b.map("eq", v, -math.inf), -top if neginf is None else neginf, out))


@converts("full", "full_like", "new_full")
def full(cx: Context, _like: Any, *values: Any, **_: Any) -> Node:
    """A tensor of one value."""
    value = cx.value(values[-1])
    if value is None:
        raise Unconverted("fill value known only at run time")
    return cx.full(value, cx.out)


@converts("zeros", "zeros_like", "new_zeros", "zero", "empty", "empty_like", "new_empty", "empty_strided",
          "new_empty_strided", "_efficientzerotensor")  # fmt: skip
def zeros(cx: Context, *_: Any, **__: Any) -> Node:
    """Zeros; memory that the original leaves uninitialised is zero here."""
    return cx.full(0, cx.out)


@converts("ones", "ones_like", "new_ones")
def ones(cx: Context, *_: Any, **__: Any) -> Node:
    """Ones."""
    return cx.full(1, cx.out)


@converts("scalar_tensor")
def scalar_tensor(cx: Context, value: float, **_: Any) -> Node:
    """A 0-dim constant."""
    return cx.full(value, cx.out)


@converts("fill")
def fill(cx: Context, _x: Node, value: Operand) -> Node:
    """A tensor of one value."""
    return cx.finish(value) if isinstance(value, Node) else cx.full(value, cx.out)


@converts("_to_copy")
def to_copy(cx: Context, x: Node, **_: Any) -> Node:
    """Change of element type; the device and the memory layout are not the graph's business."""
    return as_bool(cx, x) if cx.out.dtype is DType.BOOL else cx.b.cast(x, cx.out.dtype)


@converts("copy")
def copy(cx: Context, x: Node, source: Node, non_blocking: bool = False) -> Node:
    """``source`` in the type and shape of ``x``."""
    return cx.finish(source)
