"""Converters of activations and their backwards, each one rounding; ``g`` is the output's cotangent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megafuse.capture.context import Context, Unconverted
from megafuse.capture.registry import converts
from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Node

SQRT_HALF = math.sqrt(0.5)
TANH_BETA = math.sqrt(2.0 / math.pi)
TANH_KAPPA = 0.044715
NORMAL_PEAK = 1.0 / math.sqrt(2.0 * math.pi)


def mul(b: Builder, *xs: Node | float) -> Node:
    """Product, left to right."""
    out, *rest = xs
    for x in rest:
        out = b.map("mul", out, x)
    assert isinstance(out, Node)
    return out


def one_minus(b: Builder, x: Node) -> Node:
    """1 - x."""
    return b.map("sub", 1.0, x)


@converts("silu")
def silu(cx: Context, x: Node) -> Node:
    """x * sigmoid(x)."""
    (v,) = cx.operands(x)
    return cx.finish(mul(cx.b, v, cx.b.map("sigmoid", v)))


@converts("silu_backward")
def silu_backward(cx: Context, g: Node, x: Node) -> Node:
    """g * s * (1 + x * (1 - s)), s = sigmoid(x)."""
    b = cx.b
    dy, v = cx.operands(g, x)
    s = b.map("sigmoid", v)
    return cx.finish(mul(b, dy, s, b.map("add", mul(b, v, one_minus(b, s)), 1.0)))


def _gelu_tanh(b: Builder, v: Node) -> tuple[Node, Node]:
    """tanh(beta * (x + kappa * x^3)) and x^2."""
    square = mul(b, v, v)
    inner = mul(b, b.map("add", v, mul(b, square, v, TANH_KAPPA)), TANH_BETA)
    return b.map("tanh", inner), square


@converts("gelu")
def gelu(cx: Context, x: Node, approximate: str = "none") -> Node:
    """x * Phi(x), Phi by erf or by the tanh formula."""
    b = cx.b
    (v,) = cx.operands(x)
    if approximate == "tanh":
        return cx.finish(mul(b, v, 0.5, b.map("add", _gelu_tanh(b, v)[0], 1.0)))
    return cx.finish(mul(b, v, 0.5, b.map("add", b.map("erf", mul(b, v, SQRT_HALF)), 1.0)))


@converts("gelu_backward")
def gelu_backward(cx: Context, g: Node, x: Node, approximate: str = "none") -> Node:
    """g * (Phi(x) + x * phi(x)), or the derivative of the tanh formula."""
    b = cx.b
    dy, v = cx.operands(g, x)
    if approximate == "tanh":
        t, square = _gelu_tanh(b, v)
        left = mul(b, b.map("add", t, 1.0), 0.5)
        slope = mul(b, b.map("add", mul(b, square, 3.0 * TANH_KAPPA), 1.0), TANH_BETA)
        right = mul(b, v, 0.5, one_minus(b, mul(b, t, t)), slope)
        return cx.finish(mul(b, dy, b.map("add", left, right)))
    cdf = mul(b, b.map("add", b.map("erf", mul(b, v, SQRT_HALF)), 1.0), 0.5)
    pdf = mul(b, b.map("exp", mul(b, v, v, -0.5)), NORMAL_PEAK)
    return cx.finish(mul(b, dy, b.map("add", cdf, mul(b, v, pdf))))


def log_one_plus_exp(b: Builder, z: Node) -> Node:
    """max(z, 0) + log1p(exp(-|z|))."""
    tail = b.map("log1p", b.map("exp", b.map("neg", b.map("abs", z))))
    return b.map("add", b.map("maximum", z, 0.0), tail)


@converts("softplus")
def softplus(cx: Context, x: Node, beta: float = 1, threshold: float = 20) -> Node:
    """log(1 + exp(beta * x)) / beta, and x where beta * x > threshold."""
    b = cx.b
    (v,) = cx.operands(x)
    z = v if beta == 1 else mul(b, v, beta)
    out = log_one_plus_exp(b, z)
    if beta == 1 and _is_lost(z, threshold):
        return cx.finish(out)
    out = out if beta == 1 else mul(b, out, 1.0 / beta)
    return cx.finish(b.map("where", b.map("gt", z, threshold), v, out))


@converts("softplus_backward")
def softplus_backward(cx: Context, g: Node, x: Node, beta: float = 1, threshold: float = 20) -> Node:
    """g * sigmoid(beta * x), and g where beta * x > threshold."""
    b = cx.b
    dy, v = cx.operands(g, x)
    z = v if beta == 1 else mul(b, v, beta)
    slope = mul(b, dy, b.map("sigmoid", z))
    return cx.finish(slope if _is_lost(z, threshold) else b.map("where", b.map("gt", z, threshold), dy, slope))


def _is_lost(z: Node, threshold: float) -> bool:
    """Beyond such a threshold exp(-z) is under half an ulp of 1 (2**-25 in fp32): the branch gives the same."""
    return z.dtype is DType.F32 and threshold >= 25 * math.log(2)


@converts("sigmoid_backward")
def sigmoid_backward(cx: Context, g: Node, y: Node) -> Node:
    """g * (1 - y) * y, each step rounded."""
    dy, v = cx.operands(g, y)
    return cx.finish(mul(cx.b, cx.each("mul", dy, cx.each("sub", cx.operand(1, y.dtype), v)), v))


@converts("tanh_backward")
def tanh_backward(cx: Context, g: Node, y: Node) -> Node:
    """g * (1 - y^2), each step rounded."""
    dy, v = cx.operands(g, y)
    return cx.finish(mul(cx.b, dy, cx.each("sub", cx.operand(1, y.dtype), cx.each("mul", v, v))))


@converts("relu")
def relu(cx: Context, x: Node) -> Node:
    """max(x, 0)."""
    return cx.pointwise("maximum", x, 0)


@converts("threshold")
def threshold_(cx: Context, x: Node, threshold: float, value: float) -> Node:
    """x where x > threshold, else value."""
    (v,) = cx.operands(x)
    return cx.finish(cx.b.map("where", cx.b.map("le", v, threshold), value, v))


@converts("threshold_backward")
def threshold_backward(cx: Context, g: Node, x: Node, threshold: float) -> Node:
    """g where x > threshold, else 0."""
    dy, v = cx.operands(g, x)
    return cx.finish(cx.b.map("where", cx.b.map("le", v, threshold), 0.0, dy))


@converts("leaky_relu")
def leaky_relu(cx: Context, x: Node, slope: float = 0.01) -> Node:
    """x where x > 0, else slope * x."""
    (v,) = cx.operands(x)
    return cx.finish(cx.b.map("where", cx.b.map("gt", v, 0.0), v, mul(cx.b, v, slope)))


@converts("leaky_relu_backward")
def leaky_relu_backward(cx: Context, g: Node, x: Node, slope: float, is_result: bool) -> Node:
    """g where x > 0, else slope * g."""
    dy, v = cx.operands(g, x)
    return cx.finish(cx.b.map("where", cx.b.map("gt", v, 0.0), dy, mul(cx.b, dy, slope)))


@converts("elu")
def elu(cx: Context, x: Node, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Node:
    """scale * x where x > 0, else scale * alpha * (exp(input_scale * x) - 1)."""
    b = cx.b
    (v,) = cx.operands(x)
    low = mul(b, b.map("expm1", mul(b, v, input_scale)), alpha * scale)
    return cx.finish(b.map("where", b.map("gt", v, 0.0), mul(b, v, scale), low))


@converts("elu_backward")
def elu_backward(
    cx: Context, g: Node, alpha: float, scale: float, input_scale: float, is_result: bool, x: Node
) -> Node:
    """g * scale above 0; below, g * input_scale * (y + alpha * scale) from the result y, or the same from x."""
    b = cx.b
    dy, v = cx.operands(g, x)
    if is_result:
        low = mul(b, dy, input_scale, b.map("add", v, alpha * scale))
    else:
        low = mul(b, dy, input_scale * alpha * scale, b.map("exp", mul(b, v, input_scale)))
    return cx.finish(b.map("where", b.map("gt", v, 0.0), mul(b, dy, scale), low))


@converts("celu")
def celu(cx: Context, x: Node, alpha: float = 1.0) -> Node:
    """elu with input scale 1 / alpha."""
    return elu(cx, x, alpha, 1.0, 1.0 / alpha)


@converts("selu")
def selu(cx: Context, x: Node) -> Node:
    """Scaled elu."""
    return elu(cx, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0)


def _clipped(b: Builder, v: Node) -> Node:
    """min(max(x + 3, 0), 6)."""
    return b.map("minimum", b.map("maximum", b.map("add", v, 3.0), 0.0), 6.0)


@converts("hardswish")
def hardswish(cx: Context, x: Node) -> Node:
    """x * clip(x + 3, 0, 6) / 6."""
    (v,) = cx.operands(x)
    return cx.finish(mul(cx.b, v, _clipped(cx.b, v), 1.0 / 6.0))


@converts("hardswish_backward")
def hardswish_backward(cx: Context, g: Node, x: Node) -> Node:
    """0 below -3, g above 3, between g * (x / 3 + 1/2)."""
    b = cx.b
    dy, v = cx.operands(g, x)
    middle = mul(b, dy, b.map("add", mul(b, v, 1.0 / 3.0), 0.5))
    upper = b.map("where", b.map("lt", v, 3.0), middle, dy)
    return cx.finish(b.map("where", b.map("le", v, -3.0), 0.0, upper))


@converts("hardsigmoid")
def hardsigmoid(cx: Context, x: Node) -> Node:
    """clip(x + 3, 0, 6) / 6."""
    (v,) = cx.operands(x)
    return cx.finish(mul(cx.b, _clipped(cx.b, v), 1.0 / 6.0))


def _inside(b: Builder, v: Node, low: float, high: float) -> Node:
    return b.map("and", b.map("gt", v, low), b.map("lt", v, high))


@converts("hardsigmoid_backward")
def hardsigmoid_backward(cx: Context, g: Node, x: Node) -> Node:
    """g / 6 inside (-3, 3), else 0."""
    dy, v = cx.operands(g, x)
    return cx.finish(cx.b.map("where", _inside(cx.b, v, -3.0, 3.0), mul(cx.b, dy, 1.0 / 6.0), 0.0))


@converts("hardtanh")
def hardtanh(cx: Context, x: Node, low: float = -1, high: float = 1) -> Node:
    """min(max(x, low), high)."""
    (v,) = cx.operands(x)
    return cx.finish(cx.b.map("minimum", cx.b.map("maximum", v, low), high))


@converts("hardtanh_backward")
def hardtanh_backward(cx: Context, g: Node, x: Node, low: float, high: float) -> Node:
    """g inside (low, high), else 0."""
    dy, v = cx.operands(g, x)
    return cx.finish(cx.b.map("where", _inside(cx.b, v, low, high), dy, 0.0))


@converts("mish")
def mish(cx: Context, x: Node) -> Node:
    """x * tanh(softplus(x))."""
    (v,) = cx.operands(x)
    return cx.finish(mul(cx.b, v, cx.b.map("tanh", log_one_plus_exp(cx.b, v))))


@converts("mish_backward")
def mish_backward(cx: Context, g: Node, x: Node) -> Node:
    """g * (t + x * s * (1 - t^2)), t = tanh(softplus(x)), s = sigmoid(x)."""
    b = cx.b
    dy, v = cx.operands(g, x)
    t = b.map("tanh", log_one_plus_exp(b, v))
    bend = mul(b, v, b.map("sigmoid", v), one_minus(b, mul(b, t, t)))
    return cx.finish(mul(b, dy, b.map("add", t, bend)))


@converts("log_sigmoid_forward")
def log_sigmoid(cx: Context, x: Node) -> tuple[Node, Node]:
    """-softplus(-x) = min(x, 0) - log1p(exp(-|x|)); the second result is another device's scratch."""
    b = cx.b
    (v,) = cx.operands(x)
    tail = b.map("log1p", b.map("exp", b.map("neg", b.map("abs", v))))
    return cx.finish(b.map("sub", b.map("minimum", v, 0.0), tail)), cx.full(0, cx.outs[1] or cx.out)


