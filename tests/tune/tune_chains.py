"""Small compiled steps with chains, for tests of their tiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from megafuse.compiler import Compiled, compile_call
from megafuse.compiler.engine import dot_rule
from megafuse.compiler.variants import Variant
from megafuse.core.device import DeviceSpec
from tune_helpers import DEVICE


def mlp(widths: list[int], *, bias: bool = False, activation: Callable[[], nn.Module] = nn.Softplus) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for k, n in itertools.pairwise(widths):
        layers += [nn.Linear(k, n, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def chained(
    module: nn.Module,
    rows: int,
    width: int,
    dtype: torch.dtype = torch.float16,
    *,
    train: bool = True,
    device: DeviceSpec = DEVICE,
    place: str = "cpu",
) -> Compiled:
    """A step with products in chains where these are predicted to be faster."""
    module = module.to(place, dtype).requires_grad_(train)
    x = torch.randn(rows, width, dtype=torch.float32).to(place, dtype).requires_grad_(train)
    return compile_call(module, (x,), {}, device, dots=dot_rule("library"))


CHAINS: dict[str, Callable[[], Compiled]] = {
    "square": lambda: chained(mlp([128] * 4), 4096, 128, place="meta"),
    "square forward": lambda: chained(mlp([128] * 4), 65536, 128, train=False, place="meta"),
    "few rows": lambda: chained(mlp([128] * 4), 256, 128, place="meta"),
    "many rows": lambda: chained(mlp([128] * 4), 1 << 20, 128, place="meta"),
    "five": lambda: chained(mlp([128] * 6, bias=True), 4096, 128, place="meta"),
    "small": lambda: chained(mlp([64, 64, 64], activation=nn.ReLU), 300, 64, torch.bfloat16),
    "ragged": lambda: chained(mlp([37, 100, 60, 3], bias=True, activation=nn.SiLU), 700, 37, torch.bfloat16),
    "tiny": lambda: chained(mlp([48, 64, 40, 24]), 50, 48, torch.float32),
}  # on the meta device: nothing can be run
RUN = ("small", "ragged", "tiny")


def by_form(rows: int, warps: int) -> Callable[[Variant], float]:
    """Chains are fastest at so many rows and warps."""

    def times(variant: Variant) -> float:
        tile = variant.tiles.chain
        return 1e-5 if tile is None else 1e-5 * (1 + abs(tile.num_warps - warps) + abs(tile.rows - rows) / rows)

    return times
