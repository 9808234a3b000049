"""The RankMixer block with a per-token gated FFN, in plain PyTorch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafuse.workloads.types import Workload, normal, register

BLOCK_SIZES = {
    "small": {"batch": 2, "tokens": 4, "dim": 16, "k": 2},
    "odd": {"batch": 3, "tokens": 7, "dim": 21, "k": 3},
    "gpu": {"batch": 1024, "tokens": 64, "dim": 1280, "k": 2},
}


def he_uniform(*shape: int) -> nn.Parameter:
    """A parameter uniform in [-sqrt(6/fan_in), sqrt(6/fan_in)], fan_in = product(shape[:-1])."""
    bound = math.sqrt(6.0 / math.prod(shape[:-1]))
    return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))


class OuterNorm(nn.Module):
    """LayerNorm over the last axis with gamma and beta [D] and epsilon 1e-3."""

    def __init__(self, dim: int, eps: float = 1e-3) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.dim,), self.gamma, self.beta, self.eps)


class RankMixerBlock(nn.Module):
    """RankMixer block, [B,T,D] -> [B,T,D], D % T == 0, H = k*D.

    out1 = norm1(mix(norm0(x)) + x); y = norm2(out1 + ffn(out1))
    ffn: (U,G) = split(x[:,t] @ w1[t] + b1[t]); (LN_x(U) * silu(LN_gate(G))) @ wout[t] + bout[t]
    """

    def __init__(self, tokens: int, dim: int, k: int) -> None:
        super().__init__()
        if dim % tokens:
            raise ValueError(f"dim ({dim}) must be a multiple of tokens ({tokens})")
        self.tokens, self.dim, self.hidden = tokens, dim, k * dim
        self.w1 = he_uniform(tokens, dim, 2 * self.hidden)
        self.b1 = he_uniform(tokens, 2 * self.hidden)
        self.wout = he_uniform(tokens, self.hidden, dim)
        self.bout = he_uniform(tokens, dim)
        self.norm0, self.norm1, self.norm2 = (self.outer_norm() for _ in range(3))
        self.norm_x = self.inner_norm()
        self.norm_gate = self.inner_norm()

    def outer_norm(self) -> nn.Module:
        return OuterNorm(self.dim)

    def inner_norm(self) -> nn.Module:
        return nn.LayerNorm(self.hidden, eps=1e-5)

    def token_mixer(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        return x.reshape(b, t, t, d // t).transpose(1, 2).reshape(b, t, d)

    def project_in(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self.w1).transpose(0, 1) + self.b1

    def project_out(self, hidden: Tensor) -> Tensor:
        return torch.bmm(hidden.transpose(0, 1), self.wout).transpose(0, 1) + self.bout

    def gate(self, z: Tensor) -> Tensor:
        u, g = torch.split(z, self.hidden, dim=-1)
        return self.norm_x(u) * F.silu(self.norm_gate(g))

    def dense_ffn_v2(self, x: Tensor) -> Tensor:
        return self.project_out(self.gate(self.project_in(x)))

    def forward(self, x: Tensor) -> Tensor:
        out1 = self.token_mixer(self.norm0(x))
        out1 = self.norm1(out1 + x)
        out2 = self.dense_ffn_v2(out1)
        return self.norm2(out1 + out2)


register(Workload("rank_mixer_block", RankMixerBlock, normal(("batch", "tokens", "dim")), BLOCK_SIZES, "block"))
