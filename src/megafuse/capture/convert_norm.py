"""Converters of normalisations and their backwards.

Statistics are fp32 for 16-bit inputs, two-pass (mean, then mean of squared deviations), biased; the affine part is
fp32 and the result is rounded once. With xhat = (x - mean) * rstd over the normalised axes:

    y  = xhat * w + b
    dx = rstd * (g * w - mean(g * w) - xhat * mean(g * w * xhat))
    dw = sum(g * xhat),  db = sum(g)            over the other axes, in fp32, rounded once
"""

from __future__ import annotations

from collections.abc import Sequence

from megafuse.capture.context import Context
from megafuse.capture.registry import converts
from megafuse.core.dtypes import DType
from megafuse.ir.graph import Node
from megafuse.ir.types import TensorType

Pair = tuple[Node, Node]


def statistics(cx: Context, v: Node, axes: Sequence[int], eps: float) -> Pair:
    """Mean and reciprocal standard deviation of ``v``, reduced dims kept."""
    mean, var = moments(cx, v, axes)
    return mean, cx.b.map("rsqrt", cx.b.map("add", var, eps))


def moments(cx: Context, v: Node, axes: Sequence[int]) -> Pair:
    """Mean and biased variance in two passes, reduced dims kept."""
    mean = cx.mean(v, axes)
    d = cx.b.map("sub", v, mean)
    return mean, cx.mean(cx.b.map("mul", d, d), axes)


def affine(cx: Context, xhat: Node, w: Node | None, b: Node | None) -> Node:
    """xhat * w + b in the compute type."""
    if w is not None:
        xhat = cx.b.map("mul", xhat, cx.b.cast(cx.up(w), xhat.dtype))
    return xhat if b is None else cx.b.map("add", xhat, cx.b.cast(cx.up(b), xhat.dtype))


def norm_grad(cx: Context, gw: Node, xhat: Node, rstd: Node, axes: Sequence[int], centred: bool = True) -> Node:
    """The input gradient of a norm over ``axes``; without centring the mean(g * w) term drops out."""
    b = cx.b
    inner = b.map("sub", gw, cx.mean(gw, axes)) if centred else gw
    along = b.map("mul", xhat, cx.mean(b.map("mul", gw, xhat), axes))
    return b.map("mul", rstd, b.map("sub", inner, along))


def widen(cx: Context, *xs: Node) -> list[Node]:
    """Arguments in one compute type."""
    ups = [cx.up(x) for x in xs]
    kind = DType.F64 if any(u.dtype is DType.F64 for u in ups) else DType.F32
    return [cx.b.cast(u, kind) for u in ups]


def column_sum(cx: Context, v: Node, axes: Sequence[int], index: int) -> Node:
    """Sum over ``axes`` in the type of ``v``, rounded once to the type of result ``index``."""
    type_ = cx.outs[index]
    assert type_ is not None
    return cx.b.cast(cx.b.reshape(cx.b.reduce("sum", v, axes), type_.shape), type_.dtype)


def grads(
    cx: Context, mask: Sequence[bool], dx: Node, gx: Node, g: Node, axes: Sequence[int]
) -> tuple[Node | None, ...]:
    """(dx, dw, db) as asked for by ``mask``."""
    return (
        cx.finish(dx, 0) if mask[0] else None,
        column_sum(cx, gx, axes, 1) if len(mask) > 1 and mask[1] and cx.outs[1] else None,
        column_sum(cx, g, axes, 2) if len(mask) > 2 and mask[2] and cx.outs[2] else None,
    )


def parameter_types(cx: Context, x: Node, *parameters: Node | None) -> None:
    """Parameters have the type of ``x``, or are fp32 beside 16-bit values: the CPU kernels take these too.

    Raises:
        Refused: one has another type.
    """
    narrow = x.dtype in (DType.BF16, DType.F16)
    cx.same_types(x, *(p for p in parameters if p is not None and not (narrow and p.dtype is DType.F32)))


@converts("native_layer_norm")
def layer_norm(
    cx: Context, x: Node, shape: Sequence[int], w: Node | None, b: Node | None, eps: float
) -> tuple[Node, Node, Node]:
    """Layer norm over the last ``len(shape)`` dims."""
    parameter_types(cx, x, w, b)
    (v,) = widen(cx, x)
    mean, rstd = statistics(cx, v, trailing(x, shape), eps)
    xhat = cx.b.map("mul", cx.b.map("sub", v, mean), rstd)
    return cx.finish(affine(cx, xhat, w, b)), cx.finish(mean, 1), cx.finish(rstd, 2)


