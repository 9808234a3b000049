"""Tile sizes of a phase: a pure function of the nest, its layouts and the device's limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.ir.graph import Node
from megafuse.ir.index import combine
from megafuse.ir.nest import Root
from megafuse.ir.trace import Trace
from megafuse.schedule.types import Tile

TILE_ELEMENTS = 4096  # elements of one tile value that keep a program's loads in flight
VALUES_PER_THREAD = 64  # fp32 values of live tiles per thread
LIVE_TEMPORARIES = 4
REGISTER_BYTES = 200 * 1024
SMALL_ROW = 256  # narrower rows are padded to one power of two
MAX_PAD = 0.125
ROW_CONTIGUOUS_TILE = 32
MAX_WARPS = 16


@dataclass(frozen=True)
class TileRequest:
    """What tiling looks at: axis names that the program fixes, and how many loop rows one program must walk."""

    trace: Trace
    fixed: tuple[str, ...]
    strides: Callable[[Node], tuple[int, ...]]
    whole_loop: bool  # phases of one kernel walk all their loop rows in one program
    blocks_per_sm: int = 0


def next_power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def split_columns(n: int, most: int = 3) -> tuple[int, ...]:
    """Power-of-two widths that cover ``n`` columns with little padding: 1280 is (1024, 256), not 2048."""
    full = next_power_of_two(n)
    if full == n or n <= SMALL_ROW or most == 1 or (full - n) / n <= MAX_PAD:
        return (max(full, 1),)
    rest = n - full // 2
    tail = split_columns(rest, most - 1) if rest > SMALL_ROW else (max(16, next_power_of_two(rest)),)
    return (full // 2, *tail)


def row_contiguous(request: TileRequest) -> bool:
    """True when most tile loads and stores run along a row axis in memory, not along the columns."""
    space = request.trace.nest.space
    votes = 0
    accesses = [(i.node, i.index) for i in request.trace.loads() if i.axes & space.col_names and i.axes & space.row_names]
    accesses += [(r.anchor.value, r.index) for r in request.trace.nest.roots if not r.by_rows and _varies(r, space.col_names)]
    for node, index in accesses:
        offset = combine(index, request.strides(node))
        unit = [name for name, stride in offset.terms if abs(stride) == 1]
        votes += 0 if not unit else (1 if unit[0] in space.row_names else -1)
    return votes > 0


def choose_tile(request: TileRequest, device: DeviceSpec) -> Tile:
    """Choose the tile of one phase."""
    trace = request.trace
    space = trace.nest.space
    by_rows = [r for r in trace.nest.roots if r.by_rows]
    depth = any(i.kind == "reduce" for i in trace.insts)
    loop_rows = math.prod(a.size for a in space.rows if a.name not in request.fixed)
    fixed_rows = math.prod(a.size for a in space.rows if a.name in request.fixed)
    live = _live_values(trace)
    along_rows = row_contiguous(request)
    if depth:
        shape = _whole_rows(space.num_cols, live, along_rows, bool(by_rows))
    else:
        shape = _free_tile(space.num_cols, loop_rows, along_rows)
    rows, pieces, col_block, col_grid, why = shape
    rows = max(1, min(rows, next_power_of_two(loop_rows)))
    elements = rows * sum(pieces)
    warps = _warps(elements * live)
    if request.whole_loop or not by_rows:
        per_chunk = math.ceil(loop_rows / rows) * rows if request.whole_loop else rows
    else:
        columns = math.ceil(space.num_cols / pieces[0]) if col_grid else 1
        per_chunk = _rows_per_chunk(loop_rows, rows, fixed_rows * columns, warps, device)
    return Tile(rows, per_chunk, pieces, col_block, col_grid, warps, why)


def _varies(root: Root, names: frozenset[str]) -> bool:
    return any(ix.axes & names for ix in root.index)


def _live_values(trace: Trace) -> int:
    """Tile values alive at once: loads that vary over rows and columns, column accumulators and a few temporaries."""
    space = trace.nest.space
    loads = sum(1 for i in trace.loads() if i.axes & space.col_names and i.axes & space.row_names)
    accumulators = sum(1 for r in trace.nest.roots if r.by_rows)
    return loads + accumulators + LIVE_TEMPORARIES


TileShape = tuple[int, tuple[int, ...], int, bool, str]


def _whole_rows(cols: int, live: int, along_rows: bool, by_rows: bool) -> TileShape:
    """Row reductions need all columns in one program: at once in registers, or walked in blocks."""
    pieces = split_columns(cols)
    width = sum(pieces)
    if along_rows and not by_rows:
        rows = ROW_CONTIGUOUS_TILE
        if rows * width * live * 4 > REGISTER_BYTES:
            block = max(16, TILE_ELEMENTS // rows)
            return rows, (block,), block, False, "memory runs along rows; columns walked in blocks"
        return rows, pieces, 0, False, "memory runs along rows"
    if width * live * 4 > REGISTER_BYTES and not by_rows:
        return 1, (TILE_ELEMENTS // 2,), TILE_ELEMENTS // 2, False, "a row exceeds the registers; walked in blocks"
    rows = 1 << max(0, (TILE_ELEMENTS // width).bit_length() - 1)
    return rows, pieces, 0, False, "whole rows in registers"


def _free_tile(cols: int, loop_rows: int, along_rows: bool) -> TileShape:
    """No row reduction: columns may be spread over the grid."""
    if along_rows:
        width = min(next_power_of_two(cols), 64)
        return TILE_ELEMENTS // width // 2, (width,), 0, cols > width, "memory runs along rows"
    width = min(next_power_of_two(cols), 1024 if loop_rows > 1 else TILE_ELEMENTS)
    rows = max(1, TILE_ELEMENTS // width)
    return rows, (width,), 0, cols > width, "columns spread over the grid"


def _warps(values: int) -> int:
    threads = next_power_of_two(math.ceil(values / VALUES_PER_THREAD))
    return max(1, min(MAX_WARPS, threads // 32))


def _rows_per_chunk(loop_rows: int, row_tile: int, fixed_programs: int, warps: int, device: DeviceSpec) -> int:
    """Rows one program walks when column reductions leave one partial per program: one or two waves of programs."""
    per_sm = max(1, min(8, 16 // warps))
    chunks = max(1, (device.sms * per_sm) // max(1, fixed_programs))
    rows = math.ceil(loop_rows / chunks)
    return math.ceil(rows / row_tile) * row_tile
