"""Device functions that generated kernels call: each is printed above the kernel that needs it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megafuse.codegen.triton.fast import FAST

HELPERS = {
    "_wait_for_kernel_before": '''
@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
''',
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
    "_round_bf16_alone": '''
@triton.jit
def _round_bf16_alone(x):
    """One element rounded to bf16 and back."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $1, $1; and.b32 $0, pair, 0xffff0000; }",
        "=r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
''',
    "_round_f16": '''
@triton.jit
def _round_f16(x):
    """fp32 values rounded to fp16 and back, two at a time.

    In assembly, since LLVM would fuse a product that is rounded with what is added to it, and not round it at all.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 pair; .reg .b16 a, b; cvt.rn.f16x2.f32 pair, $3, $2; mov.b32 {a, b}, pair; cvt.f32.f16 $0, a; "
        "cvt.f32.f16 $1, b; }",
        "=f,=f,f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )
''',
    "_round_f16_alone": '''
@triton.jit
def _round_f16_alone(x):
    """One element rounded to fp16 and back."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a; cvt.rn.f16.f32 a, $1; cvt.f32.f16 $0, a; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
''',
    "_apart": '''
@triton.jit
def _apart(x):
    """x as it is.

    In assembly, since Triton would start a product's sums from what is added to it, and round each term at that size.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
''',
    "_to_f16": '''
@triton.jit
def _to_f16(x):
    """fp32 values rounded to fp16, two at a time."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
    )
''',
    "_to_bf16": '''
@triton.jit
def _to_bf16(x):
    """fp32 values rounded to bf16, two at a time."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )
''',
    "_widen_bf16": '''
@triton.jit
def _widen_bf16(x):
    """bf16 values as fp32, two at a time."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
    )
''',
    **FAST,
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
    "_rsqrt": '''
@triton.jit
def _rsqrt(x):
    """1 / sqrt(x) of fp32. What is below 2**-126, which the instruction takes for 0, is scaled first."""
    tiny = x < 1.1754943508222875e-38
    root = tl.rsqrt(tl.where(tiny, x * 16777216.0, x))
    return tl.where(tiny, root * 4096.0, root)
''',
    "_floor": '''
@triton.jit
def _floor(x):
    """The largest whole number up to x, of fp32: the instruction takes subnormal numbers for 0, truncation does not."""
    whole = libdevice.trunc(x)
    return tl.where(whole > x, whole - 1.0, whole)
''',
    "_ceil": '''
@triton.jit
def _ceil(x):
    """The smallest whole number from x on, of fp32; see ``_floor``."""
    whole = libdevice.trunc(x)
    return tl.where(whole < x, whole + 1.0, whole)
''',
    "_fmod": '''
@triton.jit
def _fmod(a, b):
    """Remainder with the dividend's sign; a small dividend is its own, a subnormal one too (libdevice flushes it)."""
    return tl.where(tl.abs(a) < tl.abs(b), a, libdevice.fmod(a, b))
''',
    "_remainder": '''
@triton.jit
def _remainder(a, b):
    """Remainder with the divisor's sign, of floats."""
    mod = _fmod(a, b)
    return tl.where((mod != 0) & ((b < 0) != (mod < 0)), mod + b, mod)
''',
    "_divide": '''
@triton.jit
def _divide(a, b):
    """Correctly rounded quotient: Triton's own ``/`` is approximate in fp32."""
    return tl.math.div_rn(a, b) if a.dtype == tl.float32 else a / b
''',
    "_floordiv": '''
@triton.jit
def _floordiv(a, b):
    """Floor of the quotient of floats, from the exact remainder (as c10's div_floor_floating)."""
    mod = _fmod(a, b)
    quotient = _divide(a - mod, b)
    quotient = tl.where((mod != 0) & ((b < 0) != (mod < 0)), quotient - 1.0, quotient)
    whole = tl.floor(quotient)
    whole = tl.where(quotient - whole > 0.5, whole + 1.0, whole)
    ratio = _divide(a, b)
    return tl.where(b == 0, ratio, tl.where(quotient != 0, whole, libdevice.copysign(ratio * 0.0, ratio)))
''',
    "_lgamma": '''
