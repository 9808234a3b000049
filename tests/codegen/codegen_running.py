"""Run generated modules: NumPy ones in this process, Triton ones in worker processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from megafuse.codegen.artifact import KernelSource
from megafuse.core.dtypes import DType

HERE = Path(__file__).parent
SRC = HERE.parent.parent / "src"
EXACT = -1.0  # a tolerance: nothing but equal values will do
EPS = {DType.F64: 2.0**-45, DType.F32: 4e-6, DType.F16: 2.0**-10, DType.BF16: 2.0**-7}


def load_module(source: KernelSource, folder: Path) -> ModuleType:
    """Write a generated module to ``folder`` and import it (Triton needs the file)."""
    path = folder / f"{source.entry}_{source.backend}.py"
    path.write_text(source.text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(source: KernelSource, folder: Path) -> Callable[..., Any]:
    """The generated function."""
    return getattr(load_module(source, folder), source.entry)


def worker(script: str, *args: str, **environment: str) -> str:
    """Run ``script`` of this folder in a process of its own; returns what it printed.

    Raises:
        AssertionError: it failed; the message holds its last lines.
    """
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join([str(SRC), str(HERE)])}
    command = [sys.executable, str(HERE / script), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def difference(got: np.ndarray, want: np.ndarray, dtype: DType, tolerance: float = 0.0) -> str:
    """Empty when ``got`` is ``want`` (NaN and infinities alike), else what differs."""
    want = np.asarray(want).reshape(-1)
    if tolerance == EXACT:
        bad = ~((got == want) & (np.signbit(got) == np.signbit(want)) | (np.isnan(got) & np.isnan(want)))
        return f"{got[bad][:5]} != {want[bad][:5]}" if bad.any() else ""
    if not dtype.is_float:
        bad = got.astype(np.int64) != want.astype(np.int64)
        return f"{got[bad][:5]} != {want[bad][:5]}" if bad.any() else ""
    got = got.astype(np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite].astype(np.float64), equal_nan=True):
        return f"not finite: {got[~finite][:5]} != {want[~finite][:5]}"
    limit = max(tolerance if dtype in (DType.F32, DType.F64) else 0.0, EPS[dtype])
    error = np.abs(got[finite] - want[finite]) / np.maximum(1.0, np.abs(want[finite]))
    worst = float(error.max(initial=0.0))
    return "" if worst <= limit else f"error {worst:.3g} over {limit:.3g}"


def differences(
    outputs: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], params: Mapping[str, DType], tolerance: float
) -> list[str]:
    """What differs, by output."""
    found = ((name, difference(outputs[name], value, params[name], tolerance)) for name, value in want.items())
    return [f"{name}: {text}" for name, text in found if text]
