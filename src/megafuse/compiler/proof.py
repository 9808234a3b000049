"""Chains are assembled, and tried where the assembler is not trusted, before a call runs them.

ptxas 12.8 may lose the address of an operand in shared memory. What can be seen of that in its result is a reason to
plan again. Tiles with narrow lines, where it was found, are also run once, in another process (``trial``).
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
from megafuse.ir.chain import UNIT
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
    narrow: list[trial.Doubtful] = []
    with torch.cuda.device(device):
        for program in compiled.programs:
            if not isinstance(program, ChainProgram):
                continue
            try:
                code = cuda_kernel(PRINTERS["triton"](program)).assemble()
            except TargetError as error:
                return error.what
            if program.turned and program.phases[0].row_tile < UNIT:
                narrow.append((program, code))
    return trial.fault_of(narrow, device)
