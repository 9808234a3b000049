"""Tile sizes of a phase: a pure function of the nest, its layouts and the device's limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megafuse.core.device import DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.core.sizes import OpenSize, ceil_div, is_open, typical
from megafuse.ir.graph import Node
from megafuse.ir.index import combine
from megafuse.ir.nest import Root
from megafuse.ir.trace import Trace
from megafuse.ir.traffic import SECTOR
from megafuse.schedule.registers import (
    BASE_REGISTERS,
    MAX_WARPS,
    fewest_warps,
    most_registers,
    per_element,
    programs_per_sm,
    registers,
    small_loads,
    two_rows,
    two_rows_fit,
)
from megafuse.schedule.residency import row_bytes, sharers, short_run_axis, tile_loads
from megafuse.schedule.types import Tile

BLOCK_TILE = 5120  # the same for programs that walk a block in phases: few of them run at once
PARTIAL_SHARE = 0.06  # of a program's traffic that its partial column sums may take
GATHER_PARTIAL_SHARE = 0.08  # the same where longer walks fetch sectors twice
MIN_TILE = 1024  # elements of one tile value below which a program has too little to do
MAX_PIECES = 8
TAIL_PENALTY = 0.15  # an unequal last piece costs a second exchange between warps per reduction
FLAT_ROW = 128  # columns that give every lane of a warp some
SMALL_ROW = 256  # narrower rows are padded to one power of two
REGISTERS = 144  # per thread: leaves room for 512 threads of several programs on an SM
LOOP_REGISTERS = 224  # a row loop with column accumulators rather has few fat programs
PIPELINE_STAGES = 3
PAIRED_STAGES = 4
PIPELINE_BYTES = 96 * 1024  # shared memory that the loads in flight of a row loop may take
ROW_CONTIGUOUS_TILE = 32
MIN_ROW_RUN = 8  # rows next to one another in memory that make a whole sector of fp32
MIN_WARPS = 8  # on each SM, at least
ADDED = 9 * 1024  # elements that a program adds up across rows in memory, where runs of 128 bytes leave a choice
FEW_SUMMANDS = 16  # of a sum, below which a tile needs more rows to keep its threads busy
ADDING_WARPS = 4  # of it, at most: more have more to exchange
SUMMED_REGISTERS = 128  # of a thread, for the parts of sums that are made while loading: fewer warps exchange less
SUMMED_WARPS = 8  # of a program that holds a row of them, at most
FULL_GRID = 128  # programs below which smaller tiles are worth it
FREE_TILE = 4096
LONGEST_SUM = 64  # additions in a row of fp32 values: the rounding errors of a running sum grow with its length
UNPIPELINED_WAVES = 2  # without a pipeline, more and shorter loops hide each other's latency


@dataclass(frozen=True)
class TileRequest:
    """What tiling looks at: axis names that the program fixes, and how many loop rows one program must walk."""

    trace: Trace
    fixed: tuple[str, ...]
    strides: Callable[[Node], tuple[int, ...]]
    chunk_unit: int  # rows that programs should not divide among them
    whole_loop: bool  # phases of one kernel walk all their loop rows in one program

    @property
    def by_rows(self) -> bool:
        """It sums over its rows."""
        return any(r.by_rows for r in self.trace.nest.roots)

    @property
    def walked(self) -> bool:
        """A program walks several row tiles."""
        return self.by_rows or self.whole_loop or bool(self.fixed)


def next_power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def power_of_two_below(n: int) -> int:
    """Largest power of two that is at most ``n`` (1 for ``n`` below 1)."""
    return 1 << max(0, n.bit_length() - 1) if n > 0 else 1


def split_columns(n: int) -> tuple[int, ...]:
    """Power-of-two widths that cover ``n`` columns: 1280 is five of 256, not 2048.

    Equal pieces are added up element by element before one reduction; an unequal tail needs a reduction of its own. The
    cheaper of both by padding plus penalty is taken; rows of at most ``SMALL_ROW`` are one padded piece.
    """
    full = next_power_of_two(n)
    if full == n or n <= SMALL_ROW:
        return (max(full, 1),)
    options: list[tuple[int, ...]] = [(full,)]
    width = full // 2
    while width >= 64 and math.ceil(n / width) <= MAX_PIECES:
        options.append((width,) * math.ceil(n / width))
        width //= 2
    options.append((full // 2, max(16, next_power_of_two(n - full // 2))))
    return min(options, key=lambda p: (sum(p) / n + TAIL_PENALTY * (len(set(p)) - 1), len(p)))


def row_runs(request: TileRequest) -> tuple[int, int]:
    """How many tile loads and stores run along a row axis in memory, and how many along the columns."""
    space = request.trace.nest.space
    runs = [0, 0]
    accesses = [
        (i.node, i.index) for i in request.trace.loads() if i.axes & space.col_names and i.axes & space.row_names
    ]
    accesses += [
        (r.anchor.value, r.index) for r in request.trace.nest.roots if not r.by_rows and _varies(r, space.col_names)
    ]
    for node, index in accesses:
        offset = combine(index, request.strides(node))
        unit = [name for name, stride in offset.terms if stride in (1, -1)]
        if unit:
            runs[unit[0] not in space.row_names] += 1
    return runs[0], runs[1]


def most_parts(trace: Trace) -> int:
    """Parts of the longest sum that is made while it is loaded, padded to a power of two; 1 where there is none."""
    return next_power_of_two(max((load.parts for load in trace.loads()), default=1))


def fits_whole(trace: Trace) -> bool:
    """Whether a program can hold a row of the sums that are made while they are loaded."""
    held = sum(split_columns(trace.nest.space.num_cols)) * most_parts(trace)
    return held <= 32 * SUMMED_WARPS * SUMMED_REGISTERS


def summed_tile(trace: Trace) -> Tile:
    """Rows that sums are loaded for: as few as give threads enough to load, held whole."""
    space = trace.nest.space
    pieces = split_columns(space.num_cols)
    held = sum(pieces) * most_parts(trace)
    rows = max(1, power_of_two_below(ADDED // held))
    while rows > 1 and space.num_rows // rows < FULL_GRID:
        rows //= 2
    warps = min(SUMMED_WARPS, power_of_two_below(rows * held // (32 * SUMMED_REGISTERS)))
    return Tile(rows, rows, pieces, num_warps=warps, why="whole rows, whose sums are made while they are loaded")


def choose_tile(request: TileRequest, device: DeviceSpec) -> Tile:
    """Choose the tile of one phase: good for the typical values of open sizes, right for all."""
    trace = request.trace
    if most_parts(trace) > 1:
        return summed_tile(trace)
    space = trace.nest.space
    by_rows = request.by_rows
    all_rows = math.prod(a.size for a in space.rows if a.name not in request.fixed)
    loop_rows: int = typical(all_rows)
    walked = request.walked
    by_row, by_col = row_runs(request)
    along_rows = by_row > by_col
    if any(i.kind == "reduce" for i in trace.insts):
        shape = _whole_rows(trace, along_rows, walked, request.whole_loop, loop_rows)
        if by_row and not along_rows and not request.whole_loop:
            shape = _with_row_runs(request, shape)
    else:
        square = by_row > 0 and not request.whole_loop
        shape = _free_tile(space.num_cols, loop_rows, along_rows or square, request.whole_loop)
    rows = max(1, min(shape.rows, next_power_of_two(loop_rows)))
    elements = rows * sum(shape.pieces)
    each = per_element(trace, request.fixed, walked)
    stages = _stages(trace, request.fixed, elements) if walked and not request.whole_loop and not shape.col_block else 1
    warps = fewest_warps(elements, each, LOOP_REGISTERS if walked and not request.whole_loop else REGISTERS)
    hoist = not walked or registers(elements, each, warps) <= most_registers(warps)
    kept = len(small_loads(trace, request.fixed)[0])
    if hoist and stages == 1 and walked and not request.whole_loop and not by_rows:
        # A loop without a pipeline hides latency by many programs alone: they are worth more than fewer loads from L1.
        hoist = programs_per_sm(elements, each, warps, device) >= programs_per_sm(elements, each - kept, warps, device)
        each -= 0 if hoist else kept
    elif not hoist:  # weights are loaded again for each row rather than spilled
        stages, each = 1, each - kept
        warps = fewest_warps(elements, each, LOOP_REGISTERS)
    if stages > 1 and rows == 1 and not by_rows and hoist and _pairs(trace, request.fixed, elements, warps):
        pair = two_rows(trace, request.fixed, kept)
        if typical(space.num_rows) > 2 * device.sms * programs_per_sm(elements, pair, warps, device):  # it is a walk
            rows, stages, each = 2, PAIRED_STAGES, pair
    if along_rows and not walked and _adds_up(trace):
        warps = min(ADDING_WARPS, warps)
    chunk = rows
    if request.whole_loop:
        chunk = all_rows * rows if is_open(all_rows) else ceil_div(all_rows, rows) * rows
    if walked and not request.whole_loop:
        fixed_rows = typical(math.prod(a.size for a in space.rows if a.name in request.fixed))
        columns = ceil_div(typical(space.num_cols), shape.pieces[0]) if shape.col_grid else 1
        resident = device.sms * programs_per_sm(elements, each, warps, device)
        waves = 1 if stages > 1 else UNPIPELINED_WAVES
        chunk = _rows_per_chunk(loop_rows, rows, fixed_rows * columns, waves * resident)
        spread = ceil_div(loop_rows * fixed_rows * columns * warps, MIN_WARPS * device.sms)
        least = min(_least_walk(trace), spread)
        chunk = max(chunk, ceil_div(least, rows) * rows)
        if request.fixed:
            chunk = min(chunk, _shared_walk(request, chunk, rows, resident, device))
        if by_rows and all(i.dtype.size >= 4 for i in tile_loads(trace)):
            chunk = min(chunk, LONGEST_SUM * rows)
        unit = rows if is_open(request.chunk_unit) else math.lcm(rows, request.chunk_unit)
        if chunk >= unit:  # whole units: more programs than one wave, or many fewer, would cost more than they save
            chunk = ceil_div(chunk, unit) * unit if chunk >= 4 * unit else round(chunk / unit) * unit
    stages = stages if request.whole_loop or chunk > rows else 1
    return Tile(rows, chunk, shape.pieces, shape.col_block, shape.col_grid, warps, stages, hoist, why=shape.why)


def _varies(root: Root, names: frozenset[str]) -> bool:
    return any(ix.axes & names for ix in root.index)


@dataclass(frozen=True)
class _Shape:
    rows: int
    pieces: tuple[int, ...]
    col_block: int
    col_grid: bool
    why: str


def _whole_rows(trace: Trace, along_rows: bool, looped: bool, whole_loop: bool, loop_rows: int) -> _Shape:
    """Row reductions need all columns in one program: at once in registers, or walked in blocks."""
    if is_open(trace.nest.space.num_cols):
        return _open_rows(trace, along_rows, loop_rows)
    cols = trace.nest.space.num_cols
    pieces = split_columns(cols)
    width = sum(pieces)
    most = 32 * MAX_WARPS * (LOOP_REGISTERS - BASE_REGISTERS) / per_element(trace, (), looped)
    if along_rows:
        rows = max(ROW_CONTIGUOUS_TILE, power_of_two_below(MIN_TILE // width))
        if _adds_up(trace):
            tall = power_of_two_below(ADDED // (cols * len(trace.loads())))
            tall = tall if width < FEW_SUMMANDS else min(tall, 2 * ROW_CONTIGUOUS_TILE)
            rows = max(ROW_CONTIGUOUS_TILE, tall)
        while rows > MIN_ROW_RUN and loop_rows // rows < FULL_GRID:
            rows //= 2
        if rows * width > most and not looped:
            block = max(16, FREE_TILE // rows)
            return _Shape(rows, (block,), block, False, "memory runs along rows; columns walked in blocks")
        if rows * width <= most:
            return _Shape(rows, pieces, 0, False, "memory runs along rows")
    if width > most and not any(r.by_rows for r in trace.nest.roots):
        block = min(next_power_of_two(cols), FREE_TILE // 2)
        return _Shape(1, (block,), block, False, "a row exceeds the registers; walked in blocks")
    if not whole_loop and width >= FLAT_ROW and _scattered(trace):
        return _Shape(1, pieces, 0, False, "single rows: loads that do not run along the columns take their layout")
    rows = power_of_two_below((BLOCK_TILE if whole_loop else MIN_TILE) // width)
    return _Shape(rows, pieces, 0, False, "whole rows in registers")


def _adds_up(trace: Trace) -> bool:
    """Whether it does nothing with what it loads but sum over the columns, as what adds up partial sums does.

    Compilers then keep few loads in flight and few registers: the time goes to exchanges between threads. So warps are
    few, and tiles tall, so that few threads share a row.
    """
    cols = trace.nest.space.col_names
    sums = [i for i in trace.insts if i.kind == "reduce"]
    plain = all(i.fn == "sum" and all(a.kind == "load" for a in i.args) for i in sums)
    return bool(sums) and plain and all(i.kind in ("load", "reduce") for i in trace.insts if i.axes & cols)


def _with_row_runs(request: TileRequest, shape: _Shape) -> _Shape:
    """Tiles of as many rows as make a sector of memory, where a part of the accesses runs along the rows.

    Single rows would move a sector for each element of these; Triton turns tiles of several rows in shared memory.
    Where registers hold fewer rows, a half or a quarter of a sector: neighbours find the rest of it in L2. So it is
    where a walk would lose its pipeline.
    """
    trace, walked = request.trace, request.walked
    narrow = min((i.dtype.size for i in tile_loads(trace)), default=DType.F32.size)
    sector, width = SECTOR // narrow, sum(shape.pieces)
    most = 32 * MAX_WARPS * (most_registers(MAX_WARPS) - BASE_REGISTERS) / per_element(trace, (), walked)
    fits = [rows for rows in (sector, sector // 2, sector // 4) if rows * width <= most]
    flows = [rows for rows in fits if walked and _stages(trace, request.fixed, rows * width) > 1]
    rows = next(iter(flows or fits), 1)
    if shape.rows >= rows or shape.col_block:
        return shape
    return replace(shape, rows=rows, why="whole rows in registers, as many as make runs of memory")


def _scattered(trace: Trace) -> bool:
    """Some load varies along the columns, but not from each to the next: a value per group of columns.

    In tiles of several rows Triton gives such loads a layout of their own and exchanges them through shared memory.
    """
    space = trace.nest.space
    last = next((a.name for a in reversed(space.cols) if a.size > 1), "")
    return any(i.axes & space.col_names and last not in i.axes for i in trace.loads())


def _open_rows(trace: Trace, along_rows: bool, loop_rows: int) -> _Shape:
    """Row reductions over an open number of columns: walked in blocks.

    Raises:
        OpenSize: column sums beside them would need all columns at once.
    """
    cols = trace.nest.space.num_cols
    if any(r.by_rows for r in trace.nest.roots):
        raise OpenSize(f"do {cols!r} columns fit a program that also sums over rows")
    block = min(next_power_of_two(typical(cols)), FREE_TILE // 2)
    rows = min(ROW_CONTIGUOUS_TILE, next_power_of_two(loop_rows)) if along_rows else 1
    return _Shape(rows, (max(16, block // rows),), max(16, block // rows), False, "an open number of columns")


def _free_tile(all_cols: int, loop_rows: int, square: bool, whole_loop: bool) -> _Shape:
    """No row reduction: columns may be spread over the grid, or walked by the program that walks a whole block.

    ``square``: some accesses run along the rows. Square tiles serve these and those along the columns.
    """
    cols = typical(all_cols)
    if square:
        tall = min(ROW_CONTIGUOUS_TILE, next_power_of_two(loop_rows))
        width, why = min(next_power_of_two(cols), FREE_TILE // 2 // tall), "memory runs along rows"
    else:
        width = min(next_power_of_two(cols), MIN_TILE if loop_rows > 1 else FREE_TILE)
        if cols > width and loop_rows > 1 and not whole_loop:  # as wide as leaves the fewest columns outside
            width = min((width, width // 2, width // 4), key=lambda w: ceil_div(cols, w) * w)
        why = "columns spread over the grid" if cols > width and not whole_loop else "nothing is reduced"
    wide = is_open(all_cols) or cols > width
    rows = max(1, FREE_TILE // width // 2)
    return _Shape(rows, (width,), width if wide and whole_loop else 0, wide and not whole_loop, why)


def _stages(trace: Trace, fixed: Sequence[str], elements: int) -> int:
    """Depth of the software pipeline of a row loop: as deep as shared memory allows.

    A pipeline takes all loads of the loop through shared memory; small gathers would go there a few bytes at a time.
    """
    if small_loads(trace, fixed)[1]:
        return 1
    size = sum(i.dtype.size for i in tile_loads(trace)) * elements
    return PIPELINE_STAGES if size * PIPELINE_STAGES <= PIPELINE_BYTES else 1


def _pairs(trace: Trace, fixed: Sequence[str], elements: int, warps: int) -> bool:
    """Whether a pipelined loop without column sums takes two rows at a time: half as many exchanges between warps.

    Only where a row has several reductions, and two rows fit with what the loop keeps and their pipeline.
    """
    reductions = sum(1 for i in trace.insts if i.kind == "reduce")
    size = 2 * sum(i.dtype.size for i in tile_loads(trace)) * elements
    kept = len(small_loads(trace, fixed)[0])
    fits = size * PAIRED_STAGES <= PIPELINE_BYTES and two_rows_fit(trace, fixed, elements, warps, kept)
    return reductions > 1 and elements >= MIN_TILE and fits


def _least_walk(trace: Trace, share: float = PARTIAL_SHARE) -> int:
    """Rows one program should walk so that its partial column sums are a small part of what it reads and writes."""
    sums = sum(1 for r in trace.nest.roots if r.by_rows)
    each_row = row_bytes(trace) / typical(trace.nest.space.num_cols)
    written_and_read = 2 * DType.F32.size * sums
    return math.ceil(written_and_read / (share * each_row)) if each_row else 1


def _rows_per_chunk(loop_rows: int, row_tile: int, fixed_programs: int, programs: int) -> int:
    """Rows one program walks when column reductions leave one partial per program: full waves of programs."""
    chunks = max(1, programs // max(1, fixed_programs))
    rows = math.ceil(loop_rows / chunks)
    return math.ceil(rows / row_tile) * row_tile


def _shared_walk(request: TileRequest, chunk: int, rows: int, programs: int, device: DeviceSpec) -> int:
    """Rows one program walks when those that share a block are to keep it in the L2 cache (``residency``)."""
    trace = request.trace
    axis = short_run_axis(trace, trace.nest.space.row_names - set(request.fixed), request.strides)
    if axis is None:
        return chunk
    least = _least_walk(trace, GATHER_PARTIAL_SHARE)
    number = sharers(trace, axis, programs, device, least)
    return chunk if number == 1 else ceil_div(trace.nest.space.sizes[axis] // number, rows) * rows
