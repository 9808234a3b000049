"""Chains are assembled, and tried where the assembler is not trusted, before a call runs them.

ptxas 12.8 may lose the address of an operand in shared memory. What can be seen of that in its result is a reason to
plan again. Tiles with narrow lines, where it was found, are also run once, on random inputs, beside the same program in
NumPy. That is no shield from a kernel that leaves its memory: it ends the process's use of the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megafuse.codegen.chain_program import ChainProgram
from megafuse.codegen.program import Param
from megafuse.compiler.driver import PRINTERS, Compiled
from megafuse.core.device import DeviceSpec
from megafuse.core.errors import TargetError
from megafuse.fusion.epilogue import DotRule
from megafuse.ir.chain import UNIT
from megafuse.runtime.numpy_kernels import numpy_launcher
from megafuse.runtime.shim import cuda_kernel
from megafuse.runtime.tensors import LEAST_FINITE, TORCH_DTYPES, draw_away_from_zero, finite_share

MOST_APART = 0.02  # of a result's norm: ten roundings to bf16


def first_sound(
    compile_: Callable[[DeviceSpec, DotRule], Compiled], spec: DeviceSpec, rule: DotRule, device: torch.device
) -> Compiled:
    """The first compilation whose chains the assembler made right: as planned, without narrow tiles, without chains."""
    compiled, faults = compile_(spec, rule), []
    for options in ((replace(spec, narrow_tiles=False), rule), (spec, replace(rule, chain=False))):
        fault = fault_of_chains(compiled, device)
        if not fault:
            break
        faults.append(f"planned again: {fault}")
        compiled = compile_(*options)
    return replace(compiled, cover=replace(compiled.cover, decisions=(*compiled.cover.decisions, *faults)))


def fault_of_chains(compiled: Compiled, device: torch.device) -> str:
    """What is wrong with a chain's kernel on a CUDA ``device``; empty if nothing was found."""
    with torch.cuda.device(device):
        for program in compiled.programs:
            if isinstance(program, ChainProgram) and (fault := _fault(program, device)):
                return fault
    return ""


def _fault(program: ChainProgram, device: torch.device) -> str:
    kernel = cuda_kernel(PRINTERS["triton"](program))
    try:
        kernel.assemble()
    except TargetError as error:
        return error.what
    if not program.turned or program.phases[0].row_tile >= UNIT:
        return ""
    if torch.cuda.is_current_stream_capturing():
        return f"kernel {program.name} cannot be tried while a CUDA graph is recorded"
    return disagreement(program, lambda *tensors: kernel.launch(0, *(t.data_ptr() for t in tensors)), device)


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
