import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _remainder(a, b):
    """Remainder with the divisor's sign, of floats."""
    mod = libdevice.fmod(a, b)
    return tl.where((mod != 0) & ((b < 0) != (mod < 0)), mod + b, mod)


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


@triton.jit
def maps_f32(
    a_ptr,  # f32 [126]
    b_ptr,  # f32 [126]
    choice_ptr,  # bool [126]
    shift_ptr,  # f32 [126]
    neg_to_ptr,  # out f32 [126]
    abs_to_ptr,  # out f32 [126]
    sign_to_ptr,  # out f32 [126]
    floor_to_ptr,  # out f32 [126]
    ceil_to_ptr,  # out f32 [126]
    round_to_ptr,  # out f32 [126]
    trunc_to_ptr,  # out f32 [126]
    sqrt_to_ptr,  # out f32 [126]
    rsqrt_to_ptr,  # out f32 [126]
    recip_to_ptr,  # out f32 [126]
    exp_to_ptr,  # out f32 [126]
    exp2_to_ptr,  # out f32 [126]
    expm1_to_ptr,  # out f32 [126]
    log_to_ptr,  # out f32 [126]
    log2_to_ptr,  # out f32 [126]
    log1p_to_ptr,  # out f32 [126]
    log10_to_ptr,  # out f32 [126]
    sin_to_ptr,  # out f32 [126]
    cos_to_ptr,  # out f32 [126]
    tan_to_ptr,  # out f32 [126]
    tanh_to_ptr,  # out f32 [126]
    sigmoid_to_ptr,  # out f32 [126]
    erf_to_ptr,  # out f32 [126]
    erfc_to_ptr,  # out f32 [126]
    asin_to_ptr,  # out f32 [126]
    acos_to_ptr,  # out f32 [126]
    atan_to_ptr,  # out f32 [126]
    sinh_to_ptr,  # out f32 [126]
    cosh_to_ptr,  # out f32 [126]
    asinh_to_ptr,  # out f32 [126]
    acosh_to_ptr,  # out f32 [126]
    atanh_to_ptr,  # out f32 [126]
    lgamma_to_ptr,  # out f32 [126]
    digamma_to_ptr,  # out f32 [126]
    add_to_ptr,  # out f32 [126]
    sub_to_ptr,  # out f32 [126]
    mul_to_ptr,  # out f32 [126]
    maximum_to_ptr,  # out f32 [126]
    minimum_to_ptr,  # out f32 [126]
    div_to_ptr,  # out f32 [126]
    pow_to_ptr,  # out f32 [126]
    fmod_to_ptr,  # out f32 [126]
    remainder_to_ptr,  # out f32 [126]
    floordiv_to_ptr,  # out f32 [126]
    atan2_to_ptr,  # out f32 [126]
    copysign_to_ptr,  # out f32 [126]
    hypot_to_ptr,  # out f32 [126]
    eq_to_ptr,  # out bool [126]
    ne_to_ptr,  # out bool [126]
    lt_to_ptr,  # out bool [126]
    le_to_ptr,  # out bool [126]
    gt_to_ptr,  # out bool [126]
    ge_to_ptr,  # out bool [126]
    isnan_to_ptr,  # out bool [126]
    isinf_to_ptr,  # out bool [126]
    where_to_ptr,  # out f32 [126]
    to_f32_ptr,  # out f32 [126]
    to_f64_ptr,  # out f64 [126]
    to_bool_ptr,  # out bool [126]
    to_f16_ptr,  # out f16 [126]
):
    """Every pointwise function on f32.

    Grid 1 x 1; tile 1 of 1 rows x 126 columns as 128; num_warps=1, num_stages=1.
    """
    col = tl.arange(0, 128)[None, :]
    col_mask = col < 126
    a = tl.load(a_ptr + col, mask=col_mask, other=0.0)
    b = tl.load(b_ptr + col, mask=col_mask, other=0.0)
    choice = tl.load(choice_ptr + col, mask=col_mask, other=0) != 0
    neg_value = -a
    tl.store(neg_to_ptr + col, neg_value, mask=col_mask)
    abs_value = tl.abs(a)
    tl.store(abs_to_ptr + col, abs_value, mask=col_mask)
    sign_value = (a > 0).to(tl.float32) - (a < 0).to(tl.float32)
    tl.store(sign_to_ptr + col, sign_value, mask=col_mask)
    floor_value = tl.floor(a)
    tl.store(floor_to_ptr + col, floor_value, mask=col_mask)
    ceil_value = tl.ceil(a)
    tl.store(ceil_to_ptr + col, ceil_value, mask=col_mask)
    round_value = libdevice.rint(a)
    tl.store(round_to_ptr + col, round_value, mask=col_mask)
    trunc_value = libdevice.trunc(a)
    tl.store(trunc_to_ptr + col, trunc_value, mask=col_mask)
    sqrt_value = tl.math.sqrt_rn(a)
    tl.store(sqrt_to_ptr + col, sqrt_value, mask=col_mask)
    rsqrt_value = tl.rsqrt(a)
    tl.store(rsqrt_to_ptr + col, rsqrt_value, mask=col_mask)
    recip_value = tl.math.div_rn(1.0, a)
    tl.store(recip_to_ptr + col, recip_value, mask=col_mask)
    exp_value = tl.exp(a)
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
    sigmoid_value = 1.0 / (1.0 + tl.exp(-a))
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
    lgamma_value = libdevice.lgamma(a)
    tl.store(lgamma_to_ptr + col, lgamma_value, mask=col_mask)
    digamma_value = _digamma(a)
    tl.store(digamma_to_ptr + col, digamma_value, mask=col_mask)
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
    fmod_value = libdevice.fmod(a, b)
    tl.store(fmod_to_ptr + col, fmod_value, mask=col_mask)
    remainder_value = _remainder(a, b)
    tl.store(remainder_to_ptr + col, remainder_value, mask=col_mask)
    floordiv_value = _floordiv(a, b)
    tl.store(floordiv_to_ptr + col, floordiv_value, mask=col_mask)
    atan2_value = libdevice.atan2(a, b)
    tl.store(atan2_to_ptr + col, atan2_value, mask=col_mask)
    copysign_value = libdevice.copysign(a, b)
    tl.store(copysign_to_ptr + col, copysign_value, mask=col_mask)
    hypot_value = libdevice.hypot(a, b)
    tl.store(hypot_to_ptr + col, hypot_value, mask=col_mask)
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
