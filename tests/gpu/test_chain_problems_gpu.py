"""Chains with a matrix for each token on a GPU, right by the rule: ragged sizes, types, layouts, repeated runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafuse
from megafuse.api import engine_of
from megafuse.fusion import chain_search, planner
from megafuse.validate import check

pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
Activation = Callable[[Tensor], Tensor]
NETWORKS: dict[str, tuple[int, int, list[int], bool, Activation]] = {
    "square": (32, 2048, [128] * 3, False, F.softplus),
    "turned": (16, 100, [128] * 4, True, F.softplus),
    "narrow_tiles": (4, 40, [128] * 3, False, F.softplus),
    "shared": (4, 64, [64] * 4, False, F.silu),
    "ragged": (5, 333, [37, 100, 60, 3], True, F.silu),
    "tiny": (3, 5, [48, 64, 40, 24], True, F.relu),
    "columns": (7, 77, [5, 1, 9, 1], True, torch.tanh),
    "wide": (3, 700, [256, 200, 256], True, F.gelu),
    "many": (1000, 3, [64, 32, 64], True, F.relu),
    "two_waves": (100, 1000, [64] * 3, False, F.softplus),
    "many_rows": (2, 70001, [32, 64, 32], True, F.relu),
    "as_many": (64, 64, [64] * 3, True, F.softplus),
}


@pytest.fixture(autouse=True)
def _whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be a chain is one, though the library is predicted to be faster."""
    predicted = chain_search.chain_seconds
    monkeypatch.setattr(chain_search, "chain_seconds", lambda *given: predicted(*given) / 10)
    monkeypatch.setattr(planner, "WORTH_CHAINING", -math.inf)


class PerToken(nn.Module):
    """Layers with a matrix for each token, of ``[B, T, D]``, or of ``[T, B, D]`` where tokens come first."""

    def __init__(self, tokens: int, widths: list[int], bias: bool, activation: Activation, first: bool) -> None:
        super().__init__()
        edges = list(itertools.pairwise(widths))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(tokens, k, n) / math.sqrt(k)) for k, n in edges)
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(tokens, 1, n)) for _, n in edges if bias)
        self.activation, self.first = activation, first

    def forward(self, x: Tensor) -> Tensor:
        for number, weight in enumerate(self.weights):
            x = x if number == 0 else self.activation(x)
            rows = x if self.first else x.transpose(0, 1)
            rows = torch.baddbmm(self.biases[number], rows, weight) if self.biases else torch.bmm(rows, weight)
            x = rows if self.first else rows.transpose(0, 1)
        return x


def make(name: str, dtype: torch.dtype, first: bool = False) -> tuple[nn.Module, Tensor]:
    tokens, rows, widths, bias, activation = NETWORKS[name]
    torch.manual_seed(0)
    module = PerToken(tokens, widths, bias, activation, first).to("cuda", dtype)
    shape = (tokens, rows, widths[0]) if first else (rows, tokens, widths[0])
    return module, torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)


def chains(fused: object) -> int:
    """Chains of several problems, of all bindings."""
    made = [b.compiled for b in engine_of(fused).bindings if b.compiled is not None]
    return sum(chain.problems > 1 for c in made for chain in c.cover.chains)


@pytest.mark.parametrize("first", [False, True], ids=["rows first", "tokens first"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, dtype: str, first: bool) -> None:
    module, x = make(name, DTYPES[dtype], first)
    fused = megafuse.fuse(module, x, tune=False)
    wide = x.dtype is torch.float32 and max(NETWORKS[name][2]) > 64
    assert chains(fused) > 0 or wide, "wide fp32 is the library's"
    check(module, x, fused=fused).raise_if_failed()


@pytest.mark.parametrize("view", [lambda x: x[:, :, 3:40], lambda x: x[:, :1, :37].expand(-1, 5, -1)])
def test_inputs_are_read_by_strides(view: Callable[[Tensor], Tensor]) -> None:
    module, _ = make("ragged", torch.bfloat16)
    x = view(torch.randn(333, 5, 48, device="cuda", dtype=torch.bfloat16)).detach().requires_grad_()
    fused = megafuse.fuse(module, x, tune=False)
    assert chains(fused) > 0
    check(module, x, fused=fused).raise_if_failed()


def test_rows_that_are_not_numbers_stay_in_their_rows() -> None:
    module, x = make("ragged", torch.float16)
    with torch.no_grad():
        x[17, 2], x[18, 3, 3] = float("nan"), float("inf")
    fused = megafuse.fuse(module, x, tune=False)
    with torch.no_grad():
        got, want = fused(x), module(x)
    assert torch.equal(got.isfinite(), want.isfinite())
    assert int((~got.isfinite()).any(-1).sum()) <= 2


@pytest.mark.parametrize("name", ["square", "turned", "two_waves"])
def test_every_run_gives_the_same_bits(name: str) -> None:
    module, x = make(name, torch.float16)
    fused = megafuse.fuse(module, x, tune=False)
    upstream = torch.randn_like(module(x))
    runs = [torch.autograd.grad(fused(x), [x, *module.parameters()], upstream) for _ in range(4)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_tiles_are_tuned() -> None:
    module, x = make("square", torch.bfloat16)
    fused = megafuse.fuse(module, x, tune=True)
    assert chains(fused) > 0
    check(module, x, fused=fused).raise_if_failed()


def test_softmax_between_products_of_each_head() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v

    torch.manual_seed(0)
    q = torch.randn(4, 6, 100, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(4, 6, 120, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    fused = megafuse.fuse(attend, q, k, v, tune=False)
    assert chains(fused) > 0
    check(attend, q, k, v, fused=fused).raise_if_failed()
