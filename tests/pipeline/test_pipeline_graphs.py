"""``fuse(..., cuda_graph=True)`` from the user's call to gradients, with a recorder that needs no GPU."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafuse
from megafuse.api import engine_of
from megafuse.compiler import bound
from megafuse.runtime.graphs import Budget, GraphedStep
from megafuse.workloads.rank_mixer_block import RankMixerBlock

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from graph_fakes import FakeRecorder


class Normed(nn.Module):
    """A step that changes buffers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.norm(x))


class Two(nn.Module):
    """Two outputs, of which one may be all that is used."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x, -1), nn.functional.gelu(x)


MODULES = {
    "block": (lambda: RankMixerBlock(3, 6, 2), (5, 3, 6)),
    "batch norm": (Normed, (7, 6)),
    "two outputs": (Two, (7, 6)),
}


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[FakeRecorder]:
    made: list[FakeRecorder] = []

    def graphed(step: Any, budget: Budget) -> GraphedStep:
        made.append(FakeRecorder())
        return GraphedStep(step, made[-1], budget)

    monkeypatch.setattr(bound, "graphed", graphed)
    return made


def run(fn: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    """One step: outputs, gradients and buffers."""
    x = x.detach().requires_grad_()
    out = fn(x)
    outs = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(outs, [torch.cos(o.detach()) for o in outs])
    found = [*(o.detach() for o in outs), x.grad, *(p.grad for p in module.parameters()), *module.buffers()]
    kept = [t.clone() for t in found]
    module.zero_grad(set_to_none=True)
    return kept


@pytest.mark.parametrize("name", MODULES)
def test_replayed_steps_are_those_of_the_module(recorders: list[FakeRecorder], name: str) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make()
    other = copy.deepcopy(module)
    fused = megafuse.fuse(module, torch.randn(shape).requires_grad_(), target="interpret", cuda_graph=True)
    for x in [torch.randn(shape) for _ in range(6)]:  # all alive: none is where another was
        for found, expected in zip(run(fused, module, x), run(other, other, x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (recorder,) = recorders
    assert (recorder.recorded, recorder.replays) == (2, 8)


def test_each_shape_and_mode_has_its_graph(recorders: list[FakeRecorder]) -> None:
    module = nn.Sequential(nn.LayerNorm(6), nn.GELU())
    fused = megafuse.fuse(module, torch.randn(4, 6), target="interpret", cuda_graph=True)
    for x in [torch.randn(rows, 6) for rows in (4, 9, 4, 9, 4, 9, 4, 9)]:  # all alive: none is where another was
        torch.testing.assert_close(fused(x), plain(module, x))
        with torch.no_grad():
            torch.testing.assert_close(fused(x), plain(module, x))
    assert sorted(r.recorded for r in recorders) == [1, 1, 2, 2], "forward alone, or with backward, of two shapes"


def plain(module: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.gelu(nn.functional.layer_norm(x, (6,), module[0].weight, module[0].bias))


def test_the_option_goes_with_copies_and_pickles(recorders: list[FakeRecorder]) -> None:
    module = nn.Sequential(nn.LayerNorm(6), nn.GELU())
    fused = megafuse.fuse(module, torch.randn(4, 6), target="interpret", cuda_graph=True)
    for again in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert engine_of(again).options.cuda_graph
        assert engine_of(again).budget is not engine_of(fused).budget


def test_on_the_cpu_the_option_says_that_it_has_no_effect() -> None:
    module = nn.Sequential(nn.LayerNorm(6), nn.GELU())
    with pytest.warns(UserWarning, match="cuda_graph=True: the tensors are on the CPU"):
        fused = megafuse.fuse(module, torch.randn(4, 6), target="interpret", cuda_graph=True)
    x = torch.randn(4, 6)
    torch.testing.assert_close(fused(x), plain(module, x))
