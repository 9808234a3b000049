"""Modules with weight norm fuse as they are: both of PyTorch's kinds, along any axis, forward and backward."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import megafuse
from megafuse.api import engine_of
from megafuse.nn import MLP
from megafuse.validate import CheckOptions
from mlp_modules import rows

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
QUICK = CheckOptions(small_seeds=0, repeats=1)
KINDS: dict[str, Callable[..., nn.Module]] = {
    "older": nn.utils.weight_norm,
    "parametrized": parametrizations.weight_norm,
}


def normed(norm: Callable[[nn.Module], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Four layers of different widths, one of them without the norm and one without bias."""
    torch.manual_seed(4)
    return nn.Sequential(
        norm(nn.Linear(7, 12)),
        nn.Softplus(),
        norm(nn.Linear(12, 33, bias=False)),
        nn.Tanh(),
        nn.Linear(33, 5),
        nn.SiLU(),
        norm(nn.Linear(5, 2)),
    ).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_kinds_fuse_as_they_are(kind: str, dtype: torch.dtype) -> None:
    net = normed(KINDS[kind], dtype)
    x = rows(40, 7, dtype=dtype)
    fused = megafuse.fuse(net, x, target="interpret", strict=True)
    plan = next(iter(megafuse.explain(fused)))
    assert plan.kernels
    assert not plan.opaque
    report = megafuse.check(net, x, fused=fused, options=QUICK)
    assert report.ok, str(report)


@pytest.mark.parametrize("dim", [1, None])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_along_other_axes(kind: str, dim: int | None) -> None:
    net, x = normed(partial(KINDS[kind], dim=dim)), rows(40, 7)
    fused = megafuse.fuse(net, x, target="interpret", strict=True)
    report = megafuse.check(net, x, fused=fused, options=QUICK)
    assert report.ok, str(report)


def test_a_frozen_direction_gets_no_gradient() -> None:
    module = MLP([7, 12, 3], weight_norm=True, target="interpret", strict=True)
    module[0].parametrizations.weight.original1.requires_grad_(False)
    module(rows(6, 7)).sum().backward()
    magnitude, direction = module[0].parametrizations.weight.original0, module[0].parametrizations.weight.original1
    assert direction.grad is None
    assert magnitude.grad is not None


def test_training_steps_follow_the_plain_module() -> None:
    net = normed(parametrizations.weight_norm)
    fused_net = copy.deepcopy(net)
    fused = megafuse.fuse(fused_net, rows(16, 7), target="interpret", strict=True)
    for model, call in ((net, net), (fused_net, fused)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            call(rows(16, 7, seed=seed)).square().mean().backward()
            optimizer.step()
    for (name, ours), theirs in zip(fused_net.named_parameters(), net.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6), name


def launches(fused: nn.Module) -> list[tuple[bool, int]]:
    """For each launch: whether it normalises a matrix (or does the norm's backward), and how many parts it has."""
    (binding,) = engine_of(fused).bindings
    kernels = binding.compiled.step.kernels
    directions = ("original1", "weight_v")
    return [(any(name.endswith(directions) for name in k.reads), len(k.phases) if k.apart else 1) for k in kernels]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_matrices_are_normalised_together(kind: str, dtype: torch.dtype, depth: int) -> None:
    torch.manual_seed(5)
    widths = [40 + 8 * (n % 3) for n in range(depth + 1)]
    layers = [KINDS[kind](nn.Linear(k, n, bias=False)) for k, n in itertools.pairwise(widths)]
    net = nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh()))).to(dtype)
    x = rows(256, widths[0], dtype=dtype)
    fused = megafuse.fuse(net, x, target="interpret", strict=True)
    normed = [parts for reads, parts in launches(fused) if reads]
    if depth == 3:
        assert normed == [3, 3]
    else:  # more would take long to compile
        assert normed == [16, 14, 16, 14]
    report = megafuse.check(net, x, fused=fused, options=QUICK)
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_matrices_that_the_library_multiplies_share_launches_too(kind: str) -> None:
    net, x = normed(KINDS[kind]), rows(40, 7)
    fused = megafuse.fuse(net, x, target="interpret", strict=True)
    found = launches(fused)
    assert found[0] == (True, 3)
    assert sum(parts for reads, parts in found if reads) > sum(reads for reads, _ in found)
    report = megafuse.check(net, x, fused=fused, options=QUICK)
    assert report.ok, str(report)
