import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _exp(x):
    """e**x = 2**(x * log2(e)) with a relative error below 2**-22 + |x| * 2**-23; below 2**-126 it is 0."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _sigmoid(x):
    """1 / (1 + e**-x) with the error of e**-x and of two roundings; below 2**-126 it is 0."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, t; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _rsqrt(x):
    """1 / sqrt(x) of fp32. What is below 2**-126, which the instruction takes for 0, is scaled first."""
    tiny = x < 1.1754943508222875e-38
    root = tl.rsqrt(tl.where(tiny, x * 16777216.0, x))
    return tl.where(tiny, root * 4096.0, root)


@triton.jit
def _floor(x):
    """The largest whole number up to x, of fp32: the instruction takes subnormal numbers for 0, truncation does not."""
    whole = libdevice.trunc(x)
    return tl.where(whole > x, whole - 1.0, whole)


@triton.jit
def _ceil(x):
    """The smallest whole number from x on, of fp32; see ``_floor``."""
    whole = libdevice.trunc(x)
    return tl.where(whole < x, whole + 1.0, whole)


@triton.jit
def _fmod(a, b):
    """Remainder with the dividend's sign; a small dividend is its own, a subnormal one too (libdevice flushes it)."""
    return tl.where(tl.abs(a) < tl.abs(b), a, libdevice.fmod(a, b))


@triton.jit
def _remainder(a, b):
    """Remainder with the divisor's sign, of floats."""
    mod = _fmod(a, b)
    return tl.where((mod != 0) & ((b < 0) != (mod < 0)), mod + b, mod)


@triton.jit
def _divide(a, b):
    """Correctly rounded quotient: Triton's own ``/`` is approximate in fp32."""
    return tl.math.div_rn(a, b) if a.dtype == tl.float32 else a / b


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


@triton.jit
def _lgamma(x):
    """Logarithm of the gamma function's size; -log|x| next to 0, where libdevice takes subnormal numbers for 0."""
    size = tl.abs(x)
    return tl.where((size < 1e-30) & (size > 0), -tl.log(size), libdevice.lgamma(x))


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


