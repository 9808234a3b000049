"""Kernels with which the assembler is not trusted run once in a process of their own, beside the program in NumPy.

A kernel that leaves its memory ends the use of a GPU for the whole process, so that process is a child. What was found
sound is kept on disk, under the machine code that was run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megafuse.codegen.chain_program import ChainProgram
from megafuse.codegen.program import Param
from megafuse.compiler.driver import PRINTERS
from megafuse.core.errors import TargetError
from megafuse.runtime import cachedir
from megafuse.runtime.numpy_kernels import numpy_launcher
from megafuse.runtime.shim import cuda_kernel
from megafuse.runtime.tensors import LEAST_FINITE, TORCH_DTYPES, draw_away_from_zero, finite_share

MOST_APART = 0.02  # of a result's norm: ten roundings to bf16
SECONDS = 300.0  # of one child
GUARD = 1024  # elements before and behind each buffer, which no kernel may change
SOUND = "sound"
NO_CODE = "child"  # in place of a kernel's digest: what ended the child
CHILD_ENV = "MEGAFUSE_TRIAL"  # set in a child, which has none itself
_CODE = "import sys; sys.path[:] = {path!r}; from megafuse.compiler.trial import main; main()"

Doubtful = tuple[ChainProgram, str]  # a program, and the digest of its machine code


def fault_of(kernels: Sequence[Doubtful], device: torch.device) -> str:
    """What is wrong with kernels on a CUDA ``device``; empty if each was tried, now or earlier, and found sound."""
    gpu = _gpu(device)
    places = [f"trials/{hashlib.sha256((code + gpu).encode()).hexdigest()[:32]}.txt" for _, code in kernels]
    todo = [n for n, place in enumerate(places) if not _kept(place)]
    if not todo:
        return ""
    answers, trouble = _ask([kernels[n] for n in todo], device.index or 0, gpu)
    for n, (program, code) in zip(todo, (kernels[n] for n in todo), strict=True):
        answer = answers.get(code)
        if answer is None:
            return f"kernel {program.name} could not be tried: {trouble}"
        if answer:
            return answer
        cachedir.write_text(places[n], SOUND)
    return ""


def _kept(place: str) -> bool:
    with contextlib.suppress(UnicodeDecodeError):
        return cachedir.read_text(place) == SOUND
    return False


def _gpu(device: torch.device) -> str:
    """The GPU, by its own number where PyTorch says it."""
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} {getattr(found, 'uuid', '')}"


def _ask(kernels: Sequence[Doubtful], index: int, gpu: str) -> tuple[dict[str, str], str]:
    """What a child says of each kernel, by digest (empty: sound), and why it does not speak of all."""
    if not sys.executable or getattr(sys, "frozen", False) or os.environ.get(CHILD_ENV):
        return {}, "there is no interpreter of Python to run it in"
    question = pickle.dumps((list(kernels), index, gpu))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE.format(path=sys.path)],
            input=question,
            capture_output=True,
            timeout=SECONDS,
            env={**os.environ, CHILD_ENV: "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"its process took more than {SECONDS:.0f} s"
    except OSError as error:
        return {}, f"its process cannot be started: {error}"
    answers: dict[str, str] = {}
    for line in done.stdout.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            answer = json.loads(line)
            answers[answer["code"]] = answer["fault"]
    return answers, answers.get(NO_CODE) or f"its process ended with status {done.returncode}"


def main() -> None:
    """The child: kernels from standard input, one line for each to standard output, as soon as it is tried."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print is no answer

        def say(code: str, fault: str) -> None:
            answers.write(json.dumps({"code": code, "fault": fault}) + "\n")
            answers.flush()

        try:
            kernels, index, gpu = pickle.load(sys.stdin.buffer)
            device = torch.device("cuda", index)
            if _gpu(device) != gpu:
                raise TargetError(f"the process has {_gpu(device)} in place of {gpu}")
            for program, code in kernels:
                say(code, tried(program, code, device))
        except Exception as error:  # the GPU may be of no more use: nothing else is tried
            say(NO_CODE, f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0])


def tried(program: ChainProgram, code: str, device: torch.device) -> str:
    """``disagreement`` of the compiled kernel on ``device``, once it has ended. ``code``: the digest it must have."""
    kernel = cuda_kernel(PRINTERS["triton"](program))
    with torch.cuda.device(device):
        if kernel.assemble().code != code:
            return f"kernel {program.name} cannot be tried: another process compiles it to something else"
        found = disagreement(program, lambda *tensors: kernel.launch(0, *(t.data_ptr() for t in tensors)), device)
        torch.cuda.synchronize()
    return found


def disagreement(program: ChainProgram, launch: Callable[..., None], device: torch.device) -> str:
    """What ``launch(*tensors)`` on ``device`` makes other than the program in NumPy; empty where all agrees."""
    results = [p.name for p in program.params if p.written]
    for signed in (True, False):  # a variance below zero would make all results NaN
        buffers = drawn_buffers(program, signed=signed)
        memories = {name: _guarded(tensor, device) for name, tensor in buffers.items()}
        given = {name: tensor.clone() for name, tensor in buffers.items() if name not in results}
        numpy_launcher(PRINTERS["numpy"](program))(*buffers.values())
        if finite_share({name: buffers[name] for name in results}) >= LEAST_FINITE:
            break
    else:
        return f"kernel {program.name} cannot be tried: random inputs give no finite results"
    found = {name: memory[GUARD:-GUARD] for name, memory in memories.items()}
    launch(*found.values())
    wrong = [name for name in results if differs(found[name].cpu(), buffers[name])]
    if wrong:
        return f"kernel {program.name} makes another {wrong[0]} than the same program in NumPy"
    spoiled = [name for name, tensor in given.items() if not torch.equal(found[name].cpu(), tensor)]
    spoiled += [name for name, memory in memories.items() if not bool((_guards(memory) == 1).all())]
    return f"kernel {program.name} writes where it may not, at {spoiled[0]}" if spoiled else ""


def _guarded(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device`` with ones before and behind it."""
    memory = torch.ones(tensor.numel() + 2 * GUARD, dtype=tensor.dtype, device=device)
    memory[GUARD:-GUARD] = tensor.to(device)
    return memory


def _guards(memory: Tensor) -> Tensor:
    return torch.cat((memory[:GUARD], memory[-GUARD:]))


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
