"""Every converter against PyTorch's autograd, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capture_helpers import compare, seeded


def x34() -> tuple[Tensor]:
    return (seeded(3, 4),)


def x2345() -> tuple[Tensor]:
    return (seeded(2, 3, 4, 6),)


def positive() -> tuple[Tensor]:
    return (seeded(3, 4).detach().abs().add(0.3).requires_grad_(),)


def pair() -> tuple[Tensor, Tensor]:
    return seeded(3, 4), seeded(4, seed=1)


def three() -> tuple[Tensor, Tensor, Tensor]:
    return seeded(3, 4), seeded(3, 4, seed=1), seeded(3, 4, seed=2)


def small() -> tuple[Tensor]:
    return (seeded(3, 4).detach().clamp(-0.9, 0.9).requires_grad_(),)


def scaled_by(k: float) -> Callable[[], tuple[Tensor]]:
    return lambda: ((seeded(5, 7).detach() * k).requires_grad_(),)


POINTWISE: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "add_alpha": (lambda a, b: torch.add(a, b, alpha=0.5), pair),
    "sub_alpha": (lambda a, b: torch.sub(a, b, alpha=2), pair),
    "rsub": (lambda a: 2.5 - a, x34),
    "mul_scalar": (lambda a: a * 3 * 0.25, x34),
    "div": (lambda a, b: a / (b * b + 1), pair),
    "div_scalar": (lambda a: a / 3, x34),
    "div_floor": (lambda a, b: torch.div(a, b, rounding_mode="floor") * a, pair),
    "div_trunc": (lambda a, b: torch.div(a, b, rounding_mode="trunc") + a, pair),
    "rdiv": (lambda a: 1.5 / a, positive),
    "remainder": (lambda a, b: torch.remainder(a, b) + torch.fmod(a, 0.7), pair),
    "neg_abs_sign": (lambda a: -a.abs() * a.sign() + a, x34),
    "pow2": (lambda a: a**2, x34),
    "pow3": (lambda a: a.pow(3), x34),
    "pow_half": (lambda a: a**0.5 + a ** (-0.5), positive),
    "pow_neg": (lambda a: a**-1 + a**-2, positive),
    "pow_other": (lambda a: a**1.7, positive),
    "pow_tensor": (lambda a: a ** (a * 0.5), positive),
    "pow_scalar_base": (lambda a: 2.0**a, x34),
    "square": (lambda a: torch.square(a), x34),
    "exp_log": (lambda a: torch.exp(a) + torch.log(a * a + 1) + torch.log1p(a * a) + torch.expm1(a), x34),
    "log2_log10_exp2": (lambda a: torch.log2(a) + torch.log10(a) + torch.exp2(a), positive),
    "sqrt_rsqrt": (lambda a: torch.sqrt(a) * torch.rsqrt(a + 1) + torch.reciprocal(a), positive),
    "sin_cos_tan": (lambda a: torch.sin(a) + torch.cos(a) * torch.tan(a * 0.3), x34),
    "arc": (lambda a: torch.asin(a) + torch.acos(a) + torch.atan(a) + torch.atanh(a), small),
    "hyperbolic": (lambda a: torch.sinh(a) + torch.cosh(a) + torch.tanh(a) + torch.asinh(a), x34),
    "erf": (lambda a: torch.erf(a) + torch.erfc(a), x34),
    "sigmoid": (torch.sigmoid, x34),
    "floor_ceil": (lambda a: a.floor() + a.ceil() + a.trunc() + a.round() + a, x34),
    "frac": (lambda a: torch.frac(a), x34),
    "clamp": (lambda a: a.clamp(-0.5, 0.7) + a.clamp(min=0.1) + a.clamp_max(0.3), x34),
    "clamp_tensor": (lambda a, b: torch.clamp(a, min=b), pair),
    "maximum": (lambda a, b: torch.maximum(a, b) + torch.minimum(a, b) * 2, pair),
    "where": (lambda a, b: torch.where(a > 0, a * 2, b), pair),
    "where_scalar": (lambda a: torch.where(a > 0, a, 0.5), x34),
    "masked_fill": (lambda a: a.masked_fill(a < 0, -3.0), x34),
    "compare": (lambda a, b: (a >= b).double() * a + (a != b) * b, pair),
    "logical": (lambda a, b: a * ((a > 0) & ~(b > 0) | (a > b)), pair),
    "logical_fns": (lambda a, b: a * torch.logical_or(a > 0, torch.logical_not(b > 0)).double(), pair),
    "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=0.5), three),
    "addcdiv": (lambda a, b, c: torch.addcdiv(a, b, c * c + 1, value=0.5), three),
    "lerp": (lambda a, b, c: torch.lerp(a, b, 0.3) + torch.lerp(a, b, c), three),
    "atan2": (lambda a, b: torch.atan2(a, b), pair),
    "isnan": (lambda a: torch.where(torch.isnan(a) | torch.isinf(a), 0.0, a), x34),
    "nan_to_num": (lambda a: torch.nan_to_num(a), x34),
    "inplace": (lambda a: (a * 2).add_(1).mul_(a).relu_(), x34),
    "zeros_fill": (lambda a: a + torch.zeros_like(a) + torch.ones(4, dtype=a.dtype) + a.new_full((4,), 2.5), x34),
    "slice_assign": (lambda a: _assign(a), x34),
    "int_arith": (lambda a: a * (torch.arange(4) // 3) + torch.arange(0, 8, 2) % 3, x34),
    "linspace": (lambda a: a * torch.linspace(0, 1, 4, dtype=torch.float64), x34),
}


def _assign(a: Tensor) -> Tensor:
    out = torch.zeros(3, 6, dtype=a.dtype, device=a.device)
    out[:, 1:5] = a
    out[1] = 2.0
    out[:, 0] += a[:, 1]
    return out * 2


ACTIVATIONS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "silu": (F.silu, scaled_by(3)),
    "gelu": (F.gelu, scaled_by(2)),
    "gelu_tanh": (lambda a: F.gelu(a, approximate="tanh"), scaled_by(2)),
    "softplus": (F.softplus, scaled_by(20)),
    "softplus_beta": (lambda a: F.softplus(a, beta=2.5, threshold=5), scaled_by(3)),
    "elu": (lambda a: F.elu(a, 0.7), scaled_by(2)),
    "elu_inplace": (lambda a: F.elu(a * 2, 0.7, inplace=True), scaled_by(2)),
    "selu_celu": (lambda a: F.selu(a) + F.celu(a, 1.3), scaled_by(2)),
    "relu": (F.relu, scaled_by(2)),
    "squared_relu": (lambda a: F.relu(a).pow(2), scaled_by(2)),
    "relu6": (F.relu6, scaled_by(6)),
    "hardtanh": (lambda a: F.hardtanh(a, -0.5, 0.8), scaled_by(2)),
    "leaky_relu": (lambda a: F.leaky_relu(a, 0.1), scaled_by(2)),
    "hardswish": (F.hardswish, scaled_by(3)),
    "hardsigmoid": (F.hardsigmoid, scaled_by(3)),
    "mish": (F.mish, scaled_by(3)),
    "logsigmoid": (F.logsigmoid, scaled_by(3)),
    "tanh_sigmoid": (lambda a: torch.tanh(a) * torch.sigmoid(a), scaled_by(3)),
    "hardshrink": (F.hardshrink, scaled_by(2)),
    "softshrink": (F.softshrink, scaled_by(2)),
    "softsign_tanhshrink": (lambda a: F.softsign(a) + F.tanhshrink(a), scaled_by(2)),
    "threshold": (lambda a: F.threshold(a, 0.2, -1.0), scaled_by(2)),
    "prelu": (lambda a, w: F.prelu(a, w), lambda: (seeded(5, 7), seeded(7, seed=2))),
    "glu": (lambda a: F.glu(a, dim=-1), lambda: (seeded(3, 8),)),
    "mse_loss": (lambda a, b, c: F.mse_loss(a, b) + F.mse_loss(a, c, reduction="sum"), three),
    "mse_none": (lambda a, b: F.mse_loss(a, b, reduction="none"), lambda: three()[:2]),
}

REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "sum": (lambda a: a.sum(-1) + a.sum(), x34),
    "sum_keepdim": (lambda a: a / a.sum((0, 2), keepdim=True), x2345),
    "mean": (lambda a: a.mean((1, -1)), x2345),
    "mean_all": (lambda a: a.mean(), x34),
    "amax_amin": (lambda a: a.amax(-1) - a.amin((0, 1)).sum(), x34),
    "max_all": (lambda a: a.max() - a.min(), x34),
    "prod": (lambda a: torch.prod(a, dim=1).detach() + a.sum(1), x34),
    "var": (lambda a: a.var(-1) + a.var(-1, correction=0), x34),
    "std": (lambda a: a.std((1, 2), keepdim=True) * a, x2345),
    "var_mean": (lambda a: torch.var_mean(a, dim=(0, 1), correction=0), x34),
    "std_mean": (lambda a: torch.std_mean(a, dim=1), x34),
    "norm": (lambda a: torch.linalg.vector_norm(a, dim=1) + a.norm(dim=1), x34),
    "norm_p": (lambda a: torch.linalg.vector_norm(a, 3, dim=1) + torch.linalg.vector_norm(a, 1, dim=-1), x34),
    "norm_inf": (lambda a: torch.linalg.vector_norm(a, float("inf"), dim=1), x34),
    "normalize": (lambda a: F.normalize(a, dim=-1), x34),
    "logsumexp": (lambda a: torch.logsumexp(a, dim=(0, 1)) + torch.logsumexp(a, -1, keepdim=True), x34),
    "softmax": (lambda a: F.softmax(a, dim=1), x2345),
    "log_softmax": (lambda a: F.log_softmax(a, dim=-1), x2345),
    "any_all": (lambda a: a * (a > 0).any(1, keepdim=True) + (a > -9).all(), x34),
}

MOVES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "view": (lambda a: a.view(6, 24).t().reshape(4, 36), x2345),
    "permute": (lambda a: a.permute(3, 0, 2, 1) * 2, x2345),
    "transpose": (lambda a: a.transpose(1, -1).contiguous().flatten(1), x2345),
    "unsqueeze": (lambda a: a.unsqueeze(1).squeeze(1)[None, :, None], x34),
    "expand": (lambda a: a[:, None].expand(3, 5, 4) * 1.5, x34),
    "slice": (lambda a: a[:, 1:, ::2, 1:6:3], x2345),
    "negative_index": (lambda a: a[-1, -2:, :-1] + a[..., -1:].sum(), x2345),
    "select": (lambda a: a[:, 1] * a.select(2, -1).sum(), x2345),
    "split": (lambda a: torch.split(a, 4, dim=-1), x2345),
    "chunk": (lambda a: [c * i for i, c in enumerate(a.chunk(3, dim=1))], x2345),
    "split_sizes": (lambda a: a.split([1, 2, 3], -1)[2] * 2, x2345),
    "unbind": (lambda a: sum(a.unbind(2)), x2345),
    "cat": (lambda a, b: torch.cat([a, b[None], a * 2], dim=0), pair),
    "stack": (lambda a, b: torch.stack([a, b.expand_as(a)], dim=-1), pair),
    "flip": (lambda a: a.flip(0, -1) * a, x34),
    "roll": (lambda a: a.roll(3, 1) + a.roll((1, -2), (0, 1)) + a.roll(5), x34),
    "pad": (lambda a: F.pad(a, (1, 2, -1, 1), value=0.5), x34),
    "repeat": (lambda a: a.repeat(2, 3, 1) * 2, x34),
    "repeat_interleave": (lambda a: a.repeat_interleave(3, dim=1), x34),
    "tril_triu": (lambda a: a.tril() + a.triu(1), x34),
    "movedim": (lambda a: a.movedim(0, 2).swapaxes(0, 1), x2345),
    "rotate_half": (lambda a: torch.cat([-a[..., 3:], a[..., :3]], -1) * a, x2345),
    "unflatten": (lambda a: a.unflatten(-1, (2, 3)).transpose(-1, -2).flatten(-2), x2345),
    "broadcast_to": (lambda a, b: a + b.broadcast_to(3, 4), pair),
    "pixel_shuffle": (lambda a: F.pixel_shuffle(a, 2), lambda: (seeded(2, 8, 3, 3),)),
}

DOTS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "mm": (lambda a, b: a @ b, lambda: (seeded(3, 4), seeded(4, 5))),
    "linear": (F.linear, lambda: (seeded(2, 3, 4), seeded(5, 4), seeded(5))),
    "linear_no_bias": (F.linear, lambda: (seeded(2, 3, 4), seeded(5, 4))),
    "bmm": (torch.bmm, lambda: (seeded(2, 3, 4), seeded(2, 4, 5))),
    "matmul_broadcast": (torch.matmul, lambda: (seeded(2, 1, 3, 4), seeded(6, 4, 5))),
    "einsum": (lambda a, b: torch.einsum("btd,tdh->bth", a, b), lambda: (seeded(3, 2, 4), seeded(2, 4, 5))),
    "mv_dot": (lambda a, b: (a @ b) * torch.dot(b, b), lambda: (seeded(3, 4), seeded(4))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
              lambda: (seeded(3, 5), seeded(3, 4), seeded(4, 5))),
    "baddbmm": (torch.baddbmm, lambda: (seeded(3, 5), seeded(2, 3, 4), seeded(2, 4, 5))),
    "outer": (torch.outer, lambda: (seeded(3), seeded(4))),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                  lambda: (seeded(2, 2, 4, 3), seeded(2, 2, 4, 3, seed=1), seeded(2, 2, 4, 3, seed=2))),
    "bilinear_form": (lambda a, b: torch.einsum("bi,ij,bj->b", a, b, a), lambda: (seeded(3, 4), seeded(4, 4))),
}  # fmt: skip

NORMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (4,), w, b, 1e-3), lambda: (seeded(2, 3, 4), seeded(4), seeded(4))),
    "layer_norm_2d": (lambda a, w: F.layer_norm(a, (3, 4), w), lambda: (seeded(2, 3, 4), seeded(3, 4))),
    "layer_norm_plain": (lambda a: F.layer_norm(a, (4,)), lambda: (seeded(2, 3, 4),)),
    "rms_norm": (lambda a, w: F.rms_norm(a, (4,), w, 1e-5), lambda: (seeded(2, 3, 4), seeded(4))),
    "group_norm": (lambda a, w, b: F.group_norm(a, 2, w, b), lambda: (seeded(2, 6, 5), seeded(6), seeded(6))),
    "group_norm_plain": (lambda a: F.group_norm(a, 3), lambda: (seeded(2, 6, 5, 2),)),
    "instance_norm": (F.instance_norm, lambda: (seeded(2, 3, 5),)),
    "batch_norm": (lambda a, w, b: F.batch_norm(a, None, None, w, b, True), lambda: (seeded(5, 3, 2), seeded(3),
                                                                                    seeded(3))),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), lambda: (seeded(3, 4), seeded(3, 1))),
    "weight_norm_dim": (lambda v, g: torch._weight_norm(v, g, 1), lambda: (seeded(3, 4), seeded(1, 4))),
}  # fmt: skip

TABLES = {
    "pointwise": POINTWISE, "activations": ACTIVATIONS, "reductions": REDUCTIONS, "moves": MOVES, "dots": DOTS,
    "norms": NORMS,
}  # fmt: skip


def groups(size: int = 8) -> list[Any]:
    """Functions of one table that take the same arguments, a few at a time: one capture for each group."""
    params = []
    for title, table in TABLES.items():
        by_maker: dict[Any, list[str]] = {}
        for name, (_, make) in table.items():
            by_maker.setdefault(repr([v.tolist() for v in make()]), []).append(name)
        for names in by_maker.values():
            for i in range(0, len(names), size):
                part = names[i : i + size]
                params.append(pytest.param(table, part, id=f"{title}-{part[0]}"))
    return params


@pytest.mark.parametrize(("table", "names"), groups())
def test_ops(table: dict[str, Any], names: list[str]) -> None:
    def every(*args: Tensor) -> dict[str, Any]:
        return {name: table[name][0](*args) for name in names}

    tol = 1e-7 if "hardsigmoid" in names else 1e-9  # its CPU kernel has a float32 1/6
    compared = compare(every, *table[names[0]][1](), tol=tol)
    assert not compared.captured.support.opaque, str(compared.captured.support)
