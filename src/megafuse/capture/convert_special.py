"""Converters of special functions: what is not in ``ir.ops`` itself is written out by its formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megafuse.capture.context import Context, Operand, Unconverted
from megafuse.capture.convert_activation import mul, one_minus
from megafuse.capture.registry import converts
from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Node


def _times_log(fn: str) -> Callable[[Context, Operand, Operand], Node]:
    def convert(cx: Context, x: Operand, y: Operand) -> Node:
        """x * log(y) or x * log1p(y); 0 where x is 0, but NaN where y is."""
        b = cx.b
        v, w = cx.operands(x, y)
        product = b.map("where", b.map("eq", v, 0.0), 0.0, mul(b, v, b.map(fn, w)))
        return cx.finish(b.map("where", b.map("isnan", w), math.nan, product))

    return convert


converts("xlogy")(_times_log("log"))
converts("special_xlog1py")(_times_log("log1p"))


def _log_add(exp: str, scale: float) -> Callable[[Context, Node, Node], Node]:
    def convert(cx: Context, x: Node, y: Node) -> Node:
        """max + log(1 + base^-|x - y|); equal infinities stay as they are."""
        b = cx.b
        v, w = cx.operands(x, y)
        tail = b.map("log1p", b.map(exp, b.map("neg", b.map("abs", b.map("sub", v, w)))))
        out = b.map("add", b.map("maximum", v, w), tail if scale == 1 else mul(b, tail, scale))
        same = b.map("and", b.map("isinf", v), b.map("eq", v, w))
        return cx.finish(b.map("where", same, v, out))

    return convert


converts("logaddexp")(_log_add("exp", 1.0))
converts("logaddexp2")(_log_add("exp2", 1.0 / math.log(2.0)))


@converts("logit")
def logit(cx: Context, x: Node, eps: float | None = None) -> Node:
    """log(z / (1 - z)), z = x clamped to [eps, 1 - eps] if that is given."""
    b = cx.b
    (z,) = cx.operands(x)
    if eps is not None and eps >= 0:
        z = b.map("minimum", b.map("maximum", z, eps), 1.0 - eps)
    return cx.finish(b.map("log", b.map("div", z, one_minus(b, z))))


@converts("logit_backward")
def logit_backward(cx: Context, g: Node, x: Node, eps: float | None = None) -> Node:
    """g / (x * (1 - x)); beyond the clamp 0, beyond [0, 1] without one NaN."""
    b = cx.b
    dy, v = cx.operands(g, x)
    clamped = eps is not None and eps >= 0
    low = eps if clamped and eps is not None else 0.0
    outside = b.map("or", b.map("lt", v, low), b.map("gt", v, 1.0 - low))
    slope = b.map("div", dy, mul(b, v, one_minus(b, v)))
    return cx.finish(b.map("where", outside, 0.0 if clamped else math.nan, slope))


@converts("sinc")
def sinc(cx: Context, x: Node) -> Node:
    """sin(pi x) / (pi x), 1 at 0."""
    b = cx.b
    (v,) = cx.operands(x)
    z = mul(b, v, math.pi)
    return cx.finish(b.map("where", b.map("eq", v, 0.0), 1.0, b.map("div", b.map("sin", z), z)))


@converts("heaviside")
def heaviside(cx: Context, x: Node, value: Node) -> Node:
    """0 below 0 (and for NaN), 1 above, ``value`` at 0."""
    b = cx.b
    v, w = (cx.operand(n, cx.out.dtype) for n in (x, value))
    if v.dtype is DType.BOOL:
        return cx.finish(b.map("or", v, w))
    step = b.cast(b.map("gt", v, 0), v.dtype)
    return cx.finish(b.map("where", b.map("eq", v, 0), w, step))


def _nan_loses(fn: str) -> Callable[[Context, Node, Node], Node]:
    def convert(cx: Context, x: Node, y: Node) -> Node:
        """The extreme of two; a number wins over NaN."""
        if not cx.out.dtype.is_float:
            return cx.pointwise({"maximum": "or", "minimum": "and"}[fn] if cx.out.dtype is DType.BOOL else fn, x, y)
        b = cx.b
        v, w = cx.operands(x, y)
        kept = b.map("where", b.map("isnan", w), v, b.map(fn, v, w))
        return cx.finish(b.map("where", b.map("isnan", v), w, kept))

    return convert


converts("fmax")(_nan_loses("maximum"))
converts("fmin")(_nan_loses("minimum"))


@converts("nextafter")
def nextafter(cx: Context, x: Node, y: Node) -> Node:
    """The next number from x towards y."""
    if cx.out.dtype.compute is not cx.out.dtype:
        raise Unconverted(f"neighbours of {cx.out.dtype.value} numbers")
    return cx.pointwise("nextafter", x, y)


def _is_value(value: float) -> Callable[[Context, Node], Node]:
    def convert(cx: Context, x: Node) -> Node:
        return cx.finish(cx.b.map("eq", cx.up(x), value)) if x.dtype.is_float else cx.full(False, cx.out)

    return convert


converts("isposinf")(_is_value(math.inf))
converts("isneginf")(_is_value(-math.inf))


@converts("signbit")
def signbit(cx: Context, x: Node) -> Node:
    """True below zero and for -0.0."""
    if x.dtype in (DType.BOOL, DType.U8):
        return cx.full(False, cx.out)
    v = cx.up(x)
    return cx.finish(cx.b.map("lt", cx.b.map("copysign", 1.0, v) if x.dtype.is_float else v, 0))


@converts("angle")
def angle(cx: Context, x: Node) -> Node:
    """pi below zero, else 0; NaN stays."""
    b = cx.b
    (v,) = cx.operands(x)
    return cx.finish(
        b.map("where", b.map("isnan", v), v, b.map("where", b.map("lt", v, 0.0), math.pi, cx.const(0.0, v.dtype)))
    )


@converts("deg2rad")
def deg2rad(cx: Context, x: Node) -> Node:
    """x * pi / 180."""
    return cx.pointwise("mul", x, math.pi / 180)


@converts("rad2deg")
def rad2deg(cx: Context, x: Node) -> Node:
    """x * 180 / pi."""
    return cx.pointwise("mul", x, 180 / math.pi)


@converts("round.decimals")
def round_decimals(cx: Context, x: Node, *, decimals: int) -> Node:
    """round(x * 10^d) / 10^d, or round(x / 10^-d) * 10^-d."""
    if not cx.out.dtype.is_float:
        raise Unconverted("rounds integers to decimals")
    b, ten = cx.b, float(10 ** abs(decimals))
    there, back = ("mul", "div") if decimals >= 0 else ("div", "mul")
    (v,) = cx.operands(x)
    return cx.finish(b.map(back, b.map("round", b.map(there, v, ten)), ten))


@converts("ldexp")
def ldexp(cx: Context, x: Node, exponent: Node) -> Node:
    """x * 2^e in three factors, none of which overflows before the result does."""
    if exponent.dtype.is_float or not cx.out.dtype.is_float:
        raise Unconverted("exponents that are not integers")
    b = cx.b
    (v,) = cx.operands(x)
    most = 3 * 700 if v.dtype is DType.F64 else 3 * 93
    e = b.map("minimum", b.map("maximum", b.cast(exponent, DType.I64), -most), most)
    third = b.map("div", e, 3)
    for part in (third, third, b.map("sub", e, b.map("mul", third, 2))):
        v = mul(b, v, b.map("exp2", b.cast(part, v.dtype)))
    return cx.finish(v)


@converts("__lshift__", "bitwise_left_shift")
def left_shift(cx: Context, x: Operand, count: Operand) -> Node:
    """x << n; 0 where n is not a number of bits."""
    return _shift(cx, "shl", x, count)


@converts("__rshift__", "bitwise_right_shift")
def right_shift(cx: Context, x: Operand, count: Operand) -> Node:
    """x >> n; the sign alone where n is not a number of bits."""
    return _shift(cx, "shr", x, count)


def _shift(cx: Context, fn: str, x: Operand, count: Operand) -> Node:
    kind = cx.out.dtype
    if kind.is_float or kind is DType.BOOL:
        raise Unconverted(f"shift of {kind.value}")
    b, bits = cx.b, 8 * kind.size - (kind is not DType.U8 and fn == "shr")
    v, n = (b.cast(a, kind) if isinstance(a, Node) else b.const(a, kind) for a in (x, count))
    wild = b.map("ge", n, bits) if kind is DType.U8 else b.map("or", b.map("lt", n, 0), b.map("ge", n, bits))
    most = b.map(fn, v, bits - 1 if fn == "shr" else 0)
    rest = most if fn == "shr" and kind is not DType.U8 else b.map("mul", v, 0)
    return cx.finish(b.map("where", wild, rest, b.map(fn, v, b.map("where", wild, 0, n))))


@converts("special_entr")
def entr(cx: Context, x: Node) -> Node:
    """-x * log(x); 0 at 0, -inf below."""
    b = cx.b
    (v,) = cx.operands(x)
    low = b.map("where", b.map("eq", v, 0.0), 0.0, cx.const(-math.inf, v.dtype))
    out = b.map("where", b.map("gt", v, 0.0), mul(b, b.map("neg", v), b.map("log", v)), low)
    return cx.finish(b.map("where", b.map("isnan", v), v, out))


@converts("special_log_ndtr")
def log_ndtr(cx: Context, x: Node) -> Node:
    """log of the normal distribution function: log(erfcx(-t) / 2) - t^2 for x < -1, t = x / sqrt(2)."""
    b = cx.b
    (v,) = cx.operands(x)
    t = mul(b, v, math.sqrt(0.5))
    tail = b.map("sub", b.map("log", mul(b, b.map("erfcx", b.map("neg", t)), 0.5)), mul(b, t, t))
    rest = b.map("log1p", mul(b, b.map("erfc", t), -0.5))
    return cx.finish(b.map("where", b.map("lt", v, -1.0), tail, rest))


@converts("special_spherical_bessel_j0")
def spherical_bessel_j0(cx: Context, x: Node) -> Node:
    """sin(x) / x, its series near 0, 0 at infinity."""
    b = cx.b
    (v,) = cx.operands(x)
    square = mul(b, v, v)
    series: Node | float = 1.0 / math.factorial(13)
    for k in (11, 9, 7, 5, 3, 1):
        sign = 1.0 if k % 4 == 1 else -1.0
        series = b.map("add", mul(b, square, series), sign / math.factorial(k))
    far = b.map("where", b.map("isinf", v), 0.0, b.map("div", b.map("sin", v), v))
    return cx.finish(b.map("where", b.map("lt", b.map("abs", v), 0.5), series, far))


@converts("mvlgamma")
def mvlgamma(cx: Context, x: Node, p: int) -> Node:
    """p (p - 1) / 4 log(pi) + sum of lgamma(x - j / 2), j < p."""
    b = cx.b
    (v,) = cx.operands(x)
    total = b.map("lgamma", v)
    for j in range(1, p):
        total = b.map("add", total, b.map("lgamma", b.map("sub", v, 0.5 * j)))
    return cx.finish(b.map("add", total, p * (p - 1) / 4 * math.log(math.pi)))


@converts("polygamma")
def polygamma(cx: Context, n: int, x: Node) -> Node:
    """The n-th derivative of digamma, for n = 0 and 1; the latter as ATen has it.

    psi'(x) = pi^2 / sin(pi x)^2 - psi'(1 - x) below 1/2, psi'(x) = psi'(x + 1) + 1 / x^2 six times, then
    (1 + 1 / (2x) + (1 / x^2) (1/6 - (1 / x^2) (1/30 - 1 / (42 x^2)))) / x.
    """
    if n > 1:
        raise Unconverted("a zeta function")
    b = cx.b
    (v,) = cx.operands(x)
    if n == 0:
        return cx.finish(b.map("digamma", v))
    low = b.map("lt", v, 0.5)
    sine = b.map("sin", mul(b, v, math.pi))
    z = b.map("where", low, one_minus(b, v), v)
    total = b.map("where", low, b.map("div", -math.pi * math.pi, mul(b, sine, sine)), 0.0)
    for _ in range(6):
        total = b.map("add", total, b.map("recip", mul(b, z, z)))
        z = b.map("add", z, 1.0)
    r = b.map("recip", mul(b, z, z))
    inner: Node | float = 1.0 / 42
    for c in (1.0 / 30, 1.0 / 6):
        inner = b.map("sub", c, mul(b, r, inner))
    head = b.map("add", b.map("add", b.map("recip", mul(b, z, 2.0)), 1.0), mul(b, r, inner))
    total = b.map("add", total, b.map("div", head, z))
    return cx.finish(b.map("where", low, b.map("neg", total), total))


# ---- modified Bessel functions, by the Chebyshev expansions of Cephes (ATen's Math.h has the same)

_I0E_SMALL = (
    -4.4153416464793395e-18, 3.3307945188222384e-17, -2.431279846547955e-16, 1.715391285555133e-15,
    -1.1685332877993451e-14, 7.676185498604936e-14, -4.856446783111929e-13, 2.95505266312964e-12,
    -1.726826291441556e-11, 9.675809035373237e-11, -5.189795601635263e-10, 2.6598237246823866e-09,
    -1.300025009986248e-08, 6.046995022541919e-08, -2.670793853940612e-07, 1.1173875391201037e-06,
    -4.4167383584587505e-06, 1.6448448070728896e-05, -5.754195010082104e-05, 0.00018850288509584165,
    -0.0005763755745385824, 0.0016394756169413357, -0.004324309995050576, 0.010546460394594998,
    -0.02373741480589947, 0.04930528423967071, -0.09490109704804764, 0.17162090152220877, -0.3046826723431984,
    0.6767952744094761,
)  # fmt: skip
_I0E_LARGE = (
    -7.233180487874754e-18, -4.830504485944182e-18, 4.46562142029676e-17, 3.461222867697461e-17,
    -2.8276239805165836e-16, -3.425485619677219e-16, 1.7725601330565263e-15, 3.8116806693526224e-15,
    -9.554846698828307e-15, -4.150569347287222e-14, 1.54008621752141e-14, 3.8527783827421426e-13,
    7.180124451383666e-13, -1.7941785315068062e-12, -1.3215811840447713e-11, -3.1499165279632416e-11,
    1.1889147107846439e-11, 4.94060238822497e-10, 3.3962320257083865e-09, 2.266668990498178e-08,
    2.0489185894690638e-07, 2.8913705208347567e-06, 6.889758346916825e-05, 0.0033691164782556943,
    0.8044904110141088,
)  # fmt: skip
_I1E_SMALL = (
    2.7779141127610464e-18, -2.111421214358166e-17, 1.5536319577362005e-16, -1.1055969477353862e-15,
    7.600684294735408e-15, -5.042185504727912e-14, 3.223793365945575e-13, -1.9839743977649436e-12,
    1.1736186298890901e-11, -6.663489723502027e-11, 3.625590281552117e-10, -1.8872497517228294e-09,
    9.381537386495773e-09, -4.445059128796328e-08, 2.0032947535521353e-07, -8.568720264695455e-07,
    3.4702513081376785e-06, -1.3273163656039436e-05, 4.781565107550054e-05, -0.00016176081582589674,
    0.0005122859561685758, -0.0015135724506312532, 0.004156422944312888, -0.010564084894626197,
    0.024726449030626516, -0.05294598120809499, 0.1026436586898471, -0.17641651835783406, 0.25258718644363365,
)  # fmt: skip
_I1E_LARGE = (
    7.517296310842105e-18, 4.414348323071708e-18, -4.6503053684893586e-17, -3.209525921993424e-17,
    2.96262899764595e-16, 3.3082023109209285e-16, -1.8803547755107825e-15, -3.8144030724370075e-15,
    1.0420276984128802e-14, 4.272440016711951e-14, -2.1015418427726643e-14, -4.0835511110921974e-13,
    -7.198551776245908e-13, 2.0356285441470896e-12, 1.4125807436613782e-11, 3.2526035830154884e-11,
    -1.8974958123505413e-11, -5.589743462196584e-10, -3.835380385964237e-09, -2.6314688468895196e-08,
    -2.512236237870209e-07, -3.882564808877691e-06, -0.00011058893876262371, -0.009761097491361469,
    0.7785762350182801,
)  # fmt: skip


def _chebyshev(b: Builder, x: Node, coefficients: Sequence[float]) -> Node:
    """Clenshaw's sum of a Chebyshev series."""
    newest = b.map("add", mul(b, x, coefficients[0]), coefficients[1])
    last: Node | float = coefficients[0]
    before: Node | float = 0.0
    for c in coefficients[2:]:
        before, last, newest = last, newest, b.map("add", b.map("sub", mul(b, x, newest), last), c)
    return mul(b, b.map("sub", newest, before), 0.5)


