"""Functions that generated NumPy modules define above the kernel where it needs them."""

from __future__ import annotations

import re
from collections.abc import Sequence

HELPERS = {
    "_matrix": '''
def _matrix(buffer, start, shape, strides):
    """A strided matrix of a flat buffer, widened to fp32 at least; strides in elements."""
    steps = [step * buffer.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(buffer[start:], shape, steps).astype(np.result_type(buffer, np.float32))
''',
    "_load": '''
def _load(buffer, offsets, inside, other):
    """Elements of a buffer where ``inside`` holds, ``other`` elsewhere."""
    return np.where(inside, buffer[np.where(inside, offsets, 0)], buffer.dtype.type(other))
''',
    "_store": '''
def _store(buffer, offsets, inside, value):
    """Write ``value`` where ``inside`` holds."""
    offsets, inside, value = np.broadcast_arrays(offsets, inside, value)
    buffer[offsets[inside]] = value[inside]
''',
    "_elementwise": '''
def _elementwise(fn, x):
    """A Python function of one float, worked in fp64 and rounded to the type of ``x``."""
    x = np.asarray(x)
    return np.array([fn(v) for v in x.ravel().tolist()], np.float64).reshape(x.shape).astype(x.dtype)
''',
    "_lgamma": '''
def _lgamma(x):
    """Logarithm of the gamma function's size; infinite at its poles."""
    return math.inf if math.isinf(x) or (x <= 0 and x == math.floor(x)) else math.lgamma(x)
''',
    "_digamma": '''
def _digamma(x):
    """Logarithmic derivative of the gamma function (Abramowitz & Stegun 6.3.5, 6.3.7, 6.3.18)."""
    if x == 0:
        return math.copysign(math.inf, -x)
    if math.isnan(x) or x == -math.inf or (x < 0 and x == math.floor(x)):
        return math.nan
    if x == math.inf:
        return math.inf
    if x < 0:
        return _digamma(1 - x) - math.pi / math.tan(math.pi * math.remainder(x, 1.0))
    shift = 0.0
    while x < 10:
        shift, x = shift - 1 / x, x + 1
    z = 1 / (x * x)
    series = 1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z * (1 / 132 - z * (691 / 32760 - z / 12)))))
    return shift + math.log(x) - 0.5 / x - z * series
''',
    "_erfcinv": '''
def _erfcinv(q):
    """Where ``erfc`` is ``q``, for 0 < q <= 1: a rational start, then Newton steps on erfc, whose tail is exact."""
    z = math.sqrt(-math.log(q / 2))
    x = (((1.641345311 * z + 3.429567803) * z - 1.624906493) * z - 1.970840454) / (
        (1.637067800 * z + 3.543889200) * z + 1
    )
    for _ in range(4):
        step = (math.erfc(x) - q) * math.exp(x * x) * math.sqrt(math.pi) / 2
        x += step / (1 + x * step)
    return x
''',
    "_erfinv": '''
def _erfinv(y):
    """Inverse of the error function; a series with the cubic term is enough below 1e-5."""
    size = abs(y)
    if not size < 1:
        return math.copysign(math.inf, y) if size == 1 else math.nan
    if size < 1e-5:
        return y * math.sqrt(math.pi) / 2 * (1 + math.pi / 12 * y * y)
    x = _erfcinv(1 - size)
    x -= (math.erf(x) - size) * math.exp(x * x) * math.sqrt(math.pi) / 2 if size < 0.5 else 0
    return math.copysign(x, y)
''',
    "_erfcx": '''
def _erfcx(x):
    """exp(x^2) erfc(x); from 5 on by its continued fraction (Abramowitz & Stegun 7.1.14)."""
    if x < 5:
        return math.exp(x * x) * math.erfc(x) if x > -26.6 else math.inf
    below = x
    for k in range(60, 0, -1):
        below = x + k / 2 / below
    return 1 / (math.sqrt(math.pi) * below) if not math.isnan(x) else x
''',
    "_ndtri": '''
def _ndtri(p):
    """Where the normal distribution function is ``p``: -sqrt(2) erfcinv(2 p)."""
    if not 0 < p < 1:
        return -math.inf if p == 0 else math.inf if p == 1 else math.nan
    if p > 0.5:
        return math.sqrt(2) * _erfcinv(2 * (1 - p))
    return -math.sqrt(2) * _erfcinv(2 * p) if p != 0.5 else 0.0
''',
    "_div_int": '''
def _div_int(a, b):
    """Quotient of integers, cut towards zero."""
    q = np.floor_divide(a, b)
    inexact = (a - q * b != 0) & ((a < 0) != (b < 0)) & (b != 0)
    return q + inexact.astype(q.dtype)
''',
    "_remainder": '''
def _remainder(a, b):
    """Remainder with the divisor's sign."""
    mod = np.fmod(a, b)
    return np.where((mod != 0) & ((b < 0) != (mod < 0)), mod + b, mod)
''',
    "_floordiv": '''
def _floordiv(a, b):
    """Floor of the quotient of floats, from the exact remainder (as c10's div_floor_floating)."""
    mod = np.fmod(a, b)
    quotient = (a - mod) / b
    quotient = np.where((mod != 0) & ((b < 0) != (mod < 0)), quotient - 1, quotient)
    whole = np.floor(quotient)
    whole = np.where(quotient - whole > 0.5, whole + 1, whole)
    ratio = a / b
    return np.where(b == 0, ratio, np.where(quotient != 0, whole, np.copysign(ratio * 0, ratio)))
''',
    "_pow_int": '''
def _pow_int(a, b):
    """Integer power; a negative exponent gives 0 unless the base is 1 or -1."""
    up = np.power(a, np.maximum(b, b * 0))
    odd_sign = np.where(b % 2 != 0, -1, 1)
    return np.where(b < 0, np.where(a == 1, 1, np.where(a == -1, odd_sign, 0)), up).astype(up.dtype)
''',
}
_NAME = re.compile(r"(?<![\w.])(_[a-z]\w+)\b")


def imports_of(parts: Sequence[str]) -> str:
    """The import lines of a module of ``parts``."""
    text = "".join(parts)
    imports = "import math\n\n" * ("math." in text)
    return imports + "import ml_dtypes\n" * ("ml_dtypes." in text) + "import numpy as np\n"


def used_helpers(text: str) -> list[str]:
    """Sources of the helpers that ``text`` names, and of those that these name."""
    found: set[str] = set()
    todo = [text]
    while todo:
        new = {name for name in _NAME.findall(todo.pop()) if name in HELPERS} - found
        found |= new
        todo += [HELPERS[name] for name in new]
    return [source.strip("\n") for name, source in HELPERS.items() if name in found]
