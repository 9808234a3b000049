"""Triton texts with open sizes: right under the interpreter, and compiled for sm_90 as well as those of exact sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megafuse.capture.api import capture
from megafuse.capture.types import Captured
from megafuse.capture.unify import unify
from megafuse.compiler.driver import compile_captured
from megafuse.core.device import device_spec
from megafuse.core.sizes import Dim
from megafuse.runtime.offline import compile_offline
from sharing_modules import NormGate

pytest.importorskip("triton")
HERE = Path(__file__).parent
NEAR = 2e-5
SIZES = (1000, 1500, 2100)


def test_shared_texts_are_right_under_the_interpreter() -> None:
    paths = os.pathsep.join([str(HERE.parent.parent / "src"), str(HERE)])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", str(HERE / "sharing_interpret.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [int(generations) for _, _, generations in rows] == [1, 2, 2, 2, 2, 2]
    assert all(float(difference) < NEAR for _, difference, _ in rows), rows


def captured(size: int) -> Captured:
    with torch.device("meta"):
        module = NormGate(640)
    x = torch.empty(size, 4, 640, device="meta", dtype=torch.bfloat16, requires_grad=True)
    return capture(module.to(torch.bfloat16), (x,))


@pytest.mark.slow
def test_shared_kernels_take_no_more_registers_to_speak_of() -> None:
    """No spills, and the walks over the data within an eighth of the exact ones' registers."""
    points = [{"n": s} for s in SIZES]
    exact = compile_captured(captured(SIZES[0]), device_spec(90)).artifact("triton").kernels
    one, scalars = unify([captured(s) for s in SIZES], points, [Dim("n", SIZES[0])])
    shared = compile_captured(one, device_spec(90)).artifact("triton").kernels
    assert not scalars and [k.entry for k in shared] == [k.entry for k in exact]
    walks = [at for at, k in enumerate(shared) if "in blocks of" not in k.text]  # sums of partials know their number
    assert len(walks) >= 4 and sum(k.dims == ("n",) for k in shared) >= 5
    before, after = compile_offline(exact), compile_offline(shared)
    assert [r.error for r in after] == [""] * len(after) and not any(r.spills for r in after)
    for at in walks:
        assert after[at].registers <= before[at].registers * 1.125 + 2, shared[at].entry