def trailing(x: Node, shape: Sequence[int]) -> tuple[int, ...]:
    """The last ``len(shape)`` dims."""
    return tuple(range(x.type.rank - len(shape), x.type.rank))


@converts("native_layer_norm_backward")
def layer_norm_backward(
    cx: Context, g: Node, x: Node, shape: Sequence[int], mean: Node, rstd: Node, w: Node | None, b: Node | None,
    mask: Sequence[bool],
) -> tuple[Node | None, ...]:  # fmt: skip
    """Gradients of layer norm."""
    dy, v, m, r = widen(cx, g, x, mean, rstd)
    axes = trailing(x, shape)
    xhat = cx.b.map("mul", cx.b.map("sub", v, m), r)
    dx = norm_grad(cx, affine(cx, dy, w, None), xhat, r, axes)
    others = tuple(range(x.type.rank - len(shape)))
    return grads(cx, mask, dx, cx.b.map("mul", dy, xhat), dy, others)


@converts("_fused_rms_norm")
def rms_norm(
    cx: Context, x: Node, shape: Sequence[int], w: Node | None = None, eps: float | None = None
) -> tuple[Node, Node]:
    """x * rsqrt(mean(x^2) + eps) * w over the last dims; eps defaults to the input type's epsilon."""
    (v,) = widen(cx, x)
    var = cx.mean(cx.b.map("mul", v, v), trailing(x, shape))
    rstd = cx.b.map("rsqrt", cx.b.map("add", var, v.dtype.eps if eps is None else eps))
    return cx.finish(affine(cx, cx.b.map("mul", v, rstd), w, None)), cx.finish(rstd, 1)


@converts("_fused_rms_norm_backward")
def rms_norm_backward(
    cx: Context, g: Node, x: Node, shape: Sequence[int], rstd: Node, w: Node | None, mask: Sequence[bool]
) -> tuple[Node | None, ...]:
    """Gradients of RMS norm."""
    dy, v, r = widen(cx, g, x, rstd)
    xhat = cx.b.map("mul", v, r)
    dx = norm_grad(cx, affine(cx, dy, w, None), xhat, r, trailing(x, shape), centred=False)
    return grads(cx, mask, dx, cx.b.map("mul", dy, xhat), dy, tuple(range(x.type.rank - len(shape))))[:2]