@triton.jit
def maps_f32(
    a_ptr,  # f32 [132]
    b_ptr,  # f32 [132]
    choice_ptr,  # bool [132]
    shift_ptr,  # f32 [132]
    neg_to_ptr,  # out f32 [132]
    over_neg_to_ptr,  # out f32 [132]
    abs_to_ptr,  # out f32 [132]
    sign_to_ptr,  # out f32 [132]
    floor_to_ptr,  # out f32 [132]
    over_floor_to_ptr,  # out f32 [132]
    ceil_to_ptr,  # out f32 [132]
    over_ceil_to_ptr,  # out f32 [132]
    round_to_ptr,  # out f32 [132]
    over_round_to_ptr,  # out f32 [132]
    trunc_to_ptr,  # out f32 [132]
    over_trunc_to_ptr,  # out f32 [132]
    sqrt_to_ptr,  # out f32 [132]
    rsqrt_to_ptr,  # out f32 [132]
    recip_to_ptr,  # out f32 [132]
    exp_to_ptr,  # out f32 [132]
    exp2_to_ptr,  # out f32 [132]
    expm1_to_ptr,  # out f32 [132]
    log_to_ptr,  # out f32 [132]
    log2_to_ptr,  # out f32 [132]
    log1p_to_ptr,  # out f32 [132]
    log10_to_ptr,  # out f32 [132]
    sin_to_ptr,  # out f32 [132]
    cos_to_ptr,  # out f32 [132]
    tan_to_ptr,  # out f32 [132]
    tanh_to_ptr,  # out f32 [132]
    sigmoid_to_ptr,  # out f32 [132]
    erf_to_ptr,  # out f32 [132]
    erfc_to_ptr,  # out f32 [132]
    asin_to_ptr,  # out f32 [132]
    acos_to_ptr,  # out f32 [132]
    atan_to_ptr,  # out f32 [132]
    sinh_to_ptr,  # out f32 [132]
    cosh_to_ptr,  # out f32 [132]
    asinh_to_ptr,  # out f32 [132]
    acosh_to_ptr,  # out f32 [132]
    atanh_to_ptr,  # out f32 [132]
    lgamma_to_ptr,  # out f32 [132]
    digamma_to_ptr,  # out f32 [132]
    erfinv_to_ptr,  # out f32 [132]
    erfcx_to_ptr,  # out f32 [132]
    ndtri_to_ptr,  # out f32 [132]
    add_to_ptr,  # out f32 [132]
    sub_to_ptr,  # out f32 [132]
    mul_to_ptr,  # out f32 [132]
    maximum_to_ptr,  # out f32 [132]
    minimum_to_ptr,  # out f32 [132]
    div_to_ptr,  # out f32 [132]
    pow_to_ptr,  # out f32 [132]
    fmod_to_ptr,  # out f32 [132]
    remainder_to_ptr,  # out f32 [132]
    floordiv_to_ptr,  # out f32 [132]
    atan2_to_ptr,  # out f32 [132]
    copysign_to_ptr,  # out f32 [132]
    over_copysign_to_ptr,  # out f32 [132]
    hypot_to_ptr,  # out f32 [132]
    nextafter_to_ptr,  # out f32 [132]
    eq_to_ptr,  # out bool [132]
    ne_to_ptr,  # out bool [132]
    lt_to_ptr,  # out bool [132]
    le_to_ptr,  # out bool [132]
    gt_to_ptr,  # out bool [132]
    ge_to_ptr,  # out bool [132]
    isnan_to_ptr,  # out bool [132]
    isinf_to_ptr,  # out bool [132]
    where_to_ptr,  # out f32 [132]
    to_f32_ptr,  # out f32 [132]
    to_f64_ptr,  # out f64 [132]
    to_bool_ptr,  # out bool [132]
    to_f16_ptr,  # out f16 [132]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Every pointwise function on f32.

    Grid 1 x 1; tile 1 of 1 rows x 132 columns as 256; num_warps=1, num_stages=1.
    """
    if early:
        _wait_for_kernel_before()
    col = tl.arange(0, 256)
    col_mask = col < 132
    a = tl.load(a_ptr + col, mask=col_mask, other=0.0)
    b = tl.load(b_ptr + col, mask=col_mask, other=0.0)
    choice = tl.load(choice_ptr + col, mask=col_mask, other=0) != 0
    neg_value = a * -1.0
    tl.store(neg_to_ptr + col, neg_value, mask=col_mask)
    neg_inverse = tl.math.div_rn(1.0, neg_value)
    tl.store(over_neg_to_ptr + col, neg_inverse, mask=col_mask)
    abs_value = tl.abs(a)
    tl.store(abs_to_ptr + col, abs_value, mask=col_mask)
    sign_value = (a > 0).to(tl.float32) - (a < 0).to(tl.float32)
    tl.store(sign_to_ptr + col, sign_value, mask=col_mask)
    floor_value = _floor(a)
    tl.store(floor_to_ptr + col, floor_value, mask=col_mask)
    floor_inverse = tl.math.div_rn(1.0, floor_value)
    tl.store(over_floor_to_ptr + col, floor_inverse, mask=col_mask)
    ceil_value = _ceil(a)
    tl.store(ceil_to_ptr + col, ceil_value, mask=col_mask)
    ceil_inverse = tl.math.div_rn(1.0, ceil_value)
    tl.store(over_ceil_to_ptr + col, ceil_inverse, mask=col_mask)
    round_value = libdevice.rint(a)
    tl.store(round_to_ptr + col, round_value, mask=col_mask)
    round_inverse = tl.math.div_rn(1.0, round_value)
    tl.store(over_round_to_ptr + col, round_inverse, mask=col_mask)
    trunc_value = libdevice.trunc(a)
    tl.store(trunc_to_ptr + col, trunc_value, mask=col_mask)
    trunc_inverse = tl.math.div_rn(1.0, trunc_value)
    tl.store(over_trunc_to_ptr + col, trunc_inverse, mask=col_mask)
    sqrt_value = tl.math.sqrt_rn(a)
    tl.store(sqrt_to_ptr + col, sqrt_value, mask=col_mask)
    rsqrt_value = _rsqrt(a)
    tl.store(rsqrt_to_ptr + col, rsqrt_value, mask=col_mask)
    recip_value = tl.math.div_rn(1.0, a)
    tl.store(recip_to_ptr + col, recip_value, mask=col_mask)
    exp_value = _exp(a)
    tl.store(exp_to_ptr + col, exp_value, mask=col_mask)
    exp2_value = tl.exp2(a)
    tl.store(exp2_to_ptr + col, exp2_value, mask=col_mask)
    expm1_value = libdevice.expm1(a)
    tl.store(expm1_to_ptr + col, expm1_value, mask=col_mask)
    log_value = tl.log(a)
    tl.store(log_to_ptr + col, log_value, mask=col_mask)
    log2_value = tl.log2(a)
    tl.store(log2_to_ptr + col, log2_value, mask=col_mask)
    log1p_value = libdevice.log1p(a)
    tl.store(log1p_to_ptr + col, log1p_value, mask=col_mask)
    log10_value = libdevice.log10(a)
    tl.store(log10_to_ptr + col, log10_value, mask=col_mask)
    sin_value = tl.sin(a)
    tl.store(sin_to_ptr + col, sin_value, mask=col_mask)
    cos_value = tl.cos(a)
    tl.store(cos_to_ptr + col, cos_value, mask=col_mask)
    tan_value = libdevice.tan(a)
    tl.store(tan_to_ptr + col, tan_value, mask=col_mask)
    tanh_value = libdevice.tanh(a)
    tl.store(tanh_to_ptr + col, tanh_value, mask=col_mask)
    sigmoid_value = _sigmoid(a)
    tl.store(sigmoid_to_ptr + col, sigmoid_value, mask=col_mask)
    erf_value = tl.erf(a)
    tl.store(erf_to_ptr + col, erf_value, mask=col_mask)
    erfc_value = libdevice.erfc(a)
    tl.store(erfc_to_ptr + col, erfc_value, mask=col_mask)
    asin_value = libdevice.asin(a)
    tl.store(asin_to_ptr + col, asin_value, mask=col_mask)
    acos_value = libdevice.acos(a)
    tl.store(acos_to_ptr + col, acos_value, mask=col_mask)
    atan_value = libdevice.atan(a)
    tl.store(atan_to_ptr + col, atan_value, mask=col_mask)
    sinh_value = libdevice.sinh(a)
    tl.store(sinh_to_ptr + col, sinh_value, mask=col_mask)
    cosh_value = libdevice.cosh(a)
    tl.store(cosh_to_ptr + col, cosh_value, mask=col_mask)
    asinh_value = libdevice.asinh(a)
    tl.store(asinh_to_ptr + col, asinh_value, mask=col_mask)
    acosh_value = libdevice.acosh(a)
    tl.store(acosh_to_ptr + col, acosh_value, mask=col_mask)
    atanh_value = libdevice.atanh(a)
    tl.store(atanh_to_ptr + col, atanh_value, mask=col_mask)
    lgamma_value = _lgamma(a)
    tl.store(lgamma_to_ptr + col, lgamma_value, mask=col_mask)
    digamma_value = _digamma(a)
    tl.store(digamma_to_ptr + col, digamma_value, mask=col_mask)
    erfinv_value = libdevice.erfinv(a)
    tl.store(erfinv_to_ptr + col, erfinv_value, mask=col_mask)
    erfcx_value = libdevice.erfcx(a)
    tl.store(erfcx_to_ptr + col, erfcx_value, mask=col_mask)
    ndtri_value = libdevice.normcdfinv(a)
    tl.store(ndtri_to_ptr + col, ndtri_value, mask=col_mask)
    add_value = a + b
    tl.store(add_to_ptr + col, add_value, mask=col_mask)
    sub_value = a - b
    tl.store(sub_to_ptr + col, sub_value, mask=col_mask)
    mul_value = a * b
    tl.store(mul_to_ptr + col, mul_value, mask=col_mask)
    maximum_value = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    tl.store(maximum_to_ptr + col, maximum_value, mask=col_mask)
    minimum_value = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    tl.store(minimum_to_ptr + col, minimum_value, mask=col_mask)
    div_value = tl.math.div_rn(a, b)
    tl.store(div_to_ptr + col, div_value, mask=col_mask)
    pow_value = libdevice.pow(a, b)
    tl.store(pow_to_ptr + col, pow_value, mask=col_mask)
    fmod_value = _fmod(a, b)
    tl.store(fmod_to_ptr + col, fmod_value, mask=col_mask)
    remainder_value = _remainder(a, b)
    tl.store(remainder_to_ptr + col, remainder_value, mask=col_mask)
    floordiv_value = _floordiv(a, b)
    tl.store(floordiv_to_ptr + col, floordiv_value, mask=col_mask)
    atan2_value = libdevice.atan2(a, b)
    tl.store(atan2_to_ptr + col, atan2_value, mask=col_mask)
    copysign_value = libdevice.copysign(a, b)
    tl.store(copysign_to_ptr + col, copysign_value, mask=col_mask)
    copysign_inverse = tl.math.div_rn(1.0, copysign_value)
    tl.store(over_copysign_to_ptr + col, copysign_inverse, mask=col_mask)
    hypot_value = libdevice.hypot(a, b)
    tl.store(hypot_to_ptr + col, hypot_value, mask=col_mask)
    nextafter_value = libdevice.nextafter(a, b)
    tl.store(nextafter_to_ptr + col, nextafter_value, mask=col_mask)
    eq_value = a == b
    tl.store(eq_to_ptr + col, eq_value, mask=col_mask)
    ne_value = a != b
    tl.store(ne_to_ptr + col, ne_value, mask=col_mask)
    lt_value = a < b
    tl.store(lt_to_ptr + col, lt_value, mask=col_mask)
    le_value = a <= b
    tl.store(le_to_ptr + col, le_value, mask=col_mask)
    gt_value = a > b
    tl.store(gt_to_ptr + col, gt_value, mask=col_mask)
    ge_value = a >= b
    tl.store(ge_to_ptr + col, ge_value, mask=col_mask)
    isnan_value = a != a
    tl.store(isnan_to_ptr + col, isnan_value, mask=col_mask)
    isinf_value = tl.abs(a) == float("inf")
    tl.store(isinf_to_ptr + col, isinf_value, mask=col_mask)
    where_value = tl.where(choice, a, b)
    tl.store(where_to_ptr + col, where_value, mask=col_mask)
    as_f32 = a
    tl.store(to_f32_ptr + col, as_f32, mask=col_mask)
    as_f64 = a.to(tl.float64)
    tl.store(to_f64_ptr + col, as_f64, mask=col_mask)
    as_bool = a != 0
    tl.store(to_bool_ptr + col, as_bool, mask=col_mask)
    as_f16 = a.to(tl.float16)
    tl.store(to_f16_ptr + col, as_f16, mask=col_mask)
