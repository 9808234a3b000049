"""NumPy implementations of every function in ``ops.MAP_FNS``, with PyTorch's semantics at the edges.

Each takes arrays already in the type of the computation (fp32 or fp64 for floats, the own type for the rest) and
broadcasts. Functions that NumPy lacks go through ``math`` element by element in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Function = Callable[..., Array]


def _is_float(x: Array) -> bool:
    return np.issubdtype(x.dtype, np.floating)


def _elementwise(fn: Callable[[float], float]) -> Function:
    """Lift a Python function of one float to arrays, computed in fp64 and rounded to the argument's type."""

    def lifted(x: Array) -> Array:
        flat = np.asarray(x, np.float64).reshape(-1)
        out = np.fromiter(map(fn, flat.tolist()), np.float64, flat.size)
        return out.reshape(x.shape).astype(x.dtype)

    return lifted


def _lgamma(x: float) -> float:
    if math.isinf(x) or (x <= 0 and x == math.floor(x)):
        return math.inf
    return math.lgamma(x)


def _digamma(x: float) -> float:
    """Logarithmic derivative of the gamma function.

    Reflection ``psi(x) = psi(1-x) - pi/tan(pi x)`` for negative x, recurrence ``psi(x) = psi(x+1) - 1/x`` up to 10,
    then the asymptotic series (Abramowitz & Stegun 6.3.18).
    """
    if x == 0:
        return math.copysign(math.inf, -x)
    if math.isnan(x) or x == -math.inf or (x < 0 and x == math.floor(x)):
        return math.nan
    if x == math.inf:
        return math.inf
    if x < 0:
        frac = math.remainder(x, 1.0)  # exact, and cot(pi x) has period 1
        return _digamma(1 - x) - math.pi / math.tan(math.pi * frac)
    shift = 0.0
    while x < 10:
        shift, x = shift - 1 / x, x + 1
    z = 1 / (x * x)
    series = z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z * (1 / 132 - z * (691 / 32760 - z / 12))))))
    return shift + math.log(x) - 0.5 / x - series


def _erfcinv(q: float) -> float:
    """Where ``erfc`` is ``q``, for 0 < q <= 1: a rational start, then Newton steps on erfc, whose tail is exact."""
    z = math.sqrt(-math.log(q / 2))
    x = (((1.641345311 * z + 3.429567803) * z - 1.624906493) * z - 1.970840454) / (
        (1.637067800 * z + 3.543889200) * z + 1
    )
    for _ in range(4):
        step = (math.erfc(x) - q) * math.exp(x * x) * math.sqrt(math.pi) / 2
        x += step / (1 + x * step)
    return x


def _erfinv(y: float) -> float:
    """Inverse of the error function; a series with the cubic term is enough below 1e-5."""
    size = abs(y)
    if not size < 1:
        return math.copysign(math.inf, y) if size == 1 else math.nan
    if size < 1e-5:
        return y * math.sqrt(math.pi) / 2 * (1 + math.pi / 12 * y * y)
    x = _erfcinv(1 - size)
    x -= (math.erf(x) - size) * math.exp(x * x) * math.sqrt(math.pi) / 2 if size < 0.5 else 0
    return math.copysign(x, y)


def _erfcx(x: float) -> float:
    """exp(x^2) erfc(x); from 5 on by its continued fraction (Abramowitz & Stegun 7.1.14)."""
    if x < 5:
        return math.exp(x * x) * math.erfc(x) if x > -26.6 else math.inf
    below = x
    for k in range(60, 0, -1):
        below = x + k / 2 / below
    return 1 / (math.sqrt(math.pi) * below) if not math.isnan(x) else x


def _ndtri(p: float) -> float:
    """Where the normal distribution function is ``p``: -sqrt(2) erfcinv(2 p)."""
    if not 0 < p < 1:
        return -math.inf if p == 0 else math.inf if p == 1 else math.nan
    if p > 0.5:
        return math.sqrt(2) * _erfcinv(2 * (1 - p))
    return -math.sqrt(2) * _erfcinv(2 * p) if p != 0.5 else 0.0


