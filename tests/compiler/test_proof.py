"""Chains are tried beside NumPy, and planned again where the assembler failed; without a GPU."""

from __future__ import annotations

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


@pytest.fixture
def assembled(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the assembler makes of each kernel; kernels that are to be tried are faults, by name."""
    made = SimpleNamespace(code="code", shared=0, spills=lambda: 0)
    monkeypatch.setattr(proof, "cuda_kernel", lambda source: SimpleNamespace(assemble=lambda: made))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(trial, "fault_of", lambda kernels, device: " ".join(p.name for p, code in kernels))
    return made


@pytest.mark.parametrize("narrow", [True, False])
def test_kernels_with_narrow_tiles_are_tried(narrow: bool, assembled: SimpleNamespace) -> None:
    compiled = planned(2, torch.float16)(replace(SPEC, narrow_tiles=narrow), RULE)
    fault = proof.fault_of_chains(compiled, CPU)
    assert fault == (" ".join(p.name for p in chains_of(compiled)) if narrow else "")


def test_kernels_that_take_too_much_are_faulty(assembled: SimpleNamespace) -> None:
    """Shared memory at any time; registers where matrices are loaded first, for which there is another plan."""
    compile_ = planned(2, torch.float16)
    loads, not_ = (compile_(replace(SPEC, narrow_tiles=False, loads_first=first), RULE) for first in (True, False))
    assert any(p.first for p in chains_of(loads)) and not any(p.first for p in chains_of(not_))
    assembled.spills = lambda: 8
    assert "loads matrices first and spills 8 bytes" in proof.fault_of_chains(loads, CPU)
    assert proof.fault_of_chains(not_, CPU) == ""
    assembled.shared = SPEC.shared_per_block + 1
    assert f"takes {SPEC.shared_per_block + 1} bytes of shared memory" in proof.fault_of_chains(not_, CPU)


@pytest.mark.parametrize("loads_first", [True, False])
def test_it_is_planned_again_until_the_assembler_makes_it_right(
    loads_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First without matrices that are loaded first, where there are any: their tiles stay as they are."""
    compile_, spec = planned(2, torch.float16), replace(SPEC, loads_first=loads_first)
    plans = [([16, 16], True)] * loads_first + [([16, 16], False), ([32, 64], False), ([], False)]
    for bad, (tiles, first) in enumerate(plans):
        faults = iter([*(f"fault {n}" for n in range(bad)), ""])
        monkeypatch.setattr(proof, "fault_of_chains", lambda compiled, device, faults=faults: next(faults))
        compiled = proof.first_sound(compile_, spec, RULE, CPU)
        assert [p.row_tile for p in chains_of(compiled)] == tiles
        assert any(p.first for p in chains_of(compiled)) is first
        said = [d for d in compiled.cover.decisions if d.startswith("planned again")]
        assert said == [f"planned again: fault {n}" for n in range(bad)]
