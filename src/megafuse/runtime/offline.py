"""Compiling kernels without a GPU: registers, spills and shared memory of each, from child processes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megafuse.codegen.artifact import KernelSource
from megafuse.core.dtypes import DType
from megafuse.core.errors import TargetError
from megafuse.runtime import cachedir, early, shim

_POINTERS = {
    DType.F64: "*fp64", DType.F32: "*fp32", DType.BF16: "*bf16", DType.F16: "*fp16", DType.I64: "*i64",
    DType.I32: "*i32", DType.I16: "*i16", DType.I8: "*i8", DType.U8: "*u8", DType.BOOL: "*i1",
}  # fmt: skip
_WORKER = Path(__file__).with_name("shim_worker.py")
_COPY_ENGINE_SINCE = 90  # the compute capability that tensor descriptors need


@dataclass(frozen=True)
class CompileReport:
    """What compiling one kernel gave. ``error`` says why there is nothing else, or is empty.

    ``registers`` per thread; ``spills``: bytes of stack per thread (0: nothing spilled); ``shared``: bytes per program;
    ``layouts``: those of products' operands in shared memory; ``seconds``: compile time, near 0 where Triton's own
    cache had the kernel.
    """

    entry: str
    digest: str
    arch: int
    registers: int = 0
    spills: int = 0
    shared: int = 0
    layouts: int = 0
    seconds: float = 0.0
    ptx_bytes: int = 0
    cubin_bytes: int = 0
    error: str = ""


def compile_offline(
    sources: Sequence[KernelSource],
    arch: int = 90,
    *,
    processes: int = 2,
    seconds_per_kernel: float = 60.0,
    seconds: float = math.inf,
) -> list[CompileReport]:
    """Compile Triton ``sources`` for compute capability ``arch`` (90: sm_90), one report each, in order.

    The work runs in ``processes`` child processes at once, so Triton's interpreter switch and a compiler crash stay
    there. A kernel that crashes the compiler or takes longer than ``seconds_per_kernel`` gets a report with an error.
    What is not compiled after ``seconds`` in all is left, with an error: the last of the ``sources`` first. Open sizes
    are compiled as 32-bit numbers of which nothing is known. Of a kernel with tensor descriptors its fallback is
    compiled where a launch would take that (see :func:`launched`).

    Raises:
        TargetError: a source is not Triton text.
    """
    for source in sources:
        if source.backend != "triton":
            raise TargetError(f"kernel {source.entry} is {source.backend} text, which has no offline compiler")
    count = max(1, min(processes, len(sources)))
    shares = [list(sources[i::count]) for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        end = time.monotonic() + seconds
        done = list(pool.map(lambda share: _compile_share(share, arch, seconds_per_kernel, end), shares))
    return [done[i % count][i // count] for i in range(len(sources))]


def _compile_share(sources: list[KernelSource], arch: int, limit: float, end: float) -> list[CompileReport]:
    """One child after another until all are done; a child that ends early has failed on its first unfinished kernel."""
    reports: list[CompileReport] = []
    while len(reports) < len(sources):
        rest = sources[len(reports) :]
        if time.monotonic() >= end:
            return reports + [CompileReport(s.entry, s.digest, arch, error="out of time") for s in rest]
        lines, trouble = _run_worker(rest, arch, limit, end - time.monotonic())
        reports += [CompileReport(s.entry, s.digest, arch, **line) for s, line in zip(rest, lines, strict=False)]
        if len(lines) < len(rest) and time.monotonic() < end:
            source = rest[len(lines)]
            reports.append(CompileReport(source.entry, source.digest, arch, error=trouble))
    return reports


def _run_worker(sources: list[KernelSource], arch: int, limit: float, left: float) -> tuple[list[dict[str, Any]], str]:
    """Results of the kernels that the child finished within ``left`` seconds, and what went wrong with the next."""
    work = json.dumps({"arch": arch, "kernels": [_job(launched(s, arch), arch) for s in sources]})
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(_WORKER)]
    timeout = min(limit * len(sources), left)
    pipe = subprocess.PIPE
    # A session of its own, so that the assembler which the child has started ends with it.
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, text=True, start_new_session=True
    ) as child:
        try:
            output, said = child.communicate(work, timeout)
            trouble = f"compiler process ended with {child.returncode}: {said.strip()[-400:]}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output, trouble = child.communicate()[0], f"compilation took longer than {limit:.0f} s"
        except BaseException:  # an interrupt reaches this process alone
            os.killpg(child.pid, signal.SIGKILL)
            raise
    lines = [json.loads(line) for line in output.split("\n")[:-1] if line.startswith("{")]
    return lines, trouble


def launched(source: KernelSource, arch: int) -> KernelSource:
    """What runs on aligned tensors: ``source``, or its fallback where device or Triton have no tensor descriptors."""
    if source.fallback is not None and (arch < _COPY_ENGINE_SINCE or shim.triton_version() < shim.DESCRIPTORS_SINCE):
        return source.fallback
    return source


def _job(source: KernelSource, arch: int) -> dict[str, Any]:
    path = cachedir.write_text(f"sources/{source.entry}_{source.digest}.py", source.text)
    told = early.options(source, arch, shim.triton_version())
    return {
        "path": str(path),
        "entry": source.entry,
        "params": [_POINTERS[dtype] for _, dtype in source.params],
        "sizes": len(source.dims),
        "options": {**source.options, **told},
        "constants": early.constants(told),
    }
