"""Which row axes a program should stay at: what it computes from them alone is done once, not for every row."""

from __future__ import annotations

import math

from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import is_open, typical
from megafuse.ir.ops import MAP_FNS
from megafuse.ir.trace import Inst, Trace

MIN_WALK = 64  # rows left to walk, over which the work done once is spread
MIN_SHARE = 0.2  # of the instructions, saved
PACE, LOOP_PACE = 1.0, 0.5  # time of instructions by time of memory from which fewer of them help; in a loop it is free
LOAD_WORK, SPECIAL_WORK, SPLIT_WORK = 3, 8, 8  # instructions an element: a load, an exponential, an index cut in two


def hoisting_axes(trace: Trace, device: DeviceSpec, walked: str | None = None) -> tuple[str, ...]:
    """The row axis to fix per program, or none; not the one that has to be ``walked``.

    Considered where rows are reduced and instructions, not memory, set the pace: rows that share per-row weights or
    statistics of other rows are then walked together, by the axis that saves the most.
    """
    space = trace.nest.space
    if not any(i.kind == "reduce" for i in trace.insts) or is_open(space.num_cols):
        return ()
    looped = any(r.by_rows for r in trace.nest.roots)
    before = _work(trace, frozenset()) if looped else _whole_work(trace)
    elements = typical(space.num_rows * space.num_cols)
    pace = LOOP_PACE if looped else PACE
    if before * elements / (device.fp32_rate / 2) < pace * _memory_seconds(trace, device):
        return ()
    best, least = "", (1 - MIN_SHARE) * before
    for axis in space.rows:
        walk = typical(math.prod(a.size for a in space.rows if a is not axis))
        work = _work(trace, frozenset({axis.name}))
        if axis.name != walked and typical(axis.size) > 1 and walk >= MIN_WALK and work < least:
            best, least = axis.name, work
    return (best,) if best else ()


def _work(trace: Trace, fixed: frozenset[str]) -> float:
    """Instructions an element of a row loop: what depends on the columns and on rows that are walked."""
    walked = trace.nest.space.row_names - fixed
    return sum(_instructions(i) for i in _along_columns(trace) if i.axes & walked)


def _whole_work(trace: Trace) -> float:
    """Instructions an element without a row loop, the cutting of column indices included."""
    cuts = len(trace.nest.space.cols) - 1
    return sum(map(_instructions, _along_columns(trace))) + SPLIT_WORK * cuts


def _along_columns(trace: Trace) -> list[Inst]:
    cols = trace.nest.space.col_names
    return [i for i in trace.insts if i.axes & cols]


def _instructions(inst: Inst) -> int:
    if inst.kind == "load":
        return LOAD_WORK
    special = inst.kind == "map" and inst.fn in MAP_FNS and MAP_FNS[inst.fn].special
    return SPECIAL_WORK if special else 1


def _memory_seconds(trace: Trace, device: DeviceSpec) -> float:
    """Time to touch what is loaded and stored, each value once."""
    sizes = trace.nest.space.sizes
    loads = {
        (i.node, i.index, i.args): math.prod(typical(sizes[a]) for a in i.axes) * i.dtype.size for i in trace.loads()
    }
    stores = [math.prod(map(typical, r.anchor.value.shape)) * r.anchor.value.dtype.size for r in trace.nest.roots]
    return (sum(loads.values()) + sum(stores)) / device.dram_bandwidth
