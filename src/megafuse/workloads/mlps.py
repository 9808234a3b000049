"""MLPs over [B,D]: a tiny one, where only latency counts, one with weight norm, and the stacks of larger models."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from megafuse.workloads.types import Workload, normal, register, size_table


class TinyMLP(nn.Module):
    """[B,D] -> [B,O]: relu(relu(x W1^T) W2^T) W3^T, no biases; a few rows of some dozens of features."""

    def __init__(self, dim: int, first: int, second: int, out: int) -> None:
        super().__init__()
        self.W1 = nn.Linear(dim, first, bias=False)
        self.W2 = nn.Linear(first, second, bias=False)
        self.W3 = nn.Linear(second, out, bias=False)

    def forward(self, h0: Tensor) -> Tensor:
        h1 = torch.relu(self.W1(h0))
        h2 = torch.relu(self.W2(h1))
        return self.W3(h2)


class WeightNormMLP(nn.Module):
    """[B,D] -> [B,O]: three layers with SiLU and biases; each weight is g v / ||v||, a norm for each output."""

    def __init__(self, dim: int, hidden: int, out: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            weight_norm(nn.Linear(dim, hidden)),
            nn.SiLU(),
            weight_norm(nn.Linear(hidden, hidden // 2)),
            nn.SiLU(),
            weight_norm(nn.Linear(hidden // 2, out)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class NormStack(nn.Module):
    """[B,D] -> [B,D]: two layers of gelu(LN(x W^T + b))."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        layers = [layer for _ in range(2) for layer in (nn.Linear(dim, dim), nn.LayerNorm(dim), nn.GELU())]
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class RankingMLPs(nn.Module):
    """The MLPs of a DLRM: [B,D] -> [B,E] of the dense features, then, beside F fields [B,F,E], [B,(F+1)E] -> [B,1]."""

    def __init__(self, dim: int, fields: int, embed: int, hidden: int) -> None:
        super().__init__()
        self.bottom = self._mlp(dim, hidden, hidden // 2, embed)
        self.top = self._mlp((fields + 1) * embed, 2 * hidden, 2 * hidden, hidden, hidden // 2, 1)[:-1]

    @staticmethod
    def _mlp(*widths: int) -> nn.Sequential:
        pairs = itertools.pairwise(widths)
        return nn.Sequential(*(layer for k, n in pairs for layer in (nn.Linear(k, n), nn.ReLU())))

    def forward(self, x: Tensor, fields: Tensor) -> Tensor:
        return self.top(torch.cat([self.bottom(x), fields.flatten(1)], 1))


class GatedFFN(nn.Module):
    """The feed-forward block of a Llama, [B,D] -> [B,D]: x + (silu(n W1^T) * (n W3^T)) W2^T, n = RMSNorm(x)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.w2(nn.functional.silu(self.w1(n)) * self.w3(n))


def _norm(dim: int) -> nn.Module:
    """A layer norm alone, [B,D] -> [B,D]."""
    return nn.LayerNorm(dim)


TINY = size_table(batch=(16, 5, 16), dim=(48, 13, 48), first=(64, 11, 64), second=(40, 7, 40), out=(24, 3, 24))
NORMED = size_table(batch=(16, 7, 65536), dim=(16, 37, 128), hidden=(32, 50, 128), out=(16, 3, 128))
register(Workload("tiny_mlp", TinyMLP, normal(("batch", "dim")), TINY, "stranger"))
register(Workload("weight_norm_mlp", WeightNormMLP, normal(("batch", "dim")), NORMED, "stranger"))
STACK = size_table(batch=(8, 5, 4096), dim=(32, 27, 4096))
ROWS = size_table(batch=(16, 7, 65536), dim=(64, 77, 1280))
RANKING = size_table(batch=(8, 5, 65536), dim=(13, 11, 13), fields=(4, 3, 26), embed=(8, 7, 64), hidden=(32, 22, 512))
LLAMA = size_table(batch=(8, 5, 4096), dim=(32, 27, 4096), hidden=(64, 53, 14336))
register(Workload("norm_gelu_stack", NormStack, normal(("batch", "dim")), STACK, "stranger"))
register(Workload("layer_norm", _norm, normal(("batch", "dim")), ROWS, "stranger"))
register(
    Workload("ranking_mlps", RankingMLPs, normal(("batch", "dim"), ("batch", "fields", "embed")), RANKING, "stranger")
)
register(Workload("llama_ffn", GatedFFN, normal(("batch", "dim")), LLAMA, "stranger"))
