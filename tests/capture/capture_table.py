"""Calls with the ATen ops that they are expected to leave: none where there is a formula.

Each is a function of three tensors ``x``, ``y``, ``z`` of one shape [N, C, L], drawn from N(0, 1). Functions with a
smaller domain map their arguments into it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Fn = Callable[[Tensor, Tensor, Tensor], Any]


def unit(x: Tensor) -> Tensor:
    """Into (0.1, 0.9)."""
    return torch.sigmoid(x) * 0.8 + 0.1


def above(x: Tensor, low: float = 0.5) -> Tensor:
    """Above ``low``."""
    return x.abs() + low


def classes(x: Tensor) -> Tensor:
    """A class of dim 1 for each of the rest, [N, L]."""
    return torch.arange(x.shape[0] * x.shape[2], device=x.device).view(x.shape[0], -1) * 7 % x.shape[1]


def signs(x: Tensor) -> Tensor:
    """-1 or 1."""
    return torch.where(x.detach() < 0, -1.0, 1.0).to(x.dtype)


POINTWISE: dict[str, Fn] = {
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.3) + torch.addcdiv(x, y, above(z), value=2),
    "lerp": lambda x, y, z: torch.lerp(x, y, unit(z)) + torch.lerp(x, y, 0.7),
    "clamp": lambda x, y, z: x.clamp(y, y + 1) + x.clamp(-0.3, 0.4) + x.clip(max=0.1),
    "maximum": lambda x, y, z: torch.maximum(x, y) - torch.minimum(y, z) + torch.max(x, z),
    "fmax_fmin": lambda x, y, z: torch.fmax(x, y) * torch.fmin(y, z),
    "fmod": lambda x, y, z: torch.fmod(x, 0.75) + torch.remainder(x, above(y)),
    "copysign": lambda x, y, z: torch.copysign(x, y) + torch.copysign(z, -1.0),
    "hypot_atan2": lambda x, y, z: torch.hypot(x, y) + torch.atan2(y, z),
    "pow": lambda x, y, z: above(x).pow(y) + 2**z + above(y).float_power(1.5).to(x.dtype) + x**3,
    "where": lambda x, y, z: torch.where(y > 0, x, z) + x.masked_fill(z < 0, 2.0),
    "compare": lambda x, y, z: x * (y > z) + y * (x <= 0.5) + z * (x != y) + x * torch.isclose(y, z, atol=0.3),
    "logical": lambda x, y, z: x * torch.logical_and(y > 0, z) + y * torch.logical_xor(x > 0, z > 0),
    "bits": lambda x, y, z: x * ((y > 0) & (z > 0) | ~(x > 0) ^ (z > 1)),
    "integers": lambda x, y, z: x * ((torch.arange(x.shape[-1], device=x.device) << 2 >> 1) % 5 & 6 | 1),
    "exp": lambda x, y, z: torch.exp(x) + torch.exp2(y) * torch.expm1(z),
    "log": lambda x, y, z: above(x).log() + above(y).log2() + above(z).log10(),
    "log1p": lambda x, y, z: above(x).log1p() * y,
    "roots": lambda x, y, z: above(x).sqrt() + above(y).rsqrt() + above(z).reciprocal(),
    "circle": lambda x, y, z: x.sin() * y.cos() + (0.3 * z).tan(),
    "arcs": lambda x, y, z: unit(x).asin() + unit(y).acos() + z.atan(),
    "hyperbolic": lambda x, y, z: x.sinh() + y.cosh() + z.tanh(),
    "area": lambda x, y, z: x.asinh() + above(y, 1.2).acosh() + unit(z).atanh(),
    "erf": lambda x, y, z: torch.erf(x) + torch.erfc(y) + torch.erfinv(unit(z)) + torch.special.ndtr(x),
    "gamma": lambda x, y, z: torch.lgamma(above(x)) + torch.digamma(above(y)) + torch.mvlgamma(above(z, 2.0), 3),
    "entropy": lambda x, y, z: (
        torch.special.entr(unit(x)) + torch.xlogy(x, above(y)) + torch.special.xlog1py(z, unit(y))
    ),
    "logaddexp": lambda x, y, z: torch.logaddexp(x, y) + torch.logaddexp2(y, z),
    "logit": lambda x, y, z: torch.logit(unit(x)) + torch.logit(y, eps=0.2),
    "sinc": lambda x, y, z: torch.sinc(x) + torch.deg2rad(y) + torch.rad2deg(z),
    "steps": lambda x, y, z: torch.heaviside(y.detach(), z.detach()) * x + x * torch.signbit(y) + z.sgn(),
    "angle": lambda x, y, z: torch.angle(x) + y * torch.isfinite(z) + x * torch.isposinf(y) + y * torch.isneginf(x),
    "rounding": lambda x, y, z: (
        x * y.detach().round() + y * z.detach().floor() + x.detach().ceil() * z + y.detach().trunc()
    ),
    "decimals": lambda x, y, z: x * torch.round(y.detach(), decimals=1) + torch.frac(z),
    "nan_to_num": lambda x, y, z: torch.nan_to_num(x / (y > 0), nan=0.5, posinf=3.0, neginf=-3.0),
    "ldexp": lambda x, y, z: torch.ldexp(x, torch.arange(x.shape[-1], device=x.device) - 3),
}

WIDE: dict[str, Fn] = {  # PyTorch has these for fp32 and fp64 alone
    "normal": lambda x, y, z: torch.special.ndtri(unit(x)) + torch.special.log_ndtr(3 * y) + torch.special.erfcx(z),
    "bessel_i": lambda x, y, z: torch.i0(x) + torch.special.i1(y),
    "bessel_ie": lambda x, y, z: torch.special.i0e(9 * z) + torch.special.i1e(9 * y),
}

ACTIVATIONS: dict[str, Fn] = {
    "relus": lambda x, y, z: F.relu(x) + F.relu6(3 * y) + F.leaky_relu(z, 0.2) + F.rrelu(x, 0.1, 0.3, training=False),
    "elus": lambda x, y, z: F.elu(x) + F.celu(y, 1.3) + F.selu(z),
    "hard": lambda x, y, z: F.hardswish(2 * x) + F.hardsigmoid(2 * y) + F.hardtanh(z),
    "shrinks": lambda x, y, z: F.hardshrink(x) + F.softshrink(y) + F.tanhshrink(z),
    "smooth": lambda x, y, z: F.silu(x) + F.gelu(y) + F.gelu(z, approximate="tanh"),
    "mish": lambda x, y, z: F.mish(x) + F.softplus(y, beta=2) + F.logsigmoid(z) + F.softsign(x),
    "gates": lambda x, y, z: F.glu(torch.cat([x, y], 1), 1) * F.sigmoid(z) + F.threshold(x, 0.1, -1.0),
    "prelu": lambda x, y, z: F.prelu(x, y[0, :, 0]) + F.prelu(z, y[0, 0, :1]),
    "softmax": lambda x, y, z: F.softmax(x, 1) + F.log_softmax(y, 2) + F.softmin(z, 0),
    "dropout_off": lambda x, y, z: F.dropout(x, 0.5, training=False) + F.alpha_dropout(y, 0.3, training=False),
}

LOSSES: dict[str, Fn] = {
    "mse": lambda x, y, z: F.mse_loss(x, y) + F.mse_loss(x, z, reduction="sum"),
    "l1": lambda x, y, z: F.l1_loss(x, y) + F.l1_loss(y, z, reduction="none").sum(),
    "huber": lambda x, y, z: F.huber_loss(x, y, delta=0.7) + F.huber_loss(y, z, reduction="sum"),
    "smooth_l1": lambda x, y, z: F.smooth_l1_loss(x, y, beta=0.5) + F.smooth_l1_loss(y, z, reduction="none").mean(),
    "bce": lambda x, y, z: (
        F.binary_cross_entropy(unit(x), unit(y)) + F.binary_cross_entropy(unit(x), unit(z), above(y).detach())
    ),
    "bce_logits": lambda x, y, z: F.binary_cross_entropy_with_logits(
        x, unit(y), weight=unit(z).detach(), pos_weight=above(z).detach()
    ),
    "soft_margin": lambda x, y, z: F.soft_margin_loss(x, signs(y)) + F.soft_margin_loss(x, signs(z), reduction="sum"),
    "kl": lambda x, y, z: F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1), reduction="batchmean"),
    "kl_log": lambda x, y, z: F.kl_div(F.log_softmax(x, 1), F.log_softmax(z, 1), log_target=True, reduction="sum"),
    "cross_entropy": lambda x, y, z: F.cross_entropy(x, classes(x)) + F.cross_entropy(y, F.softmax(z, 1)),
    "cross_entropy_smooth": lambda x, y, z: F.cross_entropy(x, classes(x), label_smoothing=0.1),
    "cross_entropy_2d": lambda x, y, z: F.cross_entropy(x.mean(2), classes(x)[:, 0], ignore_index=0, reduction="sum"),
    "nll_none": lambda x, y, z: F.nll_loss(
        F.log_softmax(x, 1), classes(x), above(y[0, :, 0].detach()), reduction="none"
    ),
    "nll_ignored": lambda x, y, z: F.nll_loss(x, classes(x), ignore_index=1),
    "poisson": lambda x, y, z: (
        F.poisson_nll_loss(x, above(y), full=True) + F.poisson_nll_loss(above(z), y, log_input=False)
    ),
    "margins": lambda x, y, z: F.margin_ranking_loss(x, y, signs(z)) + F.hinge_embedding_loss(x, signs(y)),
    "triplet": lambda x, y, z: F.triplet_margin_loss(x[:, :, 0], y[:, :, 0], z[:, :, 0]),
    "cosine": lambda x, y, z: (
        F.cosine_embedding_loss(x[0], y[0], signs(z[0, :, 0])) + F.cosine_similarity(x, y, 1).sum()
    ),
    "multilabel": lambda x, y, z: F.multilabel_soft_margin_loss(x[0], signs(y[0])),
}

REDUCTIONS: dict[str, Fn] = {
    "sums": lambda x, y, z: x.sum(1) + y.sum(1, dtype=torch.float32) + z.nansum(1) + z.nanmean(1),
    "means": lambda x, y, z: x.mean((0, 2)) + y.mean() + z.mean((0, 2)),
    "var": lambda x, y, z: x.var(1) + y.std(1, correction=0) + torch.var_mean(z, 1)[0],
    "std_mean": lambda x, y, z: torch.std_mean(x, (0, 2), unbiased=False),
    "extremes": lambda x, y, z: x.amax(1) + y.amin(1) + z.max(),
    "extremes_dim": lambda x, y, z: x.max(1).values + y.min(1)[0],
    "aminmax": lambda x, y, z: x.aminmax(dim=1).max * y.aminmax(dim=1).min,
    "argmax": lambda x, y, z: z.sum(1) + y.argmax(1) - z.argmin(1) + x.argmax(),
    "norms": lambda x, y, z: torch.linalg.vector_norm(x, dim=1) + y.norm(1, 1) + torch.linalg.vector_norm(z, 3, dim=1),
    "norm_inf": lambda x, y, z: x.norm(float("inf"), 1) + torch.linalg.matrix_norm(y).sum() + torch.dist(x, z),
    "normalize": lambda x, y, z: F.normalize(x, dim=1) + F.normalize(y, p=1, dim=2) + torch.renorm(z, 2, 0, 1.0),
    "distance": lambda x, y, z: F.pairwise_distance(x, y) + F.cosine_similarity(y, z, dim=2),
    "logsumexp": lambda x, y, z: torch.logsumexp(x, 1) + torch.logsumexp(y, (0, 1)),
    "truth": lambda x, y, z: x * (y > 0).any(1, keepdim=True) + y * (z > -9).all() + z * x.count_nonzero(1)[:, None],
    "picked": lambda x, y, z: F.log_softmax(x, 1).gather(1, classes(x)[:, None]) + y.max(1, keepdim=True)[0],
    "marked": lambda x, y, z: x.scatter(1, classes(x)[:, None], 2.0) + y * z,
}

MOVES: dict[str, Fn] = {
    "cut": lambda x, y, z: x.chunk(2, 2)[1] * 2 + y.split(x.shape[2] - x.shape[2] // 2, 2)[0][..., : x.shape[2] // 2],
    "join": lambda x, y, z: torch.cat([x, y * 2, z], 1) + torch.stack([x, y, z], 1).flatten(1, 2),
    "unbind": lambda x, y, z: sum(x.unbind(1)) + y.tensor_split(2, 1)[0].sum(1),
    "turn": lambda x, y, z: x.roll(1, 1) + y.flip(0, 2) + z.rot90(2, (1, 2)) + x.roll((1, 2), (0, 2)),
    "repeat": lambda x, y, z: x.repeat(1, 2, 1) + y.tile(2, 1) + z.repeat_interleave(2, 1),
    "diagonals": lambda x, y, z: [torch.diagonal(x, 1, 1, 2) * 2, torch.diag_embed(y, -1).sum(-1)],
    "unfold": lambda x, y, z: [
        x.unfold(2, 3, 1) * 2,
        z.unfold(2, 3, 2) * 2,
        y.unfold(1, 2, 2) * 3,
        x.unfold(1, 1, 2) * 3,
    ],
    "pool": lambda x, y, z: [F.avg_pool1d(x, 2), F.avg_pool1d(y, 3, 2, 1), F.adaptive_avg_pool1d(z, 1)],
    "pool_2d": lambda x, y, z: [F.avg_pool2d(x, 2, 1), F.local_response_norm(y, 3)],
    "pad": lambda x, y, z: F.pad(x, (1, 2), value=0.5) + F.pad(y, (2, 1), mode="circular") + F.pad(z, (0, 3)),
    "triangles": lambda x, y, z: x.tril(1) + y.triu(-1) + z * torch.eye(x.shape[2], device=x.device)[: x.shape[1]],
    "shuffle": lambda x, y, z: [
        F.pixel_shuffle(torch.stack([x, y, z, x], 1), 2),
        F.channel_shuffle(torch.cat([x, y], 1).unsqueeze(-1), 2) * 2,
    ],
    "block_diag": lambda x, y, z: torch.block_diag(x[0], y[0], z[0]) * 2 + torch.block_diag(z[0], x[0], y[0]),
    "products": lambda x, y, z: [torch.kron(x[0], y[0]), torch.linalg.cross(x[:1, :3], y[:1, :3], dim=1)],
    "meshgrid": lambda x, y, z: (
        torch.meshgrid(x[0, :, 0], y[0, 0], indexing="ij")[1] * torch.outer(x[0, :, 1], z[0, 0])
    ),
    "differences": lambda x, y, z: x.diff(dim=1) + torch.trapezoid(y, dim=1)[:, None],
}

DOTS: dict[str, Fn] = {
    "einsum": lambda x, y, z: torch.einsum("bcl,bdl->bcd", x, y) @ z + torch.einsum("bcl,bcl->bc", x, z)[..., None],
    "matmul": lambda x, y, z: x @ y.mT @ z + torch.baddbmm(x, y @ z.mT, x),
    "bilinear": lambda x, y, z: F.bilinear(x, y, torch.einsum("bij,bkl->bjl", x, y), z[0, 0, : x.shape[0]]),
    "addbmm": lambda x, y, z: torch.addbmm(x[0], x @ y.mT, z, beta=0.5) + torch.addmm(z[0], x[0] @ y[0].mT, z[0]),
    "vectors": lambda x, y, z: torch.mv(x[0], y[0, 0]) + torch.dot(z[0, 0], x[0, 0]) + torch.inner(x[0], y[0, 0]),
    "attention": lambda x, y, z: (
        F.scaled_dot_product_attention(x, y, z) + F.scaled_dot_product_attention(x, y, z, is_causal=True)
    ),
}

TABLES: dict[str, dict[str, Fn]] = {
    "pointwise": POINTWISE,
    "activations": ACTIVATIONS,
    "losses": LOSSES,
    "reductions": REDUCTIONS,
    "moves": MOVES,
    "dots": DOTS,
}

SCATTER, RANDOM, SCAN, SORT = "scatters by index", "random numbers", "scan", "sorts"
OPAQUE: dict[str, tuple[Fn, str]] = {
    "index_add": (lambda x, y, z: x.index_select(1, torch.tensor([1, 0])), SCATTER),
    "scatter_add": (lambda x, y, z: x.gather(1, classes(x)[:, None].expand(-1, 2, -1)), SCATTER),
    "embedding_backward": (lambda x, y, z: F.embedding(torch.tensor([[1, 0], [2, 2]]), x[0]), SCATTER),
    "index_put": (lambda x, y, z: x[:, torch.tensor([1, -1, 1])], SCATTER),
    "cumsum": (lambda x, y, z: x.cumsum(1), SCAN),
    "prod": (lambda x, y, z: above(x).prod(1), SCAN),
    "sort": (lambda x, y, z: x.sort(1).values, SORT),
    "median": (lambda x, y, z: x.median(1).values, SORT),
}


def _spectral_trained() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 6, bias=False))


MODULES: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "weight_norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)), (5, 8)),
    "spectral_norm": lambda: (_spectral_trained(), (5, 8)),
    "spectral_norm_eval": lambda: (_spectral_trained().eval(), (5, 8)),
    "batch_norm": lambda: (nn.BatchNorm1d(6), (7, 6)),
    "batch_norm_eval": lambda: (nn.BatchNorm2d(3).eval(), (2, 3, 4, 5)),
    "batch_norm_2d": lambda: (nn.BatchNorm2d(3), (2, 3, 4, 5)),
    "instance_norm": lambda: (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (2, 3, 8)),
    "group_norm": lambda: (nn.GroupNorm(2, 6), (3, 6, 5)),
    "norms": lambda: (nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8), nn.LocalResponseNorm(3)), (2, 5, 8)),
    "attention": lambda: (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "recurrent": lambda: (_Recurrent(), (3, 4, 8)),
}


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            h = self.cell(step, h)
        return h
