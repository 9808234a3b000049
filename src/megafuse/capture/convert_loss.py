"""Converters of losses and their backwards. ``g`` is the loss's cotangent; ``reduction`` is 0 none, 1 mean, 2 sum."""

from __future__ import annotations

import math

from megafuse.capture.context import Context
from megafuse.capture.convert_activation import log_one_plus_exp, mul, one_minus
from megafuse.capture.registry import converts
from megafuse.core.dtypes import DType
from megafuse.ir.graph import Node


def reduced(cx: Context, terms: Node, reduction: int) -> Node:
    """The terms, their mean or their sum in the compute type, rounded once."""
    axes = range(terms.type.rank)
    if reduction == 1:
        terms = cx.mean(terms, list(axes), keepdim=False)
    elif reduction == 2:
        terms = cx.b.reduce("sum", terms, axes)
    return cx.finish(terms)


def share(x: Node, reduction: int) -> float:
    """What one term counts in the loss."""
    return 1.0 / max(x.type.numel, 1) if reduction == 1 else 1.0


@converts("mse_loss")
def mse_loss(cx: Context, x: Node, target: Node, reduction: int = 1) -> Node:
    """(x - target)^2."""
    a, t = cx.operands(x, target)
    d = cx.b.map("sub", a, t)
    return reduced(cx, mul(cx.b, d, d), reduction)


@converts("mse_loss_backward")
def mse_loss_backward(cx: Context, g: Node, x: Node, target: Node, reduction: int) -> Node:
    """2 * (x - target) * g, over the count for a mean."""
    dy, a, t = cx.operands(g, x, target)
    return cx.finish(mul(cx.b, cx.b.map("sub", a, t), 2.0 * share(x, reduction), dy))


@converts("huber_loss")
def huber_loss(cx: Context, x: Node, target: Node, reduction: int = 1, delta: float = 1.0) -> Node:
    """z^2 / 2 for z = |x - target| < delta, else delta * (z - delta / 2)."""
    b = cx.b
    z = b.map("abs", b.map("sub", *cx.operands(x, target)))
    far = mul(b, b.map("sub", z, 0.5 * delta), delta)
    return reduced(cx, b.map("where", b.map("lt", z, delta), mul(b, z, z, 0.5), far), reduction)


@converts("huber_loss_backward")
def huber_loss_backward(cx: Context, g: Node, x: Node, target: Node, reduction: int, delta: float) -> Node:
    """g * clip(x - target, -delta, delta), over the count for a mean."""
    return _clipped_slope(cx, g, x, target, share(x, reduction), delta)


@converts("smooth_l1_loss")
def smooth_l1_loss(cx: Context, x: Node, target: Node, reduction: int = 1, beta: float = 1.0) -> Node:
    """z^2 / (2 beta) for z = |x - target| < beta, else z - beta / 2."""
    b = cx.b
    z = b.map("abs", b.map("sub", *cx.operands(x, target)))
    near = b.map("div", mul(b, z, z, 0.5), beta)
    return reduced(cx, b.map("where", b.map("lt", z, beta), near, b.map("sub", z, 0.5 * beta)), reduction)


@converts("smooth_l1_loss_backward")
def smooth_l1_loss_backward(cx: Context, g: Node, x: Node, target: Node, reduction: int, beta: float) -> Node:
    """g * clip((x - target) / beta, -1, 1), over the count for a mean."""
    return _clipped_slope(cx, g, x, target, share(x, reduction) / beta, beta)


def _clipped_slope(cx: Context, g: Node, x: Node, target: Node, scale: float, limit: float) -> Node:
    dy, a, t = cx.operands(g, x, target)
    d = cx.b.map("sub", a, t)
    return cx.finish(mul(cx.b, cx.b.map("minimum", cx.b.map("maximum", d, -limit), limit), scale, dy))


def weighted(cx: Context, terms: Node, weight: Node | None) -> Node:
    """Terms times their weights."""
    return terms if weight is None else mul(cx.b, terms, cx.operand(weight, weight.dtype))


@converts("binary_cross_entropy")
def bce(cx: Context, x: Node, target: Node, weight: Node | None = None, reduction: int = 1) -> Node:
    """-(t * log(x) + (1 - t) * log(1 - x)), the logarithms at least -100."""
    b = cx.b
    a, t = cx.operands(x, target)
    yes = b.map("maximum", b.map("log", a), -100.0)
    no = b.map("maximum", b.map("log1p", b.map("neg", a)), -100.0)
    terms = b.map("sub", mul(b, b.map("sub", t, 1.0), no), mul(b, t, yes))
    return reduced(cx, weighted(cx, terms, weight), reduction)


@converts("binary_cross_entropy_backward")
def bce_backward(cx: Context, g: Node, x: Node, target: Node, weight: Node | None = None, reduction: int = 1) -> Node:
    """g * (x - t) / max(x * (1 - x), 1e-12), over the count for a mean."""
    b = cx.b
    dy, a, t = cx.operands(g, x, target)
    room = b.map("maximum", mul(b, one_minus(b, a), a), 1e-12)
    slope = weighted(cx, b.map("div", mul(b, dy, b.map("sub", a, t)), room), weight)
    return cx.finish(mul(b, slope, share(x, reduction)))