@converts("log_sigmoid_backward")
def log_sigmoid_backward(cx: Context, g: Node, x: Node, buffer: Node) -> Node:
    """g * sigmoid(-x)."""
    dy, v = cx.operands(g, x)
    return cx.finish(mul(cx.b, dy, cx.b.map("sigmoid", cx.b.map("neg", v))))


def _shrink(keep: Callable[[Builder, Node, float], Node]) -> Callable[[Context, Node, float], Node]:
    def convert(cx: Context, x: Node, width: float = 0.5) -> Node:
        (v,) = cx.operands(x)
        inside = cx.b.map("le", cx.b.map("abs", v), width)
        return cx.finish(cx.b.map("where", inside, 0.0, keep(cx.b, v, width)))

    return convert


converts("hardshrink")(_shrink(lambda b, v, _: v))
converts("softshrink")(_shrink(lambda b, v, w: b.map("sub", v, mul(b, b.map("sign", v), w))))


@converts("hardshrink_backward", "softshrink_backward")
def shrink_backward(cx: Context, g: Node, x: Node, width: float) -> Node:
    """g outside [-width, width], else 0."""
    dy, v = cx.operands(g, x)
    return cx.finish(cx.b.map("where", cx.b.map("le", cx.b.map("abs", v), width), 0.0, dy))