def _bessel_i(order: int, scaled: bool) -> Callable[[Context, Node], Node]:
    def convert(cx: Context, x: Node) -> Node:
        """exp(-|x|) I(x) from one series up to 8 and another, over sqrt(|x|), beyond; times exp(|x|) if not scaled."""
        b = cx.b
        (v,) = cx.operands(x)
        size = b.map("abs", v)
        small = _chebyshev(b, b.map("sub", mul(b, size, 0.5), 2.0), _I1E_SMALL if order else _I0E_SMALL)
        large = _chebyshev(b, b.map("sub", b.map("div", 32.0, size), 2.0), _I1E_LARGE if order else _I0E_LARGE)
        small = mul(b, small, size) if order else small
        out = b.map("where", b.map("le", size, 8.0), small, b.map("div", large, b.map("sqrt", size)))
        out = out if scaled else mul(b, out, b.map("exp", size))
        return cx.finish(b.map("where", b.map("lt", v, 0.0), b.map("neg", out), out) if order else out)

    return convert


converts("i0", "special_modified_bessel_i0")(_bessel_i(0, scaled=False))
converts("special_i0e")(_bessel_i(0, scaled=True))
converts("special_i1", "special_modified_bessel_i1")(_bessel_i(1, scaled=False))
converts("special_i1e")(_bessel_i(1, scaled=True))


@converts("_conj_physical", "conj_physical", "positive")
def same(cx: Context, x: Node) -> Node:
    """The value itself: element types here are real."""
    return x


@converts("isfinite")
def isfinite(cx: Context, x: Node) -> Node:
    """Neither NaN nor infinite."""
    if not x.dtype.is_float:
        return cx.full(True, cx.out)
    v = cx.up(x)
    return cx.finish(cx.b.map("lt", cx.b.map("abs", v), math.inf))
