"""Trials of kernels in another process: what it answers, how it is started and how it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megafuse.codegen.chain_program import ChainProgram
from megafuse.compiler import compile_call, dot_rule, trial
from megafuse.core.device import device_spec
from megafuse.fusion import planner
from megafuse.runtime import cachedir
from megafuse.runtime.numpy_kernels import numpy_launcher

CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0)
# A child without a GPU: the kernel is what ``BODY`` makes of the program in NumPy.
CHILD = """
import os, sys, time
sys.path[:] = {path!r}
import megafuse.compiler.trial as trial
def tried(program, code, device):
    print("noise of a library")
    launch = numpy = trial.numpy_launcher(trial.PRINTERS["numpy"](program))
    {body}
    return trial.disagreement(program, launch, trial.torch.device("cpu"))
trial.tried = tried
trial._gpu = lambda device: "no GPU"
trial.main()
"""
SOUND = "pass"
WRONG = "launch = lambda *tensors: (numpy(*tensors), tensors[-1].mul_(0.5))"
SECOND_WRONG = "launch = (lambda *tensors: None) if code == 'b' else numpy"
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


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trial, "_gpu", lambda device: "no GPU")
    monkeypatch.setenv("MEGAFUSE_CACHE_DIR", str(tmp_path))


def answers(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(trial, "_CODE", CHILD.replace("{body}", body))


def test_a_sound_kernel_is_tried_once_and_kept_under_its_machine_code(program, monkeypatch) -> None:
    answers(monkeypatch, SOUND)
    assert trial.fault_of([(program, "a"), (program, "b")], DEVICE) == ""
    answers(monkeypatch, CRASH)
    assert trial.fault_of([(program, "a")], DEVICE) == "", "not asked again"
    assert trial.fault_of([(program, "other machine code")], DEVICE) != ""


def test_each_kernel_has_its_own_answer(program, monkeypatch) -> None:
    answers(monkeypatch, SECOND_WRONG)
    assert "than the same program in NumPy" in trial.fault_of([(program, "a"), (program, "b")], DEVICE)
    answers(monkeypatch, CRASH)
    assert trial.fault_of([(program, "a")], DEVICE) == ""
    assert trial.fault_of([(program, "b")], DEVICE) != "", "what is wrong is not kept"


@pytest.mark.parametrize(("body", "said"), [(WRONG, "in NumPy"), (CRASH, "status -6"), (RAISE, "an illegal memory")])
def test_a_kernel_that_ends_its_process_is_refused(program, monkeypatch, body, said) -> None:
    answers(monkeypatch, body)
    fault = trial.fault_of([(program, "a")], DEVICE)
    assert said in fault
    assert program.name in fault


def test_a_kernel_that_does_not_end_is_refused(program, monkeypatch) -> None:
    answers(monkeypatch, HANG)
    monkeypatch.setattr(trial, "SECONDS", 6.0)
    start = time.monotonic()
    assert "took more than 6 s" in trial.fault_of([(program, "a")], DEVICE)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("executable", [None, "", "/no/such/program"])
def test_where_no_process_can_be_started_nothing_is_trusted(program, monkeypatch, executable) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert "could not be tried" in trial.fault_of([(program, "a")], DEVICE)


def test_a_child_has_no_children(program, monkeypatch) -> None:
    answers(monkeypatch, SOUND)
    monkeypatch.setenv(trial.CHILD_ENV, "1")
    assert "could not be tried" in trial.fault_of([(program, "a")], DEVICE)


def test_what_is_kept_and_cannot_be_read_is_tried_again(program, monkeypatch) -> None:
    answers(monkeypatch, SOUND)
    assert trial.fault_of([(program, "a")], DEVICE) == ""
    (kept,) = (cachedir.cache_dir() / "trials").iterdir()
    kept.write_bytes(b"\xff\xfe")
    answers(monkeypatch, CRASH)
    assert "could not be tried" in trial.fault_of([(program, "a")], DEVICE)


@pytest.mark.parametrize("printed", ["1", "{", "[]", '{"code": "a"}', "null", ""])
def test_an_answer_that_is_none_is_no_answer(program, monkeypatch, printed) -> None:
    done = SimpleNamespace(stdout=printed.encode() + b"\n", stderr=b"", returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: done)
    assert "could not be tried" in trial.fault_of([(program, "a")], DEVICE)


def test_the_real_child_starts_whatever_lies_around(program, monkeypatch, tmp_path) -> None:
    """It gets as far as the GPU that is not there: neither files in the working directory nor warnings stop it."""
    (tmp_path / "random.py").write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    fault = trial.fault_of([(program, "a")], DEVICE)
    assert "a file of the user" not in fault
    assert "CUDA" in fault or "NVIDIA" in fault, fault


@pytest.mark.parametrize("at", [-1, trial.GUARD + 40 * 128])
def test_what_is_written_beside_the_results_is_found(program, at) -> None:
    run = numpy_launcher(trial.PRINTERS["numpy"](program))
    assert trial.disagreement(program, run, CPU) == ""

    def stray(*tensors: Tensor) -> None:
        run(*tensors)
        result = tensors[-1]
        torch.as_strided(result, (1,), (1,), result.storage_offset() + (at if at < 0 else 40 * 128)).fill_(7.0)

    assert "writes where it may not" in trial.disagreement(program, stray, CPU)


def test_inputs_that_are_written_are_found(program) -> None:
    run = numpy_launcher(trial.PRINTERS["numpy"](program))

    def spoils(*tensors: Tensor) -> None:
        run(*tensors)
        tensors[0][5] += 1

    assert "writes where it may not" in trial.disagreement(program, spoils, CPU)
