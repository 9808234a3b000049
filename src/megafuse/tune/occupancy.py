"""What a compiled kernel takes of a multiprocessor, and what most likely holds it back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.runtime.offline import CompileReport

RESERVED_SHARED = 1024  # bytes that each program takes beside its own
MOST_PROGRAMS = 32  # of an SM
REGISTER_UNIT = 8  # registers of a thread are handed out in such steps
FULL = 0.5  # share of its threads from which an SM hides latency well
MEMORY_BOUND = 0.8  # share of the copy rate from which memory is what holds a kernel back


@dataclass(frozen=True)
class Occupancy:
    """Programs of a kernel that fit on an SM at once, the share of its threads that they fill, and what limits them."""

    programs: int
    share: float
    limit: str


def occupancy(report: CompileReport, warps: int, device: DeviceSpec) -> Occupancy:
    """By registers, shared memory and threads."""
    threads = 32 * warps
    registers = math.ceil(max(report.registers, 1) / REGISTER_UNIT) * REGISTER_UNIT * threads
    room = {
        "registers": device.registers_per_sm // registers,
        "shared memory": (device.shared_per_block + RESERVED_SHARED) // (report.shared + RESERVED_SHARED),
        "threads": device.max_threads_per_sm // threads,
        "programs": MOST_PROGRAMS,
    }
    limit = min(room, key=lambda name: room[name])
    return Occupancy(room[limit], room[limit] * threads / device.max_threads_per_sm, limit)


def misfit(report: CompileReport, warps: int, device: DeviceSpec) -> str:
    """Why a compiled kernel is not worth running, or cannot be; empty where it can."""
    if report.error:
        return f"does not compile: {report.error.splitlines()[-1][:200]}"
    if report.spills:
        return f"spills {report.spills} bytes a thread"
    if report.shared > device.shared_per_block:
        return f"takes {report.shared} bytes of shared memory, {device.shared_per_block} are to be had"
    if occupancy(report, warps, device).programs < 1:
        return f"takes {report.registers} registers in each of {32 * warps} threads"
    return ""


def limiting(copy_share: float, found: Occupancy, programs: int, device: DeviceSpec) -> str:
    """What most likely sets the pace: memory, too few programs to fill the device, or what keeps more from running."""
    if copy_share >= MEMORY_BOUND:
        return "memory"
    if programs < device.sms * found.programs:
        return "few programs"
    return f"{found.limit} (occupancy)" if found.share < FULL else "arithmetic or latency"
