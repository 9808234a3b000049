import math

import numpy as np


def _elementwise(fn, x):
    """A Python function of one float, worked in fp64 and rounded to the type of ``x``."""
    x = np.asarray(x)
    return np.array([fn(v) for v in x.ravel().tolist()], np.float64).reshape(x.shape).astype(x.dtype)


def _lgamma(x):
    """Logarithm of the gamma function's size; infinite at its poles."""
    return math.inf if math.isinf(x) or (x <= 0 and x == math.floor(x)) else math.lgamma(x)


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


def _erfcx(x):
    """exp(x^2) erfc(x); from 5 on by its continued fraction (Abramowitz & Stegun 7.1.14)."""
    if x < 5:
        return math.exp(x * x) * math.erfc(x) if x > -26.6 else math.inf
    below = x
    for k in range(60, 0, -1):
        below = x + k / 2 / below
    return 1 / (math.sqrt(math.pi) * below) if not math.isnan(x) else x


def _ndtri(p):
    """Where the normal distribution function is ``p``: -sqrt(2) erfcinv(2 p)."""
    if not 0 < p < 1:
        return -math.inf if p == 0 else math.inf if p == 1 else math.nan
    if p > 0.5:
        return math.sqrt(2) * _erfcinv(2 * (1 - p))
    return -math.sqrt(2) * _erfcinv(2 * p) if p != 0.5 else 0.0


def _remainder(a, b):
    """Remainder with the divisor's sign."""
    mod = np.fmod(a, b)
    return np.where((mod != 0) & ((b < 0) != (mod < 0)), mod + b, mod)


def _floordiv(a, b):
    """Floor of the quotient of floats, from the exact remainder (as c10's div_floor_floating)."""
    mod = np.fmod(a, b)
    quotient = (a - mod) / b
    quotient = np.where((mod != 0) & ((b < 0) != (mod < 0)), quotient - 1, quotient)
    whole = np.floor(quotient)
    whole = np.where(quotient - whole > 0.5, whole + 1, whole)
    ratio = a / b
    return np.where(b == 0, ratio, np.where(quotient != 0, whole, np.copysign(ratio * 0, ratio)))


