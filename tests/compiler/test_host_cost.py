"""What a training step costs the host, in things that can be counted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafuse
from megafuse.api import engine_of
from megafuse.compiler import Bound
from megafuse.runtime import autograd


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(128, 128, bias=False), nn.Softplus())]
    return nn.Sequential(*layers[:-1]).half()


def bound_of(fused: Any, *args: Any) -> Bound:
    bound: Bound = engine_of(fused).bound(args, {})
    assert bound.spec is not None
    return bound


@pytest.fixture(scope="module")
def fused() -> tuple[Any, Tensor]:
    x = torch.randn(256, 128).half().requires_grad_()
    return megafuse.fuse(mlp(), x, target="interpret"), x


def test_allocations_of_a_small_step(fused: tuple[Any, Tensor]) -> None:
    spec = bound_of(*fused).spec
    assert spec is not None
    _, forward, backward = re.split(r"^def ", spec.step.artifact.host.text, flags=re.MULTILINE)
    assert forward.count("= empty(") == 2, "the output, and what is saved"
    assert backward.count("= empty(") == 5, "four gradients, and the partial sums of three as one"


def test_a_call_under_grad_mode_is_recorded_without_asking_again(fused: tuple[Any, Tensor]) -> None:
    assert bound_of(*fused).run is autograd.record
    with torch.no_grad():
        assert bound_of(*fused).run is autograd.apply


def test_calls_leave_no_more_on_their_nodes_than_they_need(fused: tuple[Any, Tensor]) -> None:
    module, x = fused
    spec, aside = module(x).grad_fn.call
    assert (spec, aside) == (bound_of(module, x).spec, None)
    plus = megafuse.fuse(lambda a, b: (a + b).exp(), x, x, target="interpret")
    *_, aside = plus(x, x.detach()).grad_fn.call
    assert aside is not None and len(aside.others) == 2, "inputs that are not saved, for double backward"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, aside = module(x).grad_fn.call
    assert aside is not None and aside.autocast is not torch._C._DisableAutocast


def test_a_changed_input_runs_the_step_that_writes_it_back() -> None:
    def step(x: Tensor, total: Tensor) -> Tensor:
        y = x.exp()
        total.add_(y.detach().sum())
        return y

    x, total = torch.randn(8, 16, requires_grad=True), torch.zeros(())
    changing = megafuse.fuse(step, x, total, target="interpret")
    bound = bound_of(changing, x, total)
    assert bound.spec is not None and bound.spec.mutations and bound.run is autograd.apply
