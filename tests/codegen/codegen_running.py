"""Run generated modules: NumPy ones in this process, Triton ones in worker processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from codegen_blocks import Case
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
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


GUARD, SENTINEL = 4096, 0x5A  # bytes before and after an array, and what they hold


@dataclass(frozen=True)
class Guarded:
    """A copy of an array with bytes on both sides that nothing may touch."""

    raw: np.ndarray
    array: np.ndarray

    @classmethod
    def of(cls, array: np.ndarray) -> Guarded:
        """A guarded copy."""
        raw = np.full(array.nbytes + 2 * GUARD, SENTINEL, np.uint8)
        copy = raw[GUARD : raw.size - GUARD].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return cls(raw, copy)

    @property
    def whole(self) -> bool:
        """The bytes on both sides are as they were."""
        return bool((self.raw[:GUARD] == SENTINEL).all() and (self.raw[-GUARD:] == SENTINEL).all())


def matches(got: np.ndarray, want: np.ndarray, dtype: DType, tolerance: float) -> np.ndarray:
    """Which elements of ``got`` are those of ``want``, NaN and infinities alike."""
    if tolerance == EXACT:
        return (got == want) & (np.signbit(got) == np.signbit(want)) | (np.isnan(got) & np.isnan(want))
    if not dtype.is_float:
        return got.astype(np.int64) == want.astype(np.int64)
    got, want = got.astype(np.float64), want.astype(np.float64)
    limit = max(tolerance if dtype in (DType.F32, DType.F64) else 0.0, EPS[dtype])
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= limit * np.maximum(1.0, np.abs(want))
    return np.where(np.isfinite(want), near, (got == want) | (np.isnan(got) & np.isnan(want)))


def difference(
    got: np.ndarray, want: np.ndarray, dtype: DType, tolerance: float = 0.0, inputs: Mapping[str, np.ndarray] = {}
) -> str:
    """Empty when ``got`` is ``want``, else the first elements that differ, with what ``inputs`` have at their place."""
    want = np.asarray(want).reshape(-1)
    bad = np.flatnonzero(~matches(got, want, dtype, tolerance))
    beside = {name: array.reshape(-1) for name, array in inputs.items() if array.size == want.size}
    told = []
    for i in bad[:5]:
        given = ", ".join(f"{name}={array[i]}" for name, array in beside.items())
        told.append(f"[{i}] {given}: {got[i]} != {want[i]}")
    return f"{bad.size} of {want.size} differ: {'; '.join(told)}" if told else ""


def differences(outputs: Mapping[str, np.ndarray], case: Case, flushed: bool = False) -> list[str]:
    """What differs from the case's expectation, by output.

    ``flushed``: the outputs come from a GPU, where some functions may take subnormal fp32 arguments for zero (see
    docs/numerics.md): elements that the case expects then are right too.
    """
    dtypes = {param.name: param.dtype for param in case.program.params}
    found = []
    for name, want in case.expected.items():
        got = outputs[name]
        if flushed and name in case.flushed:
            other = case.flushed[name].reshape(-1)
            got = np.where(matches(got, other, dtypes[name], case.tolerance), np.asarray(want).reshape(-1), got)
        text = difference(got, want, dtypes[name], case.tolerance, case.inputs)
        found += [f"{name}: {text}"] if text else []
    return found
