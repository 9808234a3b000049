"""MLPs over [B,D]: a tiny one, where only latency counts, and one with weight norm."""

from __future__ import annotations

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


TINY = size_table(batch=(16, 5, 16), dim=(48, 13, 48), first=(64, 11, 64), second=(40, 7, 40), out=(24, 3, 24))
NORMED = size_table(batch=(16, 7, 65536), dim=(16, 37, 128), hidden=(32, 50, 128), out=(16, 3, 128))
register(Workload("tiny_mlp", TinyMLP, normal(("batch", "dim")), TINY, "stranger"))
register(Workload("weight_norm_mlp", WeightNormMLP, normal(("batch", "dim")), NORMED, "stranger"))