def grouped(cx: Context, x: Node, n: int, c: int, hw: int, group: int) -> Node:
    """[N, C, ...] -> [N, G, C/G, HW]."""
    return cx.b.reshape(x, (n, group, c // group, hw))


def per_channel(cx: Context, w: Node | None, group: int) -> Node | None:
    """[C] -> [1, G, C/G, 1]."""
    return None if w is None else cx.b.reshape(w, (1, group, w.type.numel // group, 1))


@converts("native_group_norm")
def group_norm(
    cx: Context, x: Node, w: Node | None, b: Node | None, n: int, c: int, hw: int, group: int, eps: float
) -> tuple[Node, Node, Node]:
    """Group norm: statistics over the channels of a group and all positions; they have the type of the parameters."""
    parameter_types(cx, x, w, b)
    if w is not None and w.dtype is not x.dtype:  # stand-ins say that of x
        cx.outs = (cx.outs[0], *(TensorType((n, group), w.dtype) for _ in range(2)))
    (v,) = widen(cx, grouped(cx, x, n, c, hw, group))
    mean, rstd = statistics(cx, v, (2, 3), eps)
    xhat = cx.b.map("mul", cx.b.map("sub", v, mean), rstd)
    y = affine(cx, xhat, per_channel(cx, w, group), per_channel(cx, b, group))
    stats = (cx.finish(cx.b.reshape(s, (n, group)), i) for i, s in ((1, mean), (2, rstd)))
    return (cx.finish(cx.b.reshape(y, x.shape)), *stats)  # type: ignore[return-value]


@converts("native_group_norm_backward")
def group_norm_backward(
    cx: Context, g: Node, x: Node, mean: Node, rstd: Node, w: Node | None, n: int, c: int, hw: int, group: int,
    mask: Sequence[bool],
) -> tuple[Node | None, ...]:  # fmt: skip
    """Gradients of group norm."""
    stats = [cx.b.reshape(s, (n, group, 1, 1)) for s in (mean, rstd)]
    dy, v, m, r = widen(cx, grouped(cx, g, n, c, hw, group), grouped(cx, x, n, c, hw, group), *stats)
    xhat = cx.b.map("mul", cx.b.map("sub", v, m), r)
    dx = norm_grad(cx, affine(cx, dy, per_channel(cx, w, group), None), xhat, r, (2, 3))
    return grads(cx, mask, cx.b.reshape(dx, x.shape), cx.b.map("mul", dy, xhat), dy, (0, 3))


def channel(cx: Context, w: Node | None, x: Node) -> Node | None:
    """[C] -> [1, C, 1, ...] beside ``x``."""
    return None if w is None else cx.b.reshape(w, (1, w.type.numel) + (1,) * (x.type.rank - 2))


def not_channel(x: Node) -> tuple[int, ...]:
    """All dims but the second."""
    return (0, *range(2, x.type.rank))


def _batch_train(cx: Context, x: Node, w: Node | None, b: Node | None, eps: float) -> tuple[Node, Node, Node, Node]:
    (v,) = widen(cx, x)
    mean, var = moments(cx, v, not_channel(x))
    rstd = cx.b.map("rsqrt", cx.b.map("add", var, eps))
    xhat = cx.b.map("mul", cx.b.map("sub", v, mean), rstd)
    return affine(cx, xhat, channel(cx, w, x), channel(cx, b, x)), mean, var, rstd


def _batch_eval(cx: Context, x: Node, w: Node | None, b: Node | None, rm: Node, rv: Node, eps: float) -> Node:
    v, m, s = widen(cx, x, rm, rv)
    m, s = (cx.b.reshape(n, (1, n.type.numel) + (1,) * (x.type.rank - 2)) for n in (m, s))
    rstd = cx.b.map("rsqrt", cx.b.map("add", s, eps))
    xhat = cx.b.map("mul", cx.b.map("sub", v, m), rstd)
    return affine(cx, xhat, channel(cx, w, x), channel(cx, b, x))


def _running(cx: Context, old: Node, new: Node, momentum: float, index: int) -> Node:
    """(1 - momentum) * old + momentum * new."""
    o, fresh = widen(cx, old, cx.b.reshape(new, old.shape))
    mixed = cx.b.map("add", cx.b.map("mul", o, 1 - momentum), cx.b.map("mul", fresh, momentum))
    return cx.finish(mixed, index)


@converts("_native_batch_norm_legit_functional")
def batch_norm_functional(
    cx: Context, x: Node, w: Node | None, b: Node | None, rm: Node, rv: Node, training: bool, momentum: float,
    eps: float,
) -> tuple[Node, ...]:  # fmt: skip
    """Batch norm whose new running statistics are results 3 and 4 (the variance unbiased)."""
    if not training:
        y = _batch_eval(cx, x, w, b, rm, rv, eps)
        return cx.finish(y), cx.full(0, cx.outs[1] or cx.out), cx.full(0, cx.outs[2] or cx.out), rm, rv
    y, mean, var, rstd = _batch_train(cx, x, w, b, eps)
    stats = [cx.b.reshape(s, (x.shape[1],)) for s in (mean, rstd)]
    n = x.type.numel // max(x.shape[1], 1)
    unbiased = cx.b.map("mul", var, n / (n - 1) if n > 1 else float("nan"))
    new = _running(cx, rm, mean, momentum, 3), _running(cx, rv, unbiased, momentum, 4)
    return cx.finish(y), cx.finish(stats[0], 1), cx.finish(stats[1], 2), *new


@converts("_batch_norm_with_update_functional")
def batch_norm_with_update(
    cx: Context, x: Node, w: Node | None, b: Node | None, rm: Node, rv: Node, momentum: float, eps: float
) -> tuple[Node, ...]:
    """As above in training, with an (unused) reserve as result 3."""
    inner = Context(cx.b, (*cx.outs[:3], *cx.outs[4:]))
    y, mean, rstd, new_rm, new_rv = batch_norm_functional(inner, x, w, b, rm, rv, True, momentum, eps)
    return y, mean, rstd, cx.full(0, cx.outs[3] or cx.out), new_rm, new_rv


@converts("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    cx: Context, x: Node, w: Node | None, b: Node | None, training: bool, momentum: float, eps: float
) -> tuple[Node, ...]:
    """Batch norm without running statistics (instance norm comes here too)."""
    y, mean, _, rstd = _batch_train(cx, x, w, b, eps)
    stats = [cx.b.reshape(s, (x.shape[1],)) for s in (mean, rstd)]
    return cx.finish(y), cx.finish(stats[0], 1), cx.finish(stats[1], 2)


@converts("_native_batch_norm_legit_no_training")
def batch_norm_inference(
    cx: Context, x: Node, w: Node | None, b: Node | None, rm: Node, rv: Node, momentum: float, eps: float
) -> tuple[Node, ...]:
    """Batch norm with given statistics; results 1 and 2 are empty."""
    y = _batch_eval(cx, x, w, b, rm, rv, eps)
    return cx.finish(y), cx.full(0, cx.outs[1] or cx.out), cx.full(0, cx.outs[2] or cx.out)


@converts("_batch_norm_no_update")
def batch_norm_no_update(
    cx: Context, x: Node, w: Node | None, b: Node | None, rm: Node, rv: Node, momentum: float, eps: float
) -> tuple[Node, ...]:
    """As above, with an (unused) reserve."""
    out = batch_norm_inference(cx, x, w, b, rm, rv, momentum, eps)
    return (*out, cx.full(0, cx.outs[3] or cx.out))


@converts("native_batch_norm_backward")
def batch_norm_backward(
    cx: Context, g: Node, x: Node, w: Node | None, rm: Node | None, rv: Node | None, mean: Node | None,
    rstd: Node | None, train: bool, eps: float, mask: Sequence[bool],
) -> tuple[Node | None, ...]:  # fmt: skip
    """Gradients of batch norm; in evaluation the statistics are constants."""
    if train:
        assert mean is not None
        assert rstd is not None
        dy, v, m, r = widen(cx, g, x, mean, rstd)
    else:
        assert rm is not None
        assert rv is not None
        dy, v, m, s = widen(cx, g, x, rm, rv)
        r = cx.b.map("rsqrt", cx.b.map("add", s, eps))
    m, r = channel(cx, m, x) or m, channel(cx, r, x) or r
    xhat = cx.b.map("mul", cx.b.map("sub", v, m), r)
    gw = affine(cx, dy, channel(cx, w, x), None)
    dx = norm_grad(cx, gw, xhat, r, not_channel(x)) if train else cx.b.map("mul", gw, r)
    return grads(cx, mask, dx, cx.b.map("mul", dy, xhat), dy, not_channel(x))


@converts("batch_norm_backward")
def batch_norm_backward_with_reserve(
    cx: Context, g: Node, x: Node, w: Node, rm: Node | None, rv: Node | None, mean: Node | None, rstd: Node | None,
    train: bool, eps: float, mask: Sequence[bool], reserve: Node,
) -> tuple[Node | None, ...]:  # fmt: skip
    """As above; the reserve is a library's scratch."""
    return batch_norm_backward(cx, g, x, w, rm, rv, mean, rstd, train, eps, mask)


def _others(v: Node, dim: int) -> tuple[int, ...]:
    return tuple(i for i in range(v.type.rank) if i != dim % v.type.rank)


@converts("_weight_norm_interface")
def weight_norm(cx: Context, v: Node, g: Node, dim: int = 0) -> tuple[Node, Node]:
    """w = v * g / norm(v), the norm over all dims but ``dim``; the norms are fp32 for 16-bit weights."""
    x, scale = widen(cx, v, g)
    norm = cx.b.map("sqrt", cx.b.reduce("sum", cx.b.map("mul", x, x), _others(v, dim), keepdim=True))
    return cx.finish(cx.b.map("mul", x, cx.b.map("div", scale, norm))), cx.finish(norm, 1)


@converts("_weight_norm_interface_backward")
def weight_norm_backward(cx: Context, grad: Node, v: Node, g: Node, norm: Node, dim: int) -> tuple[Node, Node]:
    """dg = sum(grad * v) / norm;  dv = g / norm * (grad - v * sum(grad * v) / norm^2)."""
    b = cx.b
    dw, x, scale, n = widen(cx, grad, v, g, norm)
    along = b.reduce("sum", b.map("mul", dw, x), _others(v, dim), keepdim=True)
    radial = b.map("mul", x, b.map("div", along, b.map("mul", n, n)))
    dv = b.map("mul", b.map("div", scale, n), b.map("sub", dw, radial))
    return cx.finish(dv), cx.finish(b.map("div", along, n), 1)
