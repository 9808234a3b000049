"""Modules and calls for the tests of programs that serve several sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megafuse.api import FusedFunction, engine_of
from megafuse.compiler import Engine, Options
from megafuse.validate import CheckOptions, check

FEW = CheckOptions(seeds=2, small_seeds=1, repeats=1)


class NormGate(nn.Module):
    """[..., D] -> [..., D]: a norm, two products, a gate and a residual; column sums in backward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(self.norm(x))))


class TokenMix(nn.Module):
    """[B, T, D] -> [B, T, D]: the batch stands inside the memory of the mixed value."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tokens, dim, dim) * dim**-0.5)
        self.scale = nn.Parameter(torch.rand(dim))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.bmm(x.transpose(0, 1).softmax(-1), self.weight)  # [T, B, D]
        return mixed.transpose(0, 1) * self.scale + x


class BatchLoss(nn.Module):
    """[B, D], [B] -> scalar: means over the batch, one of them back in every sample."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 3)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        y = nn.functional.silu(self.linear(x))
        y = y * (1 + y.mean(0, keepdim=True))
        return (y.square().sum(-1) * weight.square()).mean()


def rooted(x: Tensor, w: Tensor) -> Tensor:
    """Depends on the size in a way that cannot be written in it."""
    return torch.tanh(x * w) * x.shape[0] ** 0.5


def engine(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[Callable[..., Any], Engine]:
    """A function served through NumPy (unless told otherwise), and its engine."""
    callee = fn.forward if isinstance(fn, nn.Module) else fn
    made = FusedFunction(Engine(callee, Options(**{"target": "interpret", **options})))
    found = engine_of(made)
    found.bound(args, {})
    return made, found


def differences(fn: Callable[..., Any], fused: Callable[..., Any], inputs: Sequence[Tensor]) -> float:
    """Largest relative difference of outputs and gradients from eager ones (by input, in terms of its largest)."""
    leaves = [t for t in [*inputs, *(fn.parameters() if isinstance(fn, nn.Module) else ())] if t.requires_grad]
    out, want = fused(*inputs), fn(*inputs)
    tangent = torch.randn_like(want)
    pairs = [(out, want)]
    pairs += zip(torch.autograd.grad(out, leaves, tangent), torch.autograd.grad(want, leaves, tangent), strict=True)
    return max(distance(a, b) for a, b in pairs)


def distance(got: Tensor, want: Tensor) -> float:
    """Largest difference, in terms of the largest element."""
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = got.detach(), want.detach()
    return float((got - want).abs().max() / (want.abs().max() + 1e-30)) if want.numel() else 0.0


def check_few(fn: Callable[..., Any], *args: Any, fused: Any) -> None:
    """The acceptance rule with few seeds."""
    check(fn, *args, fused=fused, options=FEW).raise_if_failed()
