"""Keeping in the L2 cache what several rows of a walk touch: how many programs should share one block of memory.

A gather in short runs fetches whole sectors and uses a part of each; the row next to it in memory uses the next part.
The rows that complete one another's sectors form a *block*. One program that walks a block alone keeps all of it
waiting; where all programs of the GPU together hold more blocks than its cache, sectors are fetched from DRAM again.
So several programs share the walk of a block, and are at work on fewer blocks at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import is_open, typical
from megafuse.ir.graph import Node
from megafuse.ir.index import combine
from megafuse.ir.trace import Inst, Trace

SHORT_RUN = 128  # bytes: shorter contiguous runs waste parts of the sectors they fetch
BLOCK_SHARE = 0.6  # of the L2 cache that blocks may take; the rest is for what only passes through it

Strides = Callable[[Node], tuple[int, ...]]


def short_run_axis(trace: Trace, rows: frozenset[str], strides: Strides) -> str | None:
    """The axis of ``rows`` next to the columns in the memory of the largest load whose contiguous runs are short."""
    found = ((_continues(load, trace, rows, strides), load) for load in tile_loads(trace) if load.axes & rows)
    best = max((x for x in found if x[0]), key=lambda x: typical(x[1].node.type.numel), default=None)
    return best[0] if best else None


def _continues(load: Inst, trace: Trace, rows: frozenset[str], strides: Strides) -> str | None:
    """The axis of ``rows`` whose next value continues a contiguous run of columns, if the run is short."""
    space, run = trace.nest.space, 1
    for name, stride in sorted(combine(load.index, strides(load.node)).terms, key=lambda t: abs(typical(t[1]))):
        if stride not in (run, -run) or name not in space.col_names | rows:
            return None
        if name in rows:
            return name if 1 < typical(run) < SHORT_RUN / load.dtype.size else None
        run *= space.sizes[name]
    return None


def tile_loads(trace: Trace) -> list[Inst]:
    """Loads of values as large as the nest's walk; smaller ones (weights, statistics) come and go."""
    space = trace.nest.space
    whole = typical(space.num_rows * space.num_cols)
    tiles = [i for i in trace.loads() if i.axes & space.col_names and i.axes & space.row_names]
    return [i for i in tiles if 2 * typical(_extent(i, trace)) >= whole]


def _extent(load: Inst, trace: Trace) -> int:
    size = 1
    for axis in load.axes:
        size *= trace.nest.space.sizes[axis]
    return size


def row_bytes(trace: Trace) -> float:
    """Bytes of large values that one row reads, each value once, and writes."""
    space = trace.nest.space
    read = {load.node: load.dtype.size for load in tile_loads(trace)}
    stored = (r for r in trace.nest.roots if not r.by_rows and any(ix.axes & space.col_names for ix in r.index))
    written = (r.anchor.value.dtype.size for r in stored)
    return (sum(read.values()) + sum(written)) * typical(space.num_cols)


def sharers(trace: Trace, axis: str, programs: int, device: DeviceSpec, least: int = 1) -> int:
    """How many of ``programs`` running at once should share the block along ``axis``, with ``least`` rows for each.

    A divisor of the axis's size: the smallest that lets all blocks stay in the cache, or the largest there is.
    """
    size = trace.nest.space.sizes[axis]
    if is_open(size):
        return 1
    blocks = min(programs, typical(trace.nest.space.num_rows) // size)
    wanted = blocks * size * row_bytes(trace) / (BLOCK_SHARE * device.l2_bytes)
    divisors = [n for n in range(1, size + 1) if size % n == 0 and size // n >= least]
    return next((n for n in divisors if n >= wanted), max(divisors, default=1))
