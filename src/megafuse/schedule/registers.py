"""Registers of a program, estimated: what one element of a tile takes, and how many programs an SM then holds."""

from __future__ import annotations

from collections.abc import Sequence

from megafuse.core.device import DeviceSpec
from megafuse.ir.trace import Inst, Trace
from megafuse.schedule.residency import tile_loads

BASE_REGISTERS = 32  # addresses, masks, counters
REGISTER_SLACK = 1.08  # what compilers take beyond the estimate
WORKING_VALUES = 2.5  # fp32 tile values alive beside what was loaded
MAX_WARPS = 16
REGISTER_FILE = 65536  # 32-bit registers of an SM
TWO_ROWS_SHARE = 0.85  # of the estimate for two rows, which counts each working value twice, is what compilers need


def per_element(trace: Trace, fixed: Sequence[str], walked: bool) -> float:
    """Registers per element of a tile: what is loaded (packed), accumulators, what a loop keeps, working values."""
    packed = sum(min(1.0, i.dtype.size / 4) for i in tile_loads(trace))
    if not walked:
        return packed + WORKING_VALUES
    kept, passing = small_loads(trace, fixed)
    return packed + WORKING_VALUES + len(kept) + len(passing) / 2 + _accumulators(trace)


def two_rows(trace: Trace, fixed: Sequence[str], kept: int) -> float:
    """Registers that one column of two rows takes, beside ``kept`` weights and the sums over the rows."""
    return TWO_ROWS_SHARE * (2 * per_element(trace, fixed, True) - kept - _accumulators(trace))


def two_rows_fit(trace: Trace, fixed: Sequence[str], elements: int, warps: int, kept: int) -> bool:
    """Whether registers hold two rows of ``elements`` at once."""
    return registers(elements, two_rows(trace, fixed, kept), warps) <= most_registers(warps)


def _accumulators(trace: Trace) -> int:
    return sum(1 for r in trace.nest.roots if r.by_rows)


def small_loads(trace: Trace, fixed: Sequence[str]) -> tuple[list[Inst], list[Inst]]:
    """Loads along the columns that are smaller than the walk: (the same for all rows of a program, the others)."""
    space = trace.nest.space
    walked = space.row_names - set(fixed)
    whole = set(tile_loads(trace))
    small = [i for i in trace.loads() if i.axes & space.col_names and i not in whole]
    return [i for i in small if not i.axes & walked], [i for i in small if i.axes & walked]


def fewest_warps(elements: int, each: float, most: int) -> int:
    """The fewest warps whose threads hold the tile in ``most`` registers each: fewer warps exchange less."""
    warps = 1
    while warps < MAX_WARPS and registers(elements, each, warps) > most:
        warps *= 2
    return warps


def registers(elements: int, each: float, warps: int) -> float:
    """Estimated registers per thread of a tile of ``elements`` that take ``each``."""
    return BASE_REGISTERS + each * elements / (32 * warps)


def most_registers(warps: int) -> int:
    """Registers a thread may have: the register file is shared by all threads of a program."""
    return min(255, REGISTER_FILE // (32 * warps))


def programs_per_sm(elements: int, each: float, warps: int, device: DeviceSpec) -> int:
    """Programs that an SM holds at once, by their registers."""
    needed = min(max(REGISTER_SLACK * registers(elements, each, warps), 32), most_registers(warps))
    return min(8, max(1, int(device.registers_per_sm // (needed * 32 * warps))))