@triton.jit
def _lgamma(x):
    """Logarithm of the gamma function's size; -log|x| next to 0, where libdevice takes subnormal numbers for 0."""
    size = tl.abs(x)
    return tl.where((size < 1e-30) & (size > 0), -tl.log(size), libdevice.lgamma(x))
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
    part = wide - tl.floor(wide + 0.5)
    y = tl.where(wide < 0, 1.0 - wide, wide)
    shift = tl.where(wide < 0, -pi / libdevice.tan(pi * part), wide * 0.0)
    for _ in range(10):
        shift = tl.where(y < 10.0, shift - 1.0 / y, shift)
        y = tl.where(y < 10.0, y + 1.0, y)
    z = 1.0 / (y * y)
    series = 1.0 / 132 - z * (tl.full((), 691.0, tl.float64) / 32760 - z / 12)
    series = tl.full((), 1.0, tl.float64) / 252 - z * (tl.full((), 1.0, tl.float64) / 240 - z * series)
    series = z * (tl.full((), 1.0, tl.float64) / 12 - z * (tl.full((), 1.0, tl.float64) / 120 - z * series))
    psi = shift + tl.log(y) - 0.5 / y - series
    psi = tl.where(x == float("inf"), wide, psi)
    psi = tl.where((wide < 0) & (part == 0), float("nan"), psi)
    psi = tl.where(wide == 0, libdevice.copysign(wide * 0.0 + float("inf"), wide * -1.0), psi)
    return psi.to(x.dtype)
''',
}

_PACKED = {  # fused multiply-add: sm_80 has no other packed bf16 arithmetic
    "add": ("Sum", "a * 1 + b", "0x3F803F80; fma.rn.bf16x2 $0, $1, c, $2;"),
    "sub": ("Difference", "b * -1 + a", "0xBF80BF80; fma.rn.bf16x2 $0, $2, c, $1;"),
    "mul": ("Product", "a * b + -0", "0x80008000; fma.rn.bf16x2 $0, $1, $2, c;"),
}


def _packed_helper(fn: str) -> str:
    """bf16 arithmetic two elements at a time."""
    what, formula, code = _PACKED[fn]
    return f'''
@triton.jit
def _{fn}_bf16(a, b):
    """{what} of bf16 values, two at a time, rounded once: {formula}."""
    return tl.inline_asm_elementwise(
        "{{ .reg .b32 c; mov.b32 c, {code} }}",
        "=r,r,r",
        [a, b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )
'''


HELPERS |= {f"_{fn}_bf16": _packed_helper(fn) for fn in _PACKED}

MOST_SUMS = 8  # in one reduction; more are done in several


def _sum_helper(count: int) -> str:
    """The combine function of ``count`` sums done in one reduction."""
    left = ", ".join(f"a{n}" for n in range(count))
    right = ", ".join(f"b{n}" for n in range(count))
    sums = ", ".join(f"a{n} + b{n}" for n in range(count))
    doc = f'"""{count} sums at once: the combine function of a joint reduction."""'
    return f"\n@triton.jit\ndef _sum{count}({left}, {right}):\n    {doc}\n    return {sums}\n"


HELPERS |= {f"_sum{count}": _sum_helper(count) for count in range(2, MOST_SUMS + 1)}
_PLAIN = {
    "_exp": "tl.exp(x)",
    "_exp2": "tl.exp2(x)",
    "_sigmoid": "1.0 / (1.0 + tl.exp(-x))",
    "_to_f16": "x.to(tl.float16)",
    "_to_bf16": "x.to(tl.bfloat16)",
    "_widen_bf16": "x.to(tl.float32)",
    "_apart": "x",
    "_round_f16": "x.to(tl.float16).to(tl.float32)",
    "_round_f16_alone": "x.to(tl.float16).to(tl.float32)",
}
_PLAIN_HELPERS = {
    name: f'@triton.jit\ndef {name}(x):\n    """As the assembly, for Triton\'s interpreter."""\n    return {text}\n'
    for name, text in _PLAIN.items()
}
_CALL = re.compile(r"(?<![\w.])(_[a-z]\w+)\b")


def imports_of(parts: Sequence[str]) -> str:
    """The import lines of a module of ``parts``."""
    libdevice = any("libdevice." in text for text in parts)
    imports = "import triton\nimport triton.language as tl\n"
    return imports + "from triton.language.extra import libdevice\n" * libdevice


def used_helpers(text: str, assembly: bool) -> list[str]:
    """Sources of the helpers that ``text`` names, and of those that these name, in an order that defines before use.

    Without ``assembly``, fp32 helpers are written in plain Triton, which its interpreter can run.
    """
    sources = HELPERS if assembly else {**HELPERS, **_PLAIN_HELPERS}
    found: set[str] = set()
    todo = [text]
    while todo:
        new = {name for name in _CALL.findall(todo.pop()) if name in HELPERS} - found
        found |= new
        todo += [sources[name] for name in new]
    return [source.strip("\n") for name, source in sources.items() if name in found]
