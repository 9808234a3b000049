"""Trials of kernels in another process: what it answers, and how it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from megafuse.codegen.chain_program import ChainProgram
from megafuse.compiler import compile_call, dot_rule, trial
from megafuse.core.device import device_spec
from megafuse.fusion import planner
from megafuse.runtime.numpy_kernels import numpy_launcher

DEVICE = torch.device("cuda", 0)
# A child without a GPU: the kernel is what ``BODY`` makes of the program in NumPy.
CHILD = """
import os, sys, time
import megafuse.compiler.trial as trial
from megafuse.runtime.numpy_kernels import numpy_launcher
def tried(program, device):
    print("noise of a library")
    launch = numpy_launcher(trial.PRINTERS["numpy"](program))
    {body}
    return trial.disagreement(program, launch, trial.torch.device("cpu"))
trial._tried = tried
trial.main()
"""
SOUND = "pass"
WRONG = "launch = lambda *tensors, run=launch: (run(*tensors), tensors[-1].mul_(0.5))"
CRASH = "os.abort()"
RAISE = "raise RuntimeError('CUDA error: an illegal memory access was encountered')"
HANG = "time.sleep(600)"


@pytest.fixture(scope="module")
def program() -> ChainProgram:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "WORTH_CHAINING", -float("inf"))
        module = nn.Sequential(nn.Linear(128, 128), nn.Softplus(), nn.Linear(128, 128)).half().requires_grad_(False)
        x = torch.randn(40, 128, dtype=torch.float16)
        compiled = compile_call(module, (x,), {}, device_spec(90), dots=dot_rule("library"))
    (found,) = (p for p in compiled.programs if isinstance(p, ChainProgram))
    return found


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[trial.Trials]:
    made = trial.Trials()
    monkeypatch.setattr(trial, "TRIALS", made)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    monkeypatch.setenv("MEGAFUSE_CACHE_DIR", str(tmp_path))
    yield made
    made.close()


def answers(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(trial, "COMMAND", (sys.executable, "-c", CHILD.replace("{body}", body)))


def test_a_sound_kernel_is_tried_once_and_kept(trials, program, monkeypatch) -> None:
    answers(monkeypatch, SOUND)
    assert trial.fault_of([program], DEVICE) == ""
    answers(monkeypatch, CRASH)
    trials.close()
    assert trial.fault_of([program], DEVICE) == "", "not asked again"


def test_one_process_answers_many_questions(trials, program, monkeypatch) -> None:
    answers(monkeypatch, WRONG)
    first = trials.ask(program, DEVICE)
    child = trials._child
    assert "than the same program in NumPy" in first
    assert trials.ask(program, DEVICE) == first
    assert trials._child is child is not None


@pytest.mark.parametrize(("body", "said"), [(CRASH, "its process ended"), (RAISE, "an illegal memory access")])
def test_a_kernel_that_ends_its_process_is_refused_and_not_kept(trials, program, monkeypatch, body, said) -> None:
    answers(monkeypatch, body)
    fault = trial.fault_of([program], DEVICE)
    assert said in fault
    assert program.name in fault
    answers(monkeypatch, SOUND)
    assert trial.fault_of([program], DEVICE) == "", "the next trial has a process of its own"


def test_a_kernel_that_does_not_end_is_refused(trials, program, monkeypatch) -> None:
    answers(monkeypatch, HANG)
    monkeypatch.setattr(trial, "SECONDS", 8.0)
    start = time.monotonic()
    assert "could not be tried" in trial.fault_of([program], DEVICE)
    assert time.monotonic() - start < 60


def test_where_no_process_can_be_started_nothing_is_trusted(trials, program, monkeypatch) -> None:
    monkeypatch.setattr(trial, "COMMAND", ("/no/such/program",))
    assert "could not be tried" in trial.fault_of([program], DEVICE)


def test_the_process_ends_when_it_is_not_needed(trials, program, monkeypatch) -> None:
    answers(monkeypatch, SOUND)
    monkeypatch.setattr(trial, "IDLE_SECONDS", 0.1)
    assert trials.ask(program, DEVICE) == ""
    for _ in range(100):
        if trials._child is None:
            break
        time.sleep(0.05)
    assert trials._child is None
    assert trials.ask(program, DEVICE) == ""


def test_the_numpy_program_agrees_with_itself(program) -> None:
    run = numpy_launcher(trial.PRINTERS["numpy"](program))
    assert trial.disagreement(program, run, torch.device("cpu")) == ""
