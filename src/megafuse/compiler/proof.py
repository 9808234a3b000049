"""Chains are assembled, and tried where the assembler is not trusted, before a call runs them.

ptxas 12.8 may lose the address of an operand where the operands of a kernel have several layouts in shared memory
(lines of different widths: few rows, or few features). What can be seen of that in its result is a reason to plan
again; what cannot be seen is found by a trial in another process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megafuse.codegen.chain_program import ChainProgram
from megafuse.compiler import trial
from megafuse.compiler.driver import PRINTERS, Compiled
from megafuse.core.device import DeviceSpec
from megafuse.core.errors import TargetError
from megafuse.fusion.epilogue import DotRule
from megafuse.runtime.shim import cuda_kernel


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
    doubtful: list[ChainProgram] = []
    with torch.cuda.device(device):
        for program in compiled.programs:
            if not isinstance(program, ChainProgram):
                continue
            try:
                layouts = cuda_kernel(PRINTERS["triton"](program)).assemble()
            except TargetError as error:
                return error.what
            doubtful += [program] * (layouts > 1)
    return trial.fault_of(doubtful, device)