@converts("rrelu_with_noise_functional")
def rrelu(
    cx: Context, x: Node, noise: Node, lower: float = 0.125, upper: float = 1 / 3, training: bool = False,
    generator: Any = None,
) -> tuple[Node, Node]:  # fmt: skip
    """In evaluation the leaky ReLU of the mean slope; the noise is untouched."""
    if training:
        raise Unconverted("draws random numbers")
    return leaky_relu(cx, x, (lower + upper) / 2), noise


@converts("rrelu_with_noise_backward")
def rrelu_backward(
    cx: Context, g: Node, x: Node, noise: Node, lower: float, upper: float, training: bool, is_result: bool
) -> Node:
    """g * noise in training (unless the slopes agree), else the leaky ReLU's gradient."""
    if training and upper - lower > 1e-6:
        return cx.pointwise("mul", g, noise)
    return leaky_relu_backward(cx, g, x, (lower + upper) / 2, is_result)


@converts("native_dropout_backward")
def dropout_backward(cx: Context, g: Node, mask: Node, scale: float) -> Node:
    """g * mask * scale: the mask that forward drew is an input of the fused kernel."""
    (dy,) = cx.operands(g)
    return cx.finish(mul(cx.b, dy, cx.b.cast(mask, dy.dtype), scale))


@converts("_prelu_kernel")
def prelu(cx: Context, x: Node, weight: Node) -> Node:
    """x where x > 0, else weight * x."""
    v, w = cx.operands(x, weight)
    return cx.finish(cx.b.map("where", cx.b.map("gt", v, 0.0), v, mul(cx.b, w, v)))


