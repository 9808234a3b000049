"""Device functions that generated kernels call: each is printed above the kernel that needs it."""

from __future__ import annotations

import re

HELPERS = {
    "_round_bf16": '''
@triton.jit
def _round_bf16(x):
    """fp32 values rounded to bf16 and back, two at a time (a single conversion runs at a quarter of the rate).

    cvt.rn rounds to nearest even, subnormals too; overflow gives infinity, NaN stays NaN. A bf16 number is the upper
    half of the fp32 number of the same value, so the shift and the mask widen exactly.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
        "=r,=r,r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )
''',
    "_max": '''
@triton.jit
def _max(a, b):
    """The larger of two; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "_min": '''
@triton.jit
def _min(a, b):
    """The smaller of two; NaN if either is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "_prod": '''
@triton.jit
def _prod(a, b):
    """Product of two: the combine function of a product reduction."""
    return a * b
''',
    "_remainder": '''
@triton.jit
def _remainder(a, b):
    """Remainder with the divisor's sign, of floats."""
    mod = libdevice.fmod(a, b)
    return tl.where((mod != 0) & ((b < 0) != (mod < 0)), mod + b, mod)
''',
    "_floordiv": '''
@triton.jit
def _floordiv(a, b):
    """Floor of the quotient of floats, from the exact remainder (as c10's div_floor_floating)."""
    mod = libdevice.fmod(a, b)
    quotient = libdevice.div_rn(a - mod, b)
    quotient = tl.where((mod != 0) & ((b < 0) != (mod < 0)), quotient - 1.0, quotient)
    whole = tl.floor(quotient)
    whole = tl.where(quotient - whole > 0.5, whole + 1.0, whole)
    ratio = libdevice.div_rn(a, b)
    return tl.where(b == 0, ratio, tl.where(quotient != 0, whole, libdevice.copysign(ratio * 0.0, ratio)))
''',
    "_remainder_int": '''
@triton.jit
def _remainder_int(a, b):
    """Remainder with the divisor's sign, of integers."""
    mod = a % b
    return tl.where((mod != 0) & ((b < 0) != (mod < 0)), mod + b, mod)
''',
    "_floordiv_int": '''
@triton.jit
def _floordiv_int(a, b):
    """Floor of the quotient of integers."""
    quotient = a // b
    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), quotient - 1, quotient)
''',
    "_power": '''
@triton.jit
def _power(a, b):
    """Integer power by squaring, of an exponent that is not negative."""
    result = a * 0 + b * 0 + 1
    base, rest = a + b * 0, b + a * 0
    for _ in range(63):
        result = tl.where(rest % 2 != 0, result * base, result)
        base = base * base
        rest = rest // 2
    return result
''',
    "_pow_int": '''
@triton.jit
def _pow_int(a, b):
    """Integer power; a negative exponent gives 0 unless the base is 1 or -1."""
    power = _power(a, tl.where(b < 0, b * 0, b))
    odd_sign = tl.where(b % 2 != 0, power * 0 - 1, power * 0 + 1)
    return tl.where(b < 0, tl.where(a == 1, power * 0 + 1, tl.where(a == -1, odd_sign, power * 0)), power)
''',
    "_digamma": '''
@triton.jit
def _digamma(x):
    """Logarithmic derivative of the gamma function, worked in fp64.

    psi(x) = psi(1 - x) - pi / tan(pi x) below zero, psi(x) = psi(x + 1) - 1 / x up to 10, then the asymptotic series
    (Abramowitz & Stegun 6.3.18).
    """
    wide = x.to(tl.float64)
    pi = tl.full((), 3.141592653589793, tl.float64)
    whole = tl.floor(wide)
    y = tl.where(wide < 0, 1.0 - wide, wide)
    shift = tl.where(wide < 0, -pi / libdevice.tan(pi * (wide - whole)), wide * 0.0)
    for _ in range(10):
        shift = tl.where(y < 10.0, shift - 1.0 / y, shift)
        y = tl.where(y < 10.0, y + 1.0, y)
    z = 1.0 / (y * y)
    series = 1.0 / 132 - z * (tl.full((), 691.0, tl.float64) / 32760 - z / 12)
    series = tl.full((), 1.0, tl.float64) / 252 - z * (tl.full((), 1.0, tl.float64) / 240 - z * series)
    series = z * (tl.full((), 1.0, tl.float64) / 12 - z * (tl.full((), 1.0, tl.float64) / 120 - z * series))
    psi = shift + tl.log(y) - 0.5 / y - series
    psi = tl.where(x == float("inf"), wide, psi)
    psi = tl.where((wide < 0) & (wide == whole), float("nan"), psi)
    psi = tl.where(wide == 0, libdevice.copysign(wide * 0.0 + float("inf"), -wide), psi)
    return psi.to(x.dtype)
''',
}

MOST_SUMS = 8  # in one reduction; more are done in several


def _sum_helper(count: int) -> str:
    """The combine function of ``count`` sums done in one reduction."""
    left = ", ".join(f"a{n}" for n in range(count))
    right = ", ".join(f"b{n}" for n in range(count))
    sums = ", ".join(f"a{n} + b{n}" for n in range(count))
    doc = f'"""{count} sums at once: the combine function of a joint reduction."""'
    return f"\n@triton.jit\ndef _sum{count}({left}, {right}):\n    {doc}\n    return {sums}\n"


HELPERS |= {f"_sum{count}": _sum_helper(count) for count in range(2, MOST_SUMS + 1)}
_CALL = re.compile(r"(?<![\w.])(_[a-z]\w+)\b")


def used_helpers(text: str) -> list[str]:
    """Sources of the helpers that ``text`` names, and of those that these name, in an order that defines before use."""
    found: set[str] = set()
    todo = [text]
    while todo:
        new = {name for name in _CALL.findall(todo.pop()) if name in HELPERS} - found
        found |= new
        todo += [HELPERS[name] for name in new]
    return [source.strip("\n") for name, source in HELPERS.items() if name in found]
