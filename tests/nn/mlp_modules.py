"""Plain equivalents of the ready modules, and inputs for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


def plain_mlp(
    widths: Sequence[int], activation: type[nn.Module] = nn.Softplus, *, bias: bool = True, norm: bool = False
) -> nn.Sequential:
    """What a user writes without megafuse."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        linear = nn.Linear(before, after, bias=bias)
        layers += [weight_norm(linear) if norm else linear, activation()]
    return nn.Sequential(*layers[:-1])


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad)
