"""Modules and comparisons that the tests of PyTorch's ordinary life share. Importable, so that they can be pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import megafuse


class Net(nn.Module):
    """[B, 6] -> [B, 6]: LN(x + W2 silu(W1 x + b1)) with a scale from a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(6, 9), nn.Linear(9, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.w2(F.silu(self.w1(x))) * self.scale)


def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> Net:
    """A seeded ``Net``."""
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(rows: int = 5, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """A seeded leaf input [rows, 6] that requires grad."""
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.requires_grad_()


def fused_net(dtype: torch.dtype = torch.float32) -> tuple[Net, Net, Tensor]:
    """A module, its fused twin and an input."""
    module, x = net(dtype), batch(dtype=dtype)
    return module, megafuse.fuse(module, x, target="interpret"), x


def close(found: Any, wanted: Any, loose: bool = False) -> None:
    """Trees of tensors agree to fp32 rounding, or (``loose``) to that of 16-bit values."""
    ours, theirs = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
    assert len(ours) == len(theirs)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if loose else {"rtol": 1e-4, "atol": 1e-5}
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, **tolerance)
        else:
            assert a == b


def results(fn: Callable[..., Any], module: nn.Module, x: Tensor, *more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """``fn(x)`` and the gradients of ``module``'s parameters and ``x``, left as they were before."""
    given = x.detach().clone().requires_grad_(x.requires_grad)
    out = fn(given, *more)
    names, targets = zip(*[("x", given), *module.named_parameters()], strict=True)
    kept = [(n, t) for n, t in zip(names, targets, strict=True) if t.requires_grad]
    grads = torch.autograd.grad(out.float().sin().sum(), [t for _, t in kept], allow_unused=True)
    return out.detach(), {n: g for (n, _), g in zip(kept, grads, strict=True) if g is not None}
