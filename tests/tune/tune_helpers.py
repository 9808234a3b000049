"""Small compiled steps, and benches whose times are made up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megafuse.compiler import Compiled, compile_call
from megafuse.compiler.variants import Subject, Variant, subjects
from megafuse.core.device import device_spec
from megafuse.tune.bench import Bench
from megafuse.workloads.rank_mixer_block import RankMixerBlock

DEVICE = device_spec(90)


class Norms(nn.Module):
    """A layer norm with weights, and a gate: row reductions, column sums, finishers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return nn.functional.silu(self.norm(x)) * x


class Wide(nn.Module):
    """Rows too wide for registers: columns are walked in blocks."""

    def forward(self, x):
        return torch.softmax(x.float(), -1).to(x.dtype)


class Plain(nn.Module):
    """No reduction in forward; a column sum in backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return nn.functional.gelu(x + self.bias)


def compiled_of(module: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> Compiled:
    torch.manual_seed(0)
    x = torch.randn(*shape, dtype=dtype, requires_grad=True)
    return compile_call(module.to(dtype), (x,), {}, DEVICE)


CASES: dict[str, Callable[[], Compiled]] = {
    "norms": lambda: compiled_of(Norms(96), 150, 96),
    "norms bf16": lambda: compiled_of(Norms(160), 150, 160, dtype=torch.bfloat16),
    "odd norms": lambda: compiled_of(Norms(331), 67, 331),
    "wide": lambda: compiled_of(Wide(), 2, 40001, dtype=torch.bfloat16),
    "plain": lambda: compiled_of(Plain(300), 120, 300, dtype=torch.float16),
    "double": lambda: compiled_of(Norms(64), 100, 64, dtype=torch.float64),
    "block": lambda: compiled_of(RankMixerBlock(4, 16, 2), 6, 4, 16, dtype=torch.bfloat16),
}


def subject_of(compiled: Compiled, *, summed: bool = False) -> Subject:
    """The first kernel, or the first that leaves partial sums."""
    found = subjects(compiled.step)
    if not summed:
        return found[0]
    finished = {s.finishes for s in found}
    return next(s for s in found if s.key in finished)


def bench_with(times: Callable[[Variant], float]) -> Bench:
    """The CPU, through the NumPy printer; seconds by ``times``."""
    return Bench(torch.device("cpu"), "numpy", lambda variant, work, samples: times(variant))


def by_distance(warps: int, rows: int) -> Callable[[Variant], float]:
    """Fastest at so many warps and rows."""

    def times(variant: Variant) -> float:
        tile = variant.tiles.tiles[0]
        return 1e-5 * (1 + abs(variant.tiles.num_warps - warps) + abs(tile.row_tile - rows) / rows)

    return times
