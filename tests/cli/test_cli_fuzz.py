"""``megafuse fuzz``: what passes, what fails and is made small, limits of time."""

from __future__ import annotations

import re
import time

import pytest

from megafuse.cli import fuzz
from megafuse.cli.fuzz import Case, Failure, cases, examine, examine_case, failure_text
from megafuse.codegen.numpy import ops
from megafuse.workloads.random_modules import Leaf, Line, ModuleProgram
from megafuse.workloads.random_steps import random_program

SINE = ("fp32", 0, (Leaf("x0", (3, 4)),), ())


def sine() -> ModuleProgram:
    return ModuleProgram(*SINE, (Line("v0", "torch.sin(x0)"),), ("v0",))


def test_modules_pass_and_the_last_line_sums_up(megafuse_cli):
    status, out, _ = megafuse_cli("fuzz", "--count", 3, "--seed", 4, "--jobs", 1, "--device", "cpu")
    assert status == 0
    assert re.fullmatch(
        r"fuzz: modules 4 to 6 on cpu: 3 passed, 0 failed, 0 not run, \d+ s", out.strip().splitlines()[-1]
    )


def test_processes_give_what_one_process_gives(megafuse_cli):
    status, out, _ = megafuse_cli("fuzz", "--count", 2, "--seed", 4, "--jobs", 2, "--device", "cpu")
    assert status == 0
    assert "2 passed, 0 failed, 0 not run" in out


def test_no_module_starts_when_the_time_is_over(megafuse_cli):
    status, out, _ = megafuse_cli("fuzz", "--count", 3, "--seconds", 0, "--jobs", 1, "--device", "cpu")
    assert status == 0
    assert "0 passed, 0 failed, 3 not run" in out


def test_types_take_turns_or_are_named(megafuse_cli):
    assert [c.dtype for c in cases(3, 4, "all", "cpu")] == ["fp32", "bf16", "fp16", "fp32"]
    assert {c.dtype for c in cases(3, 4, "bf16", "cpu")} == {"bf16"}
    assert cases(3, 4, "bfloat16", "cpu") == cases(3, 4, "bf16", "cpu")
    status, _, err = megafuse_cli("fuzz", "--dtype", "fp8", "--device", "cpu")
    assert status == 2
    assert "argument --dtype: unknown element type 'fp8'" in err
    assert "one of all, fp32 (float32), bf16 (bfloat16), fp16 (float16, half)" in err


# --- planted faults ---------------------------------------------------------------------------------------------------


@pytest.fixture
def wrong_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated kernels whose cosine is off by a thousandth."""
    monkeypatch.setitem(ops.TEMPLATES, "cos", {"any": "np.cos({a}) * 1.001"})


def test_a_wrong_function_is_found_and_made_small(wrong_cosine, megafuse_cli):
    seed = next(s for s in range(0, 300, 3) if len(p := random_program(s).lines) > 4 and "cos" in str(p))
    status, out, _ = megafuse_cli(
        "fuzz", "--seed", seed, "--count", 1, "--jobs", 1, "--dtype", "fp32", "--device", "cpu"
    )
    assert status == 1
    assert f"FAILED module {seed} in fp32: numbers" in out
    assert "a program of 1 lines that shows it" in out
    assert f"again: megafuse fuzz --seed {seed} --count 1 --dtype fp32 --device cpu" in out
    program = out.split("-" * 100)[1]
    assert "CheckOptions(seeds=14, small_seeds=0, repeats=1, first_seed=50)" in program, "the draws that it failed on"
    names: dict[str, object] = {}
    exec(program, names)  # the printed program shows the failure by itself
    assert not names["megafuse"].check(names["module"], *names["inputs"], fused=names["fused"]).ok


def test_a_crash_is_a_failure_with_its_name(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no kernel today")

    monkeypatch.setattr(fuzz, "fuse", refuse)
    failure = examine(sine())
    assert failure == Failure("RuntimeError", "no kernel today", sine())
    text = failure_text(Case(7, "fp32"), failure)
    assert "no kernel today" in text
    assert "torch.sin(x0)" in text


def test_what_falls_back_to_the_original_ops_is_a_failure(monkeypatch):
    monkeypatch.setitem(fuzz.TARGET_ON, "cpu", "auto")
    failure = examine(sine())
    assert failure is not None
    assert failure.kind == "NotFusedWarning"


def test_a_module_that_takes_too_long_is_a_failure(monkeypatch):
    def sleep(program, device):
        time.sleep(30)

    monkeypatch.setattr(fuzz, "examine", sleep)
    failure = examine_case(Case(1, "fp32"), each=0.2, reduce_for=5.0)
    assert failure is not None
    assert (failure.kind, failure.text) == ("time limit", "it took longer than 0 s")
