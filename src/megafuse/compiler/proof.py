"""Chains are assembled, and tried where the assembler is not trusted, before a call runs them.

ptxas 12.8 may lose the address of an operand in shared memory. What can be seen of that in its result is a reason to
plan again, and so is a kernel that takes more shared memory than there is, or that loads matrices first and spills.
Tiles with narrow lines, where addresses were found lost, are also run once, in another process (``trial``).
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
    """The first compilation whose chains have no fault: as planned, then with less.

    Without matrices that are loaded first (where there are any), without narrow tiles either, without chains.
    """
    compiled, faults = compile_(spec, rule), []
    plain = replace(spec, loads_first=False) if any(p.first for p in _chains(compiled)) else spec
    tries = [(plain, rule)] * (plain is not spec)
    tries += [(replace(plain, narrow_tiles=False), rule), (spec, replace(rule, chain=False))]
    for options in tries:
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
        for program in _chains(compiled):
            try:
                made = cuda_kernel(PRINTERS["triton"](program)).assemble()
            except TargetError as error:
                return error.what
            if made.shared > compiled.device.shared_per_block:
                there = compiled.device.shared_per_block
                return f"kernel {program.name} takes {made.shared} bytes of shared memory, {there} are to be had"
            if program.first and (spills := made.spills()):
                return f"kernel {program.name} loads matrices first and spills {spills} bytes a thread"
            if program.turned and program.row_tile < UNIT:
                narrow.append((program, made.code))
    return trial.fault_of(narrow, device)


def _chains(compiled: Compiled) -> list[ChainProgram]:
    return [p for p in compiled.programs if isinstance(p, ChainProgram)]
