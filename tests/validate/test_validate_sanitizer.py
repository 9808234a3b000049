"""What the tools of compute-sanitizer print, read; a stand-in program for the tool itself."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from megafuse.core.errors import InputError, TargetError
from megafuse.validate.sanitizer import (
    FOUND,
    Finding,
    find_sanitizer,
    parse_output,
    parse_tools,
    run_sanitized,
    sanitizer_command,
)

CLEAN = "========= COMPUTE-SANITIZER\nmegafuse ran 3 1\n========= ERROR SUMMARY: 0 errors\n"
OUTSIDE = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at k0_y+0x5b0 in k0_y.py:31
=========     by thread (31,0,0) in block (4,0,0)
=========     Access at 0x7f1e8a0 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1e800 of size 160 bytes
=========
========= Invalid __global__ write of size 2 bytes
=========     at k0_y+0x5b0 in k0_y.py:31
=========     by thread (30,0,0) in block (4,0,0)
=========     Access at 0x7f1e8a2 is out of bounds
=========
========= Invalid __shared__ read of size 16 bytes
=========     at 0x270 in /tmp/cache/k1_d_x.py:37:k1_d_x
=========     by thread (30,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 3 errors
"""
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at k2_partial+0x100 in k2.py:40
=========     and Read access at k2_partial+0x2a0 in k2.py:44 [1020 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
WARNED = "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n"


def test_nothing_found():
    done = parse_output("memcheck", CLEAN, 0)
    assert (done.count, done.findings, done.problem) == (0, (), "")
    races = parse_output("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0)
    assert races.problem == ""


def test_accesses_outside_name_the_kernel():
    done = parse_output("memcheck", OUTSIDE, FOUND)
    assert done.count == 3
    assert done.findings == (
        Finding("Invalid __global__ write of size 2 bytes", "k0_y"),
        Finding("Invalid __global__ write of size 2 bytes", "k0_y"),
        Finding("Invalid __shared__ read of size 16 bytes", "k1_d_x"),
    )
    assert done.problem.startswith("3 found: ")
    assert done.problem.count("k0_y") == 1, "equal findings are said once"


def test_races_name_the_kernel():
    done = parse_output("racecheck", RACE, FOUND)
    assert done.count == 1
    assert done.findings == (Finding("Error: Race reported", "k2_partial"),)


def test_warnings_count():
    assert parse_output("racecheck", WARNED, 0).problem.startswith("2 found")


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [
        ("Traceback: no module\n", 1, "did not end with a summary"),
        ("========= COMPUTE-SANITIZER\n========= Error: Device not supported\n", 0, "did not end with a summary"),
        (CLEAN, 1, "the program failed"),
    ],
)
def test_a_run_that_did_not_end_is_not_clean(output, status, said):
    assert said in parse_output("memcheck", output, status).problem


def test_several_summaries_add_up():
    assert parse_output("memcheck", CLEAN + OUTSIDE, FOUND).count == 3


def test_tools():
    assert parse_tools("memcheck, racecheck,memcheck") == ("memcheck", "racecheck")
    with pytest.raises(InputError, match="--sanitize: unknown tool 'valgrind'"):
        parse_tools("memcheck,valgrind")
    with pytest.raises(InputError, match="no tool is named"):
        parse_tools(" ,")


def test_where_it_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    if not Path("/usr/local/cuda").exists():
        with pytest.raises(TargetError, match="compute-sanitizer is not installed"):
            find_sanitizer()
    program = _program(tmp_path / "bin", "pass")
    assert find_sanitizer() == str(program), "under CUDA_HOME"


def test_a_program_is_run_under_the_tool(tmp_path):
    program = _program(
        tmp_path,
        "import os, sys\n"
        "print('========= ARGS', *sys.argv[1:])\n"
        "print('========= MEMORY', os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'])\n"
        "print('========= ERROR SUMMARY: 0 errors', file=sys.stderr)\n",
    )
    done = run_sanitized("memcheck", str(program), ["python", "x.py"], dict(os.environ), 60)
    assert done.problem == ""
    assert " ".join(sanitizer_command("memcheck", "", ["python", "x.py"])).strip() in done.output
    assert "MEMORY 1" in done.output


def test_a_program_that_does_not_end(tmp_path):
    program = _program(tmp_path, "import time\ntime.sleep(60)\n")
    with pytest.raises(TargetError, match=r"racecheck took more than 0\.5 s"):
        run_sanitized("racecheck", str(program), [], dict(os.environ), 0.5)


def _program(folder: Path, body: str) -> Path:
    """A stand-in for compute-sanitizer."""
    folder.mkdir(exist_ok=True)
    path = folder / "compute-sanitizer"
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