@converts("binary_cross_entropy_with_logits")
def bce_with_logits(
    cx: Context, x: Node, target: Node, weight: Node | None = None, pos_weight: Node | None = None, reduction: int = 1
) -> Node:
    """(1 - t) * x + (1 + (p - 1) * t) * softplus(-x)."""
    b = cx.b
    a, t = cx.operands(x, target)
    cost = log_one_plus_exp(b, b.map("neg", a))
    if pos_weight is not None:
        (p,) = cx.operands(pos_weight)
        cost = mul(b, cost, b.map("add", mul(b, b.map("sub", p, 1.0), t), 1.0))
    return reduced(cx, weighted(cx, b.map("add", mul(b, one_minus(b, t), a), cost), weight), reduction)


@converts("soft_margin_loss")
def soft_margin_loss(cx: Context, x: Node, target: Node, reduction: int = 1) -> Node:
    """log(1 + exp(-t * x)), which overflows where PyTorch's does."""
    b = cx.b
    a, t = cx.operands(x, target)
    z = b.map("exp", mul(b, b.map("neg", t), a))
    return reduced(cx, b.map("log", b.map("add", z, 1.0)), reduction)


@converts("soft_margin_loss_backward")
def soft_margin_loss_backward(cx: Context, g: Node, x: Node, target: Node, reduction: int) -> Node:
    """-t * z / (1 + z) * g with z = exp(-t * x), over the count for a mean."""
    b = cx.b
    dy, a, t = cx.operands(g, x, target)
    z = b.map("exp", mul(b, b.map("neg", t), a))
    slope = b.map("div", mul(b, t, z, -share(x, reduction)), b.map("add", z, 1.0))
    return cx.finish(mul(b, slope, dy))


class _Classes:
    """The operands of a negative log likelihood: ``x`` [N, C, ...] or [C], ``target`` without the class axis.

    The target's class is picked by comparing the index along the class axis: the walk over the classes is that of the
    softmax which as a rule stands before it. A class out of range gives NaN, where ATen's kernel stops the device.
    """

    def __init__(self, cx: Context, x: Node, target: Node, weight: Node | None, ignore: int) -> None:
        b = cx.b
        self.cx, self.axis, self.shape = cx, min(1, x.type.rank - 1), x.shape
        wide = (*x.shape[: self.axis], 1, *x.shape[self.axis + 1 :])
        self.target = b.reshape(b.cast(target, DType.I64), wide)
        self.ignored = b.map("eq", self.target, ignore)
        inside = b.map("and", b.map("ge", self.target, 0), b.map("lt", self.target, x.shape[self.axis]))
        self.outside = b.map("not", b.map("or", inside, self.ignored))
        self.chosen = b.map("eq", b.iota(x.shape, self.axis), b.broadcast(self.target, x.shape))
        along = [1] * x.type.rank
        along[self.axis] = x.shape[self.axis]
        self.weight = None if weight is None else cx.up(b.broadcast(b.reshape(weight, along), x.shape))

    def pick(self, x: Node) -> Node:
        """The target's element along the class axis, which stays as 1; 0 where the target is ignored."""
        b = self.cx.b
        found = b.reduce("sum", b.map("where", self.chosen, x, 0.0), [self.axis], keepdim=True)
        return b.map("where", self.ignored, 0.0, b.map("where", self.outside, math.nan, found))

    def weights(self) -> Node:
        """The weight of each target, 0 where it is ignored."""
        b, kind = self.cx.b, self.cx.out.dtype.compute
        if self.weight is not None:
            return self.pick(self.weight)
        return b.map("where", self.ignored, b.const(0.0, kind), b.const(1.0, kind))


@converts("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(
    cx: Context, x: Node, target: Node, weight: Node | None, reduction: int, ignore_index: int
) -> tuple[Node, Node]:
    """(-w[t] * x[t], summed or over the sum of the weights; the sum of the weights)."""
    b, classes = cx.b, _Classes(cx, x, target, weight, ignore_index)
    v = cx.up(x) if classes.weight is None else mul(b, cx.up(x), classes.weight)
    picked = b.map("neg", classes.pick(v))
    if reduction == 0:
        return cx.finish(b.reshape(picked, cx.out.shape)), cx.full(0, cx.outs[1] or cx.out)
    axes = range(picked.type.rank)
    loss, total = b.reduce("sum", picked, axes), b.reduce("sum", classes.weights(), axes)
    return cx.finish(b.map("div", loss, total) if reduction == 1 else loss), cx.finish(total, 1)


@converts("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(
    cx: Context, g: Node, x: Node, target: Node, weight: Node | None, reduction: int, ignore_index: int, total: Node
) -> Node:
    """-w[c] * g at the target's class c, 0 elsewhere; for a mean over the sum of the weights."""
    b, classes = cx.b, _Classes(cx, x, target, weight, ignore_index)
    (dy,) = cx.operands(g)
    if reduction == 0:
        dy = b.reshape(dy, classes.target.shape)
    elif reduction == 1:
        dy = b.map("div", dy, *cx.operands(total))
    slope = b.map("neg", dy if classes.weight is None else mul(b, dy, classes.weight))
    hit = b.map("and", classes.chosen, b.map("not", classes.ignored))
    return cx.finish(b.map("where", hit, slope, 0.0))
