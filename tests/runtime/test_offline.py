"""Compiling without a GPU: the text that a launch would take, and nothing left behind by what takes too long."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from megafuse.codegen.artifact import KernelSource
from megafuse.runtime import offline, shim

PLAIN = KernelSource("k", "triton", "", (), (1, 1), 4, 1)
DESCRIBED = dataclasses.replace(PLAIN, aligned=(0,), fallback=PLAIN)


@pytest.mark.parametrize(
    ("version", "arch", "expected"),
    [((3, 4), 90, DESCRIBED), ((3, 9), 100, DESCRIBED), ((3, 3), 90, PLAIN), ((3, 9), 80, PLAIN)],
)
def test_descriptors_are_compiled_where_a_launch_makes_them(monkeypatch, version, arch, expected):
    monkeypatch.setattr(shim, "triton_version", lambda: version)
    assert offline.launched(DESCRIBED, arch) is expected
    assert offline.launched(PLAIN, arch) is PLAIN


HANGING = """import pathlib, subprocess, sys
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({told!r}).write_text(str(started.pid))
started.wait()
"""


def test_what_takes_too_long_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    told, worker = tmp_path / "pid", tmp_path / "worker.py"
    worker.write_text(HANGING.format(told=str(told)))
    monkeypatch.setattr(offline, "_WORKER", worker)
    (report,) = offline.compile_offline([PLAIN], seconds_per_kernel=6)
    assert report.error == "compilation took longer than 6 s"
    deadline = time.monotonic() + 30
    while runs(told.read_text()):
        assert time.monotonic() < deadline, "the process that the compilation started still runs"
        time.sleep(0.1)


def runs(pid: str) -> bool:
    """True for a process that is neither gone nor ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
