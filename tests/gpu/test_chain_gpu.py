"""Chains of products on a GPU, right by the rule: ragged widths and rows, all types, repeated runs, rows of NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import megafuse
from megafuse.api import engine_of
from megafuse.core.device import DeviceSpec
from megafuse.fusion import chain_search, planner
from megafuse.ir.chain import only_sums
from megafuse.runtime.shim import triton_version
from megafuse.schedule import chains as chain_schedule
from megafuse.schedule.chain_tile import ChainTile
from megafuse.schedule.chain_tiling import ChainRequest
from megafuse.schedule.types import DotCall
from megafuse.validate import check

pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
Shape = tuple[int, ...]
NETWORKS: dict[str, tuple[list[int], bool, Callable[[], nn.Module], Shape]] = {
    "square": ([128] * 4, False, nn.Softplus, (4096,)),
    "deep": ([128] * 6, True, nn.Softplus, (513,)),
    "ragged": ([37, 100, 60, 3], True, nn.SiLU, (1000,)),
    "tiny": ([48, 64, 40, 24], False, nn.ReLU, (16,)),
    "narrow": ([5, 1, 9, 1], True, nn.Tanh, (77,)),
    "wide": ([256, 200, 256], True, nn.GELU, (700,)),
    "batched": ([64, 64, 64], True, nn.ELU, (3, 7, 33)),
    "many_rows": ([32, 64, 32], True, nn.ReLU, (70001,)),
    "sums_alone": ([128] * 4, True, nn.Softplus, (20001,)),
    "sums_of_whole_tiles": ([64, 128, 128, 72], True, nn.ReLU, (65536,)),
    "few_rows": ([128] * 4, False, nn.Softplus, (2,)),
    "thirty": ([64] * 31, False, nn.Tanh, (256,)),
}


@pytest.fixture(autouse=True)
def _whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be a chain is one, though the library is predicted to be faster."""
    predicted = chain_search.chain_seconds
    monkeypatch.setattr(chain_search, "chain_seconds", lambda *given: predicted(*given) / 10)
    monkeypatch.setattr(planner, "WORTH_CHAINING", -math.inf)


@pytest.fixture
def tf32(request: pytest.FixtureRequest) -> Iterator[None]:
    """TF32 as the case's dtype says."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.node.callspec.params.get("dtype") == "tf32"
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def network(widths: list[int], bias: bool, activation: Callable[[], nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for k, n in itertools.pairwise(widths):
        layers += [nn.Linear(k, n, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def make(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    widths, bias, activation, rows = NETWORKS[name]
    torch.manual_seed(0)
    module = network(widths, bias, activation).to("cuda", dtype)
    with torch.no_grad():
        for layer in module:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(math.sqrt(3))  # default initialisation lets the signal of thirty layers die out
    return module, torch.randn(*rows, widths[0], device="cuda", dtype=dtype, requires_grad=True)


def chains(fused: object) -> int:
    """Chains of all bindings."""
    made = [b.compiled for b in engine_of(fused).bindings if b.compiled is not None]
    return sum(k.chain is not None for c in made for k in c.step.kernels)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, dtype: str) -> None:
    module, x = make(name, DTYPES[dtype])
    fused = megafuse.fuse(module, x, tune=False)
    assert chains(fused) > 0 or (x.dtype is torch.float32 and max(NETWORKS[name][0]) > 64), "wide fp32 is the library's"
    check(module, x, fused=fused).raise_if_failed()


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_between_layers(norm: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(1)
    layers = [nn.Linear(96, 128), norm(128), nn.SiLU(), nn.Linear(128, 128), norm(128), nn.SiLU(), nn.Linear(128, 40)]
    module = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    x = torch.randn(1111, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    fused = megafuse.fuse(module, x, tune=False)
    assert chains(fused) > 0
    check(module, x, fused=fused).raise_if_failed()


def test_rows_that_are_not_numbers_stay_in_their_rows() -> None:
    module, x = make("ragged", torch.float16)
    with torch.no_grad():
        x[17], x[18, 3] = float("nan"), float("inf")
    fused = megafuse.fuse(module, x, tune=False)
    with torch.no_grad():
        got, want = fused(x), module(x)
    assert torch.equal(got.isfinite(), want.isfinite())
    assert int((~got.isfinite()).any(1).sum()) <= 2


@pytest.mark.parametrize("name", ["deep", "sums_alone", "sums_of_whole_tiles"])
def test_every_run_gives_the_same_bits(name: str) -> None:
    module, x = make(name, torch.float16)
    fused = megafuse.fuse(module, x, tune=False)
    upstream = torch.randn_like(module(x))
    runs = [torch.autograd.grad(fused(x), [x, *module.parameters()], upstream) for _ in range(4)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_that_a_chain_leaves_out_need_no_library(dtype: torch.dtype) -> None:
    module, x = make("sums_alone", dtype)
    fused = megafuse.fuse(module, x, tune=False)
    (made,) = [b.compiled for b in engine_of(fused).bindings if b.compiled is not None]
    assert any(only_sums(c) for c in made.cover.chains)
    assert not any(isinstance(c, DotCall) for c in made.step.backward)
    check(module, x, fused=fused).raise_if_failed()


def test_steps_are_captured_by_cuda_graphs() -> None:
    module, x = make("square", torch.float16)
    fused = megafuse.fuse(module, x, tune=False)
    with torch.no_grad():
        for _ in range(2):
            want = fused(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = fused(x)
        got.zero_()
        graph.replay()
    assert torch.equal(got, want)


@pytest.mark.parametrize(("rows", "chunk"), [(16, 64), (32, 32)])
def test_tiles_that_ptxas_spoils_are_refused_and_the_process_goes_on(
    rows: int, chunk: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Narrow tiles of four warps: with ptxas 12.8 such a kernel left its memory, and nothing could be seen of it."""
    monkeypatch.setenv("MEGAFUSE_CACHE_DIR", str(tmp_path))
    choose = chain_schedule.choose_chain_tile

    def forced(request: ChainRequest, device: DeviceSpec) -> ChainTile:
        tile = choose(request, device)
        if not (device.narrow_tiles and request.sums and request.turns):
            return tile
        return replace(tile, rows=rows, rows_per_chunk=chunk, num_warps=4, turned=True, early=False, first=0, shares=1)

    monkeypatch.setattr(chain_schedule, "choose_chain_tile", forced)
    x = torch.randn(8192, 128, device="cuda", dtype=torch.float16, requires_grad=True)
    module = network([128, 128, 128, 128], False, nn.Softplus).to("cuda", torch.float16)
    fused = megafuse.fuse(module, x, tune=False)
    refused = "planned again: kernel" in str(megafuse.explain(fused))
    tried = list((tmp_path / "trials").glob("*")) if (tmp_path / "trials").exists() else []
    assert refused or tried, "the tiles were not asked for"
    assert refused or triton_version() != (3, 6), "ptxas 12.8 spoils these"
    check(module, x, fused=fused).raise_if_failed()
    torch.cuda.synchronize()