@converts("_prelu_kernel_backward")
def prelu_backward(cx: Context, g: Node, x: Node, weight: Node) -> tuple[Node, Node]:
    """(g or weight * g, 0 or x * g)."""
    b = cx.b
    dy, v, w = cx.operands(g, x, weight)
    above = b.map("gt", v, 0.0)
    dx = b.map("where", above, dy, mul(b, w, dy))
    return cx.finish(dx), cx.finish(b.map("where", above, 0.0, mul(b, v, dy)), 1)


def _halves(cx: Context, x: Node, dim: int) -> tuple[Node, Node]:
    dim %= x.type.rank
    sizes = [*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1 :]]
    starts = [0] * x.type.rank
    first = cx.b.slice(x, starts, sizes)
    starts[dim] = sizes[dim]
    return first, cx.b.slice(x, starts, sizes)


@converts("glu")
def glu(cx: Context, x: Node, dim: int = -1) -> Node:
    """First half times the sigmoid of the second."""
    a, gate = cx.operands(*_halves(cx, x, dim))
    return cx.finish(mul(cx.b, a, cx.b.map("sigmoid", gate)))


@converts("glu_backward")
def glu_backward(cx: Context, g: Node, x: Node, dim: int) -> Node:
    """(g * s, g * a * s * (1 - s)), concatenated."""
    b, kind = cx.b, cx.out.dtype
    a, gate = cx.operands(*_halves(cx, x, dim))
    (dy,) = cx.operands(g)
    s = b.map("sigmoid", gate)
    parts = (mul(b, dy, s), mul(b, dy, a, s, one_minus(b, s)))
    return b.concat([b.cast(p, kind) for p in parts], dim % x.type.rank)