@np.errstate(all="ignore")
def maps_f32(
    a_buf,  # f32 [132], flat
    b_buf,  # f32 [132], flat
    choice_buf,  # bool [132], flat
    shift_buf,  # f32 [132], flat
    neg_to_buf,  # out f32 [132], flat
    over_neg_to_buf,  # out f32 [132], flat
    abs_to_buf,  # out f32 [132], flat
    sign_to_buf,  # out f32 [132], flat
    floor_to_buf,  # out f32 [132], flat
    over_floor_to_buf,  # out f32 [132], flat
    ceil_to_buf,  # out f32 [132], flat
    over_ceil_to_buf,  # out f32 [132], flat
    round_to_buf,  # out f32 [132], flat
    over_round_to_buf,  # out f32 [132], flat
    trunc_to_buf,  # out f32 [132], flat
    over_trunc_to_buf,  # out f32 [132], flat
    sqrt_to_buf,  # out f32 [132], flat
    rsqrt_to_buf,  # out f32 [132], flat
    recip_to_buf,  # out f32 [132], flat
    exp_to_buf,  # out f32 [132], flat
    exp2_to_buf,  # out f32 [132], flat
    expm1_to_buf,  # out f32 [132], flat
    log_to_buf,  # out f32 [132], flat
    log2_to_buf,  # out f32 [132], flat
    log1p_to_buf,  # out f32 [132], flat
    log10_to_buf,  # out f32 [132], flat
    sin_to_buf,  # out f32 [132], flat
    cos_to_buf,  # out f32 [132], flat
    tan_to_buf,  # out f32 [132], flat
    tanh_to_buf,  # out f32 [132], flat
    sigmoid_to_buf,  # out f32 [132], flat
    erf_to_buf,  # out f32 [132], flat
    erfc_to_buf,  # out f32 [132], flat
    asin_to_buf,  # out f32 [132], flat
    acos_to_buf,  # out f32 [132], flat
    atan_to_buf,  # out f32 [132], flat
    sinh_to_buf,  # out f32 [132], flat
    cosh_to_buf,  # out f32 [132], flat
    asinh_to_buf,  # out f32 [132], flat
    acosh_to_buf,  # out f32 [132], flat
    atanh_to_buf,  # out f32 [132], flat
    lgamma_to_buf,  # out f32 [132], flat
    digamma_to_buf,  # out f32 [132], flat
    erfinv_to_buf,  # out f32 [132], flat
    erfcx_to_buf,  # out f32 [132], flat
    ndtri_to_buf,  # out f32 [132], flat
    add_to_buf,  # out f32 [132], flat
    sub_to_buf,  # out f32 [132], flat
    mul_to_buf,  # out f32 [132], flat
    maximum_to_buf,  # out f32 [132], flat
    minimum_to_buf,  # out f32 [132], flat
    div_to_buf,  # out f32 [132], flat
    pow_to_buf,  # out f32 [132], flat
    fmod_to_buf,  # out f32 [132], flat
    remainder_to_buf,  # out f32 [132], flat
    floordiv_to_buf,  # out f32 [132], flat
    atan2_to_buf,  # out f32 [132], flat
    copysign_to_buf,  # out f32 [132], flat
    over_copysign_to_buf,  # out f32 [132], flat
    hypot_to_buf,  # out f32 [132], flat
    nextafter_to_buf,  # out f32 [132], flat
    eq_to_buf,  # out bool [132], flat
    ne_to_buf,  # out bool [132], flat
    lt_to_buf,  # out bool [132], flat
    le_to_buf,  # out bool [132], flat
    gt_to_buf,  # out bool [132], flat
    ge_to_buf,  # out bool [132], flat
    isnan_to_buf,  # out bool [132], flat
    isinf_to_buf,  # out bool [132], flat
    where_to_buf,  # out f32 [132], flat
    to_f32_buf,  # out f32 [132], flat
    to_f64_buf,  # out f64 [132], flat
    to_bool_buf,  # out bool [132], flat
    to_f16_buf,  # out f16 [132], flat
):
    """Every pointwise function on f32."""
    col = np.arange(132)[None, :]
    a = a_buf[col]
    b = b_buf[col]
    choice = choice_buf[col]
    neg_value = -a
    neg_to_buf[col] = neg_value
    neg_inverse = np.float32(1.0) / neg_value
    over_neg_to_buf[col] = neg_inverse
    abs_value = np.abs(a)
    abs_to_buf[col] = abs_value
    sign_value = (a > 0).astype(np.float32) - (a < 0).astype(np.float32)
    sign_to_buf[col] = sign_value
    floor_value = np.floor(a)
    floor_to_buf[col] = floor_value
    floor_inverse = np.float32(1.0) / floor_value
    over_floor_to_buf[col] = floor_inverse
    ceil_value = np.ceil(a)
    ceil_to_buf[col] = ceil_value
    ceil_inverse = np.float32(1.0) / ceil_value
    over_ceil_to_buf[col] = ceil_inverse
    round_value = np.rint(a)
    round_to_buf[col] = round_value
    round_inverse = np.float32(1.0) / round_value
    over_round_to_buf[col] = round_inverse
    trunc_value = np.trunc(a)
    trunc_to_buf[col] = trunc_value
    trunc_inverse = np.float32(1.0) / trunc_value
    over_trunc_to_buf[col] = trunc_inverse
    sqrt_value = np.sqrt(a)
    sqrt_to_buf[col] = sqrt_value
    rsqrt_value = 1.0 / np.sqrt(a)
    rsqrt_to_buf[col] = rsqrt_value
    recip_value = 1.0 / a
    recip_to_buf[col] = recip_value
    exp_value = np.exp(a)
    exp_to_buf[col] = exp_value
    exp2_value = np.exp2(a)
    exp2_to_buf[col] = exp2_value
    expm1_value = np.expm1(a)
    expm1_to_buf[col] = expm1_value
    log_value = np.log(a)
    log_to_buf[col] = log_value
    log2_value = np.log2(a)
    log2_to_buf[col] = log2_value
    log1p_value = np.log1p(a)
    log1p_to_buf[col] = log1p_value
    log10_value = np.log10(a)
    log10_to_buf[col] = log10_value
    sin_value = np.sin(a)
    sin_to_buf[col] = sin_value
    cos_value = np.cos(a)
    cos_to_buf[col] = cos_value
    tan_value = np.tan(a)
    tan_to_buf[col] = tan_value
    tanh_value = np.tanh(a)
    tanh_to_buf[col] = tanh_value
    sigmoid_value = 1.0 / (1.0 + np.exp(-a))
    sigmoid_to_buf[col] = sigmoid_value
    erf_value = _elementwise(math.erf, a)
    erf_to_buf[col] = erf_value
    erfc_value = _elementwise(math.erfc, a)
    erfc_to_buf[col] = erfc_value
    asin_value = np.arcsin(a)
    asin_to_buf[col] = asin_value
    acos_value = np.arccos(a)
    acos_to_buf[col] = acos_value
    atan_value = np.arctan(a)
    atan_to_buf[col] = atan_value
    sinh_value = np.sinh(a)
    sinh_to_buf[col] = sinh_value
    cosh_value = np.cosh(a)
    cosh_to_buf[col] = cosh_value
    asinh_value = np.arcsinh(a)
    asinh_to_buf[col] = asinh_value
    acosh_value = np.arccosh(a)
    acosh_to_buf[col] = acosh_value
    atanh_value = np.arctanh(a)
    atanh_to_buf[col] = atanh_value
    lgamma_value = _elementwise(_lgamma, a)
    lgamma_to_buf[col] = lgamma_value
    digamma_value = _elementwise(_digamma, a)
    digamma_to_buf[col] = digamma_value
    erfinv_value = _elementwise(_erfinv, a)
    erfinv_to_buf[col] = erfinv_value
    erfcx_value = _elementwise(_erfcx, a)
    erfcx_to_buf[col] = erfcx_value
    ndtri_value = _elementwise(_ndtri, a)
    ndtri_to_buf[col] = ndtri_value
    add_value = a + b
    add_to_buf[col] = add_value
    sub_value = a - b
    sub_to_buf[col] = sub_value
    mul_value = a * b
    mul_to_buf[col] = mul_value
    maximum_value = np.maximum(a, b)
    maximum_to_buf[col] = maximum_value
    minimum_value = np.minimum(a, b)
    minimum_to_buf[col] = minimum_value
    div_value = a / b
    div_to_buf[col] = div_value
    pow_value = np.power(a, b)
    pow_to_buf[col] = pow_value
    fmod_value = np.fmod(a, b)
    fmod_to_buf[col] = fmod_value
    remainder_value = _remainder(a, b)
    remainder_to_buf[col] = remainder_value
    floordiv_value = _floordiv(a, b)
    floordiv_to_buf[col] = floordiv_value
    atan2_value = np.arctan2(a, b)
    atan2_to_buf[col] = atan2_value
    copysign_value = np.copysign(a, b)
    copysign_to_buf[col] = copysign_value
    copysign_inverse = np.float32(1.0) / copysign_value
    over_copysign_to_buf[col] = copysign_inverse
    hypot_value = np.hypot(a, b)
    hypot_to_buf[col] = hypot_value
    nextafter_value = np.nextafter(a, b)
    nextafter_to_buf[col] = nextafter_value
    eq_value = a == b
    eq_to_buf[col] = eq_value
    ne_value = a != b
    ne_to_buf[col] = ne_value
    lt_value = a < b
    lt_to_buf[col] = lt_value
    le_value = a <= b
    le_to_buf[col] = le_value
    gt_value = a > b
    gt_to_buf[col] = gt_value
    ge_value = a >= b
    ge_to_buf[col] = ge_value
    isnan_value = np.isnan(a)
    isnan_to_buf[col] = isnan_value
    isinf_value = np.isinf(a)
    isinf_to_buf[col] = isinf_value
    where_value = np.where(choice, a, b)
    where_to_buf[col] = where_value
    as_f32 = a
    to_f32_buf[col] = as_f32
    as_f64 = a.astype(np.float64)
    to_f64_buf[col] = as_f64
    as_bool = a != 0
    to_bool_buf[col] = as_bool
    as_f16 = a.astype(np.float16)
    to_f16_buf[col] = as_f16
