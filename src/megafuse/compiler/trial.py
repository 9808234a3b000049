"""Kernels with which the assembler is not trusted run once in a process of their own, beside the program in NumPy.

A kernel that leaves its memory ends the use of a GPU for the whole process, so that process is a child: a program of
its own (``python -m megafuse.compiler.trial``), which is started when it is first needed, and ends when it has not been
needed for a while. What was found sound is kept on disk.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megafuse.codegen.chain_program import ChainProgram
from megafuse.codegen.program import Param
from megafuse.compiler.driver import PRINTERS
from megafuse.runtime import cachedir, shim
from megafuse.runtime.numpy_kernels import numpy_launcher
from megafuse.runtime.tensors import LEAST_FINITE, TORCH_DTYPES, draw_away_from_zero, finite_share

MOST_APART = 0.02  # of a result's norm: ten roundings to bf16
SECONDS = 300.0  # of one trial, the start of the process included
IDLE_SECONDS = 30.0
COMMAND = (sys.executable, "-m", "megafuse.compiler.trial")
SOUND = "sound"


def fault_of(programs: Sequence[ChainProgram], device: torch.device) -> str:
    """What is wrong with the kernels of ``programs`` on a CUDA ``device``; empty if each was tried and found sound."""
    for program in programs:
        place = f"trials/{_digest(program, device)}.txt"
        if cachedir.read_text(place) == SOUND:
            continue
        if fault := TRIALS.ask(program, device):
            return fault
        cachedir.write_text(place, SOUND)
    return ""


def _digest(program: ChainProgram, device: torch.device) -> str:
    """Names a kernel, its compiler and the GPU."""
    source = PRINTERS["triton"](program)
    facts = (
        source.digest,
        source.options,
        shim.triton_version(),
        torch.version.cuda,
        torch.cuda.get_device_name(device),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


class Trials:
    """The child process, and what is asked of it, one kernel at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a forked process has no child yet
        self._idle: threading.Timer | None = None

    def ask(self, program: ChainProgram, device: torch.device) -> str:
        """What is wrong with the kernel of ``program``; empty if nothing is."""
        with self._lock:
            try:
                answer = self._answer(pickle.dumps((program, device.index or 0)))
            except OSError:  # it cannot be started, or is gone
                answer = b""
            if not answer:
                status = self._end()
                return f"kernel {program.name} could not be tried: its process ended with status {status}"
            said = json.loads(answer)
            if said["last"]:
                self._end()
            else:
                self._idle = threading.Timer(IDLE_SECONDS, self.close)
                self._idle.daemon = True
                self._idle.start()
            return str(said["fault"])

    def close(self) -> None:
        """End the child, if there is one."""
        with self._lock:
            self._end()

    def _answer(self, question: bytes) -> bytes:
        """One line, or nothing where the child ended or took too long."""
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        limit = threading.Timer(SECONDS, child.kill)
        limit.daemon = True
        limit.start()
        try:
            child.stdin.write(len(question).to_bytes(8, "little") + question)
            child.stdin.flush()
            return child.stdout.readline()
        finally:
            limit.cancel()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._idle is not None:
            self._idle.cancel()
        if self._child is None or self._owner != os.getpid() or self._child.poll() is not None:
            self._end()
            root = str(Path(__file__).resolve().parents[2])
            paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            self._child = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
            )
            self._owner = os.getpid()
        return self._child

    def _end(self) -> int | None:
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return None
        child.kill()
        with contextlib.suppress(OSError), child:  # a pipe may be broken
            pass
        return child.wait()


TRIALS = Trials()
atexit.register(TRIALS.close)


def main() -> None:
    """The child: questions from standard input, one line each to standard output; ends when there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    last = False
    while not last and (question := _question(sys.stdin.buffer)):
        program, index = question
        try:
            fault = _tried(program, torch.device("cuda", index))
        except Exception as error:  # the GPU may be of no more use to this process
            reason = str(error).split("\n", maxsplit=1)[0]
            fault, last = f"kernel {program.name} could not be tried: {type(error).__name__}: {reason}", True
        answers.write(json.dumps({"fault": fault, "last": last}) + "\n")
        answers.flush()


def _question(stream: IO[bytes]) -> Any:
    size = stream.read(8)
    return pickle.loads(stream.read(int.from_bytes(size, "little"))) if len(size) == 8 else None


def _tried(program: ChainProgram, device: torch.device) -> str:
    """``disagreement`` of the compiled kernel on ``device``, once it has ended."""
    kernel = shim.cuda_kernel(PRINTERS["triton"](program))
    with torch.cuda.device(device):
        found = disagreement(program, lambda *tensors: kernel.launch(0, *(t.data_ptr() for t in tensors)), device)
        torch.cuda.synchronize()
    return found


def disagreement(program: ChainProgram, launch: Callable[..., None], device: torch.device) -> str:
    """What ``launch(*tensors)`` on ``device`` makes other than the program in NumPy; empty where all agrees."""
    results = [p.name for p in program.params if p.written]
    for signed in (True, False):  # a variance below zero would make all results NaN
        buffers = drawn_buffers(program, signed=signed)
        found = {name: tensor.to(device, copy=True) for name, tensor in buffers.items()}
        numpy_launcher(PRINTERS["numpy"](program))(*buffers.values())
        if finite_share({name: buffers[name] for name in results}) >= LEAST_FINITE:
            break
    else:
        return f"kernel {program.name} cannot be tried: random inputs give no finite results"
    launch(*found.values())
    wrong = [name for name in results if differs(found[name].cpu(), buffers[name])]
    return f"kernel {program.name} makes another {wrong[0]} than the same program in NumPy" if wrong else ""


def drawn_buffers(program: ChainProgram, *, signed: bool = True) -> dict[str, Tensor]:
    """CPU memory for the parameters, flat: random numbers to be read, NaN (integers: 0) where results will be.

    Matrices have both signs and are scaled so that products are about as large as their rows; other numbers are
    positive unless ``signed``. Integers are 0, a place in any table.
    """
    return {p.name: _drawn(p, signed, program.inner.get(p.name, 0)) for p in program.params}


def _drawn(param: Param, signed: bool, inner: int) -> Tensor:
    """``inner``: what a matrix is summed over; 0 for other memory."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(param.shape, param.strides, strict=True))
    memory = torch.zeros(extent, dtype=TORCH_DTYPES[param.dtype])
    if memory.is_floating_point():
        generator = torch.Generator().manual_seed(zlib.crc32(param.name.encode()))
        draw_away_from_zero(memory, generator, signed=signed or inner > 0)
        memory.mul_(torch.nan if param.written else inner**-0.5 if inner else 1.0)
    return memory


def differs(found: Tensor, expected: Tensor) -> bool:
    """Whether ``found`` is more than roundings away from ``expected``, or not finite where that is."""
    here = expected.double().isfinite()
    a, b = found.double()[here], expected.double()[here]
    return not float((a - b).norm()) <= MOST_APART * float(b.norm())


if __name__ == "__main__":
    main()
