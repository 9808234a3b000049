"""Chains are tried beside NumPy, and planned again where the assembler failed; without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megafuse.codegen.chain_program import ChainProgram
from megafuse.compiler import Compiled, compile_call, dot_rule, proof, trial
from megafuse.compiler.driver import PRINTERS
from megafuse.core.device import DeviceSpec, device_spec
from megafuse.fusion import planner
from megafuse.fusion.epilogue import DotRule
from megafuse.runtime.numpy_kernels import numpy_launcher

CPU, SPEC, RULE = torch.device("cpu"), device_spec(90), dot_rule("library")


def planned(depth: int, dtype: torch.dtype, *more: nn.Module) -> Callable[[DeviceSpec, DotRule], Compiled]:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(128, 128), nn.Softplus(), *more)]
    module = nn.Sequential(*layers).to(dtype)
    x = torch.randn(200, 128, dtype=dtype, requires_grad=True)
    return lambda spec, rule: compile_call(module, (x,), {}, spec, dots=rule)


@pytest.fixture(autouse=True)
def chains_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "WORTH_CHAINING", -float("inf"))


def chains_of(compiled: Compiled) -> list[ChainProgram]:
    return [p for p in compiled.programs if isinstance(p, ChainProgram)]


@pytest.mark.parametrize("depth", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_columns_that_are_wrong_are_found_in_any_result(depth: int, dtype: torch.dtype) -> None:
    chains = chains_of(planned(depth, dtype)(SPEC, RULE))
    assert [c.phases[0].row_tile for c in chains] == [16, 16]
    for program in chains:
        run = numpy_launcher(PRINTERS["numpy"](program))
        assert trial.disagreement(program, run, CPU) == ""
        drawn = trial.drawn_buffers(program)
        run(*drawn.values())
        for position, param in enumerate(program.params):
            if not param.written:
                continue
            values = drawn[param.name].float()
            assert values.isfinite().all() and values.norm() > 0, "a result that says nothing"
            for spoil in (lambda block: block.mul_(0.5), lambda block: block.fill_(torch.nan)):
                found = trial.disagreement(program, spoiled(run, position, spoil), CPU)
                assert f"another {param.name} than" in found


def spoiled(run: Callable[..., None], at: int, spoil: Callable[[Tensor], object]) -> Callable[..., None]:
    """A kernel whose result at a position is wrong in one of eight columns or so, as by a lost step of a product."""

    def launch(*tensors: Tensor) -> None:
        run(*tensors)
        spoil(tensors[at][: len(tensors[at]) // 128 * 128].view(-1, 128)[:, :16])

    return launch


def test_saved_statistics_are_numbers_that_can_be_ones() -> None:
    """A variance below zero makes all of backward NaN, and a comparison of NaN with NaN says nothing."""
    _, backward = chains_of(planned(3, torch.bfloat16, nn.LayerNorm(128))(SPEC, RULE))
    run = numpy_launcher(PRINTERS["numpy"](backward))
    assert trial.disagreement(backward, run, CPU) == ""
    for position, param in enumerate(backward.params):
        if param.written:
            found = trial.disagreement(backward, spoiled(run, position, lambda block: block.mul_(0.5)), CPU)
            assert f"another {param.name} than" in found


class Overflow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.exp() + 1) * 60000


def test_what_has_no_finite_results_counts_as_wrong() -> None:
    for program in chains_of(planned(2, torch.float16, Overflow())(SPEC, RULE)):
        run = numpy_launcher(PRINTERS["numpy"](program))
        assert "cannot be tried" in trial.disagreement(program, run, CPU)


@pytest.mark.parametrize("narrow", [True, False])
def test_kernels_with_narrow_tiles_are_tried(narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(assemble=lambda: "code")
    monkeypatch.setattr(proof, "cuda_kernel", lambda source: kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(trial, "fault_of", lambda kernels, device: " ".join(p.name for p, code in kernels))
    compiled = planned(2, torch.float16)(replace(SPEC, narrow_tiles=narrow), RULE)
    fault = proof.fault_of_chains(compiled, CPU)
    assert fault == (" ".join(p.name for p in chains_of(compiled)) if narrow else "")


def test_it_is_planned_again_until_the_assembler_makes_it_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = planned(2, torch.float16)
    for bad, tiles in itertools.zip_longest(((), (1,), (1, 2)), ([16, 16], [32, 64], [])):
        faults = iter([f"fault {n}" if n in bad else "" for n in (1, 2)])
        monkeypatch.setattr(proof, "fault_of_chains", lambda compiled, device, faults=faults: next(faults))
        compiled = proof.first_sound(compile_, SPEC, RULE, CPU)
        assert [p.phases[0].row_tile for p in chains_of(compiled)] == tiles
        said = [d for d in compiled.cover.decisions if d.startswith("planned again")]
        assert said == [f"planned again: fault {n}" for n in bad]
