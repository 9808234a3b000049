"""Kernels that are launched while the one before still runs: the same bits as one after the other, over many launches.

Each kernel reads what other programs of the one before have written, and buffers are used again two launches later, so
that a kernel that did not wait would read too early or write over what is still read.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import megafuse
from megafuse.runtime import early, shim
from megafuse.workloads.rank_mixer_block import RankMixerBlock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CALLS, REPLAYS = 40, 100
SHAPES = [(64, 96), (1000, 128), (8192, 256)]


class Rolled(nn.Module):
    """A norm whose rows go to the other half of the programs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) * 1.25 + x.tanh()
        return torch.cat((y[y.shape[0] // 2 :], y[: y.shape[0] // 2]))


class Products(nn.Module):
    """Chains, their sums over rows, and the kernels that add these up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width), nn.LayerNorm(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + x


@pytest.fixture(params=[True, False], ids=["early", "serial"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Whether kernels are launched early; at the end, whether those compiled in the test were."""
    if request.param:
        monkeypatch.delenv(early.OFF_ENV, raising=False)
    else:
        monkeypatch.setenv(early.OFF_ENV, "1")
    seen: list[bool] = []
    bind = shim.bind

    def noted(compiled, kernel, source):
        seen.append(bool(getattr(compiled.metadata, "launch_pdl", False)))
        return bind(compiled, kernel, source)

    monkeypatch.setattr(shim, "bind", noted)
    yield request.param
    known = torch.cuda.get_device_capability() >= (9, 0) and shim.triton_version() >= early.TRITON_SINCE
    known = known and early._driver() >= early.DRIVER_SINCE
    assert seen and set(seen) == {bool(known and request.param)}


def draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=rng, device="cuda").to(dtype)


def compare(module: nn.Module, work: Callable[[nn.Module, Tensor], list[Tensor]], xs: list[Tensor], patch) -> None:
    """``work`` without a graph, and by one that is replayed on one input after the other, beside serial launches."""

    def every() -> tuple[nn.Module, list[Tensor]]:
        fused = megafuse.fuse(module, xs[0], tune=False)
        return fused, [t for x in xs for t in work(fused, x)]

    with patch.context() as serial:
        serial.setenv(early.OFF_ENV, "1")
        serial.setattr(shim, "bind", lambda compiled, kernel, source: None)
        _, expected = every()
    fused, plain = every()
    assert all(torch.equal(a, b) for a, b in zip(plain, expected, strict=True)), "without a graph"
    given = xs[0].detach().clone().requires_grad_(xs[0].requires_grad)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work(fused, given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work(fused, given)
    found = []
    for replay in range(REPLAYS):
        with torch.no_grad():
            given.copy_(xs[replay % len(xs)])
        graph.replay()
        found.append([t.clone() for t in made])
    torch.cuda.synchronize()
    for replay, tensors in enumerate(found):
        at = replay % len(xs) * len(tensors)
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected[at : at + len(tensors)], strict=True)), replay


def forwards(fused: nn.Module, x: Tensor) -> list[Tensor]:
    """Many calls, each on the result of the one before."""
    with torch.no_grad():
        for _ in range(CALLS):
            x = fused(x)
    return [x]


def steps(fused: nn.Module, x: Tensor) -> list[Tensor]:
    """Some calls and their gradients."""
    y = x
    for _ in range(CALLS // 8):
        y = fused(y)
    return [y.detach(), *torch.autograd.grad(y.float().square().mean(), [x, *fused.parameters()])]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [Rolled, Products])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_one_on_the_other(launched, kind, shape, dtype, monkeypatch) -> None:
    torch.manual_seed(0)
    module = kind(shape[1]).to("cuda", dtype).requires_grad_(False)
    compare(module, forwards, [draw(seed, shape, dtype) for seed in range(4)], monkeypatch)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [Rolled, Products])
def test_training(launched, kind, shape, monkeypatch) -> None:
    torch.manual_seed(0)
    module = kind(shape[1]).to("cuda", torch.bfloat16)
    xs = [draw(seed, shape, torch.bfloat16).requires_grad_() for seed in range(4)]
    compare(module, steps, xs, monkeypatch)


@pytest.mark.parametrize("dots", ["library", "auto"])
def test_beside_products_of_the_library(launched, dots, monkeypatch) -> None:
    torch.manual_seed(0)
    module = RankMixerBlock(16, 128, 2).to("cuda", torch.bfloat16)
    xs = [draw(seed, (64, 16, 128), torch.bfloat16).requires_grad_() for seed in range(4)]
    fuse = megafuse.fuse
    monkeypatch.setattr(megafuse, "fuse", lambda *args, **options: fuse(*args, dots=dots, **options))
    compare(module, steps, xs, monkeypatch)
