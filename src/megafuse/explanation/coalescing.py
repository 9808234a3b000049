"""How well a kernel's loads use what memory hands out: sectors of some bytes, of which a scattered read uses few."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from megafuse.core.sizes import typical
from megafuse.ir.graph import Node
from megafuse.ir.index import combine
from megafuse.ir.trace import Inst
from megafuse.ir.traffic import SECTOR
from megafuse.schedule.types import PhaseSchedule


def coalescing(phases: Iterable[PhaseSchedule], strides: Callable[[Node], Sequence[int]]) -> float:
    """Bytes that the loads of tiles use over the bytes of the sectors that they touch; 1.0 where there is no load.

    A load touches whole sectors; it uses as much of each as its tile has elements side by side in memory.
    """
    used = fetched = 0.0
    for phase in phases:
        sizes = phase.trace.nest.space.sizes
        for load in phase.trace.loads():
            count = int(typical(math.prod(sizes[a] for a in load.axes))) * load.parts * load.dtype.size
            used += count
            fetched += count / _share(phase, load, strides(load.node))
    return used / fetched if fetched else 1.0


def _share(phase: PhaseSchedule, load: Inst, strides: Sequence[int]) -> float:
    """Of a sector, what one tile uses; a value that is the same for the whole tile counts as used whole."""
    extents = {n: e for n, e in _extents(phase).items() if n in load.axes}
    if all(e == 1 for e in extents.values()):
        return 1.0
    terms = combine(load.index, strides).terms
    run = max((extents.get(name, 1) for name, stride in terms if stride in (1, -1)), default=1)
    return min(1.0, run * load.dtype.size / SECTOR)


def _extents(phase: PhaseSchedule) -> dict[str, int]:
    """Elements of a tile along each axis: of the fastest of the rows walked, and of the columns."""
    space, tile = phase.trace.nest.space, phase.tile
    cols = tile.col_block or sum(tile.pieces)
    found = {axis.name: min(cols, int(typical(axis.size))) for axis in space.cols}
    if phase.loop:
        found[phase.loop[-1].name] = min(tile.row_tile, int(typical(phase.loop[-1].size)))
    return found