def _sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))``, written through exp(-|x|) so that nothing overflows."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, e) / (1 + e))


def _sign(x: Array) -> Array:
    """-1, 0 or 1; 0 for NaN, as PyTorch has it."""
    return x if x.dtype.kind == "b" else ((x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)).astype(x.dtype)


def _float_or_same(fn: Function) -> Function:
    """``fn`` on floats, the identity on integers: rounding functions."""
    return lambda x: fn(x) if _is_float(x) else x


def _div(a: Array, b: Array) -> Array:
    """True division of floats; integers truncate towards zero."""
    if _is_float(a):
        return np.divide(a, b)
    q = np.floor_divide(a, b)
    inexact = (a - q * b != 0) & ((a < 0) != (b < 0)) & (b != 0)
    return np.asarray(q + inexact, a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    """Remainder with the divisor's sign: fmod, moved by one divisor where the signs differ."""
    mod = np.fmod(a, b)
    return np.where((mod != 0) & ((b < 0) != (mod < 0)), mod + b, mod)


def _floordiv(a: Array, b: Array) -> Array:
    """Floor of the quotient as PyTorch computes it, from the remainder (c10 ``div_floor_floating``)."""
    if not _is_float(a):
        return np.floor_divide(a, b)
    mod = np.fmod(a, b)
    div = (a - mod) / b
    div = np.where((mod != 0) & ((b < 0) != (mod < 0)), div - 1, div)
    low = np.floor(div)
    low = np.where(div - low > 0.5, low + 1, low)
    quotient = a / b
    return np.where(b == 0, quotient, np.where(div != 0, low, np.copysign(np.zeros_like(quotient), quotient)))


def _pow(a: Array, b: Array) -> Array:
    """Power; of integers with a negative exponent, the truncated reciprocal: 0 unless the base is 1 or -1."""
    if _is_float(a):
        return np.power(a, b)
    up = np.power(a, np.where(b < 0, 0, b).astype(b.dtype))
    odd_sign = np.where(b % 2 != 0, -1, 1)
    return np.where(b < 0, np.where(a == 1, 1, np.where(a == -1, odd_sign, 0)), up).astype(a.dtype)


FUNCTIONS: dict[str, Function] = {
    # sign and rounding
    "neg": np.negative,
    "abs": np.abs,
    "sign": _sign,
    "floor": _float_or_same(np.floor),
    "ceil": _float_or_same(np.ceil),
    "round": _float_or_same(np.rint),
    "trunc": _float_or_same(np.trunc),
    "not": np.invert,
    # roots, exponentials, logarithms
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "recip": lambda x: 1 / x,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "log10": np.log10,
    # trigonometry and friends
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sigmoid": _sigmoid,
    "erf": _elementwise(math.erf),
    "erfc": _elementwise(math.erfc),
    "lgamma": _elementwise(_lgamma),
    "digamma": _elementwise(_digamma),
    "erfinv": _elementwise(_erfinv),
    "erfcx": _elementwise(_erfcx),
    "ndtri": _elementwise(_ndtri),
    # arithmetic
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _div,
    "pow": _pow,
    "fmod": np.fmod,
    "remainder": _remainder,
    "floordiv": _floordiv,
    "atan2": np.arctan2,
    "copysign": np.copysign,
    "hypot": np.hypot,
    "nextafter": np.nextafter,
    "maximum": np.maximum,  # NaN wins, unlike fmax
    "minimum": np.minimum,
    # bits and logic
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": np.left_shift,
    "shr": np.right_shift,
    # comparisons and choice
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "isnan": lambda x: np.isnan(x) if _is_float(x) else np.zeros(x.shape, bool),
    "isinf": lambda x: np.isinf(x) if _is_float(x) else np.zeros(x.shape, bool),
    "where": np.where,
}
REDUCERS: dict[str, Function] = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}
