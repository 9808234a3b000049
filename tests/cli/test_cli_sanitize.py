"""``megafuse check --sanitize``: which cases run, what a step reports, how it ends."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch

from megafuse.cli import sanitize
from megafuse.cli.selection import Selection
from megafuse.validate.sanitizer import Sanitized

CLEAN = "========= ERROR SUMMARY: 0 errors\n"


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path):
    """A GPU and a compute-sanitizer that runs its command and prints a summary; the steps run on the CPU."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        f"start = sys.argv.index({sys.executable!r})\n"
        "done = subprocess.run(sys.argv[start:], capture_output=True, text=True)\n"
        "print(done.stdout, done.stderr)\nprint('========= ERROR SUMMARY: 0 errors')\nsys.exit(done.returncode)\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "require_cuda", lambda: None)
    return program


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(megafuse_cli):
    status, _, err = megafuse_cli("check", "--sanitize", "memcheck")
    assert status == 2
    assert "no CUDA device is available" in err


def test_an_unknown_tool_is_named(megafuse_cli):
    status, _, err = megafuse_cli("check", "--sanitize", "memcheck,lint")
    assert status == 2
    assert "unknown tool 'lint'" in err


def test_the_suite_runs_where_nothing_is_named():
    cases = sanitize.cases_of(Selection(dots="auto", seed=7))
    assert len(cases) == len(sanitize.SUITE) and len({c.title for c in cases}) == len(cases)
    specs = [json.loads(c.spec) for c in cases]
    assert all(s["dots"] == "auto" and s["seed"] == 7 for s in specs)
    one = sanitize.cases_of(Selection(workload="gelu_ffn", dim=24))
    assert [c.title for c in one] == ["gelu_ffn"]


@pytest.mark.parametrize("number", range(len(sanitize.SUITE)))
def test_every_case_of_the_suite_can_be_made(number):
    spec = json.loads(sanitize.cases_of(Selection())[number].spec)
    example, dots = sanitize.example_of(spec, "cpu")
    assert dots == "library" and example.args[0].requires_grad


def test_a_selection_survives_its_way_to_the_process():
    (case,) = sanitize.cases_of(Selection(workload="gelu_ffn", dtype="bfloat16", dots="auto"))
    example, dots = sanitize.example_of(json.loads(case.spec), "cpu")
    assert dots == "auto" and example.args[0].dtype == torch.bfloat16
    kernels, products = sanitize.run_step(example, "cpu", dots)
    assert kernels > products >= 1


def test_a_clean_run(fake_gpu, monkeypatch):
    monkeypatch.setattr(sanitize, "SUITE", sanitize.SUITE[:1])
    body = f"print({sanitize.RAN!r} + '5 2')"
    monkeypatch.setattr(sanitize, "command_of", lambda case: [sys.executable, "-c", body])
    clean, text = sanitize.sanitize_selection(Selection(), ["memcheck"])
    assert clean, text
    assert "5 generated kernels, 2 of them products" in text
    assert "memcheck: clean" in text and text.endswith("5 generated kernels under memcheck: clean")


def test_a_step_that_ends_early_under_the_tool_is_not_clean(fake_gpu, monkeypatch, tmp_path):
    """It runs alone; under the tool (the second time) it ends without a word, and the tool found nothing."""
    flag = tmp_path / "ran"
    body = f"import pathlib; p = pathlib.Path({str(flag)!r})\n"
    body += f"if not p.exists(): print({sanitize.RAN!r} + '5 2'); p.touch()"
    monkeypatch.setattr(sanitize, "SUITE", sanitize.SUITE[:1])
    monkeypatch.setattr(sanitize, "command_of", lambda case: [sys.executable, "-c", body])
    clean, text = sanitize.sanitize_selection(Selection(), ["memcheck"])
    assert not clean and "NOT CLEAN" in text and "the program failed" in text


def test_one_bad_tool_spoils_the_verdict():
    good, bad = Sanitized("memcheck", 0, (), 0, CLEAN), Sanitized("racecheck", 2, (), 86, "")
    lines = sanitize.CaseRuns("x", 3, 1, (good, bad)).lines()
    assert lines[1] == "  memcheck: clean" and lines[2].startswith("  racecheck: 2 found")
