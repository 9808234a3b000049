"""What a compiled kernel takes of a multiprocessor, and what most likely holds it back. Numbers in, numbers out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec

RESERVED_SHARED = 1024  # bytes that each program takes beside its own
MOST_PROGRAMS = 32  # of an SM
REGISTER_UNIT = 8  # registers of a thread are handed out in such steps
FULL = 0.5  # share of its threads from which an SM hides latency well
MEMORY_BOUND = 0.8  # share of the copy rate from which memory is what holds a kernel back
FILLED = 0.9  # of the programs that fit at once: as good as all
LAUNCH_BOUND = 0.5  # share of a kernel's time from which its launch is


@dataclass(frozen=True)
class Occupancy:
    """Programs of a kernel that fit on an SM at once, the share of its threads that they fill, and what limits them."""

    programs: int
    share: float
    limit: str


def occupancy(registers: int, shared: int, warps: int, device: DeviceSpec) -> Occupancy:
    """By registers (of a thread), shared memory (bytes of a program) and threads; no program: the kernel cannot run."""
    threads = 32 * warps
    taken = math.ceil(max(registers, 1) / REGISTER_UNIT) * REGISTER_UNIT * threads
    room = {
        "registers": device.registers_per_sm // taken,
        "shared memory": (device.shared_per_block + RESERVED_SHARED) // (shared + RESERVED_SHARED),
        "threads": device.max_threads_per_sm // threads,
        "programs": MOST_PROGRAMS,
    }
    limit = min(room, key=lambda name: room[name])
    return Occupancy(room[limit], room[limit] * threads / device.max_threads_per_sm, limit)


def limiting(copy_share: float, found: Occupancy, programs: int, device: DeviceSpec, launch_share: float = 0.0) -> str:
    """What most likely sets the pace of a kernel of ``programs`` programs.

    Its launch, memory, too few programs to fill the device, or what keeps more of them from running at once.
    ``copy_share``: its DRAM bytes per second over the device's copy rate; ``launch_share``: of its time, the launch.
    """
    if launch_share >= LAUNCH_BOUND:
        return "launch"
    if copy_share >= MEMORY_BOUND:
        return "memory"
    if programs < FILLED * device.sms * found.programs:
        return "few programs"
    return f"{found.limit} (occupancy)" if found.share < FULL else "arithmetic or latency"
