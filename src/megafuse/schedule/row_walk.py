"""How a program walks its rows: in which order, how many side by side, and in which pieces each thread holds a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megafuse.core.device import ACCESS_BYTES, DeviceSpec
from megafuse.core.sizes import divides, is_open, typical
from megafuse.ir.graph import Node
from megafuse.ir.index import Axis, Index, combine
from megafuse.ir.trace import Trace
from megafuse.schedule.registers import per_element, programs_per_sm, small_loads, two_rows, two_rows_fit
from megafuse.schedule.residency import short_run_axis, tile_loads
from megafuse.schedule.tiling import MAX_PIECES, PIPELINE_BYTES, TileRequest, next_power_of_two
from megafuse.schedule.types import Tile

LEAST_ROWS = 8  # of a walk in which an odd row more costs little, and pairs leave a loop
FEW_PROGRAMS = 2  # of an SM: they do not hide each other's exchanges
ABREAST = 2  # four rows were slower in all kernels measured
BRANCHING = frozenset({"div", "sin", "cos", "tan", "fmod", "remainder", "floordiv", "lgamma", "digamma"})
IN_ACCESS = 8  # elements of 16 bits; wider runs of 8-bit values are not worth more registers


def walk_order(trace: Trace, fixed: Sequence[str], strides: Callable[[Node], tuple[int, ...]]) -> tuple[Axis, ...]:
    """Loop rows, outermost first.

    A gather in short runs wants the row axis that continues its runs innermost, so that neighbours share the sectors
    they fetch. Otherwise the largest value touched decides: largest memory step outermost.
    """
    rows = [a for a in trace.nest.space.rows if a.name not in fixed]
    names = frozenset(a.name for a in rows)
    touched = [(i.node, i.index) for i in trace.loads()] + [(r.anchor.value, r.index) for r in trace.nest.roots]
    node, index = max(touched, key=lambda t: (len(_axes(t[1]) & names), typical(t[0].type.numel)))
    step = dict(combine(index, strides(node)).terms)
    order = sorted(rows, key=lambda a: -abs(typical(step.get(a.name, 0))))
    inner = short_run_axis(trace, names, strides)
    return tuple(sorted(order, key=lambda a: a.name == inner))


def _axes(index: Index) -> frozenset[str]:
    return frozenset().union(*(ix.axes for ix in index)) if index else frozenset()


def innermost(request: TileRequest) -> int:
    """Rows that are neighbours along one axis: the size of the innermost axis of the walk that has several."""
    loop = walk_order(request.trace, request.fixed, request.strides)
    return next((a.size for a in reversed(loop) if a.size != 1), 1)


def rows_at_once(request: TileRequest, tile: Tile, device: DeviceSpec) -> Tile:
    """``tile``, with single rows abreast where one alone leaves threads waiting, and in pieces of one access each.

    That is for rows of 16-bit values. Of 32-bit ones a row takes twice the registers, and its bytes the time that would
    hide an exchange.
    """
    single = tile.row_tile == 1 and not tile.col_block and not tile.col_grid
    if not single or request.whole_loop or not request.walked or not _narrow(request.trace):
        return tile
    tile = _abreast(request, tile, device)
    if tile.num_stages == tile.abreast == 1:
        return tile
    pieces = pieces_of_accesses(request.trace.nest.space.num_cols, tile.num_warps, IN_ACCESS)
    return replace(tile, pieces=pieces) if pieces and sum(pieces) <= sum(tile.pieces) else tile


def _abreast(request: TileRequest, tile: Tile, device: DeviceSpec) -> Tile:
    """``tile`` with two rows abreast, where a row has several reductions and nothing hides their exchanges.

    That is so in a pipelined loop where an SM holds one program or two, and as many of those with two rows; without a
    pipeline, several programs hide them, and two rows abreast were slower. A loop that leaves no sums and keeps no
    weights is none then, where it gathers in short runs: programs are as short as can be, and the rows of one complete
    each other's sectors. The arithmetic of two rows interleaves only where it has no branches: IEEE division and the
    reduction of large angles have some.
    """
    trace, elements = request.trace, sum(tile.pieces)
    reductions = sum(1 for i in trace.insts if i.kind == "reduce")
    if reductions < 2 or tile.num_warps == 1 or not _even(request, tile) or _branches(trace):
        return tile
    kept = len(small_loads(trace, request.fixed)[0])
    each = per_element(trace, request.fixed, True) - (0 if tile.hoist else kept)
    loads = ABREAST * sum(i.dtype.size for i in tile_loads(trace)) * elements * tile.num_stages
    if not two_rows_fit(trace, request.fixed, elements, tile.num_warps, kept):
        return tile
    held = programs_per_sm(elements, each, tile.num_warps, device)
    pairs = programs_per_sm(elements, two_rows(trace, request.fixed, kept), tile.num_warps, device)
    few = tile.num_stages > 1 and held <= min(FEW_PROGRAMS, pairs)
    if request.by_rows and few and loads <= PIPELINE_BYTES and tile.rows_per_chunk >= LEAST_ROWS:
        return replace(tile, abreast=ABREAST, rows_per_chunk=tile.rows_per_chunk + tile.rows_per_chunk % ABREAST)
    short = tile.num_stages == 1 and not tile.hoist and not request.by_rows and _short_runs(request)
    return replace(tile, abreast=ABREAST, rows_per_chunk=ABREAST) if short else tile


def _branches(trace: Trace) -> bool:
    """Whether values of the whole tile go through branches, or calls for rare arguments."""
    cols = trace.nest.space.col_names
    return any(i.kind == "map" and i.fn in BRANCHING and i.axes & cols for i in trace.insts)


def _short_runs(request: TileRequest) -> bool:
    rows = request.trace.nest.space.row_names - set(request.fixed)
    return short_run_axis(request.trace, rows, request.strides) is not None


def _even(request: TileRequest, tile: Tile) -> bool:
    """Whether rows can go in pairs: along the innermost axis, and in chunks that keep what they should."""
    unit = request.chunk_unit
    kept = not is_open(unit) and (unit == 1 or tile.rows_per_chunk % ABREAST == 0)
    return tile.rows_per_chunk > 1 and kept and divides(ABREAST, innermost(request))


def _narrow(trace: Trace) -> bool:
    """Whether one access of a thread takes ``IN_ACCESS`` elements of whatever a row reads and writes.

    Where only some values are so narrow, Triton gives others another layout, and moves them through shared memory.
    """
    cols = trace.nest.space.col_names
    roots = (r for r in trace.nest.roots if not r.by_rows and any(ix.axes & cols for ix in r.index))
    values = [i.dtype for i in tile_loads(trace)] + [r.anchor.value.dtype for r in roots]
    return all(dtype.size * IN_ACCESS <= ACCESS_BYTES for dtype in values)


def pieces_of_accesses(cols: int, warps: int, each: int) -> tuple[int, ...]:
    """Widths of ``each`` elements a thread, and a narrower tail: 2560 columns of 8 warps are 2048 and 512.

    A tail that gives every thread something is added to the other pieces inside threads, without an exchange. Empty
    where there is no narrower tail, columns do not come in whole accesses, or there would be too many pieces.
    """
    threads = 32 * warps
    width = threads * each
    if is_open(cols) or cols % each or not width < cols <= width * MAX_PIECES:
        return ()
    full, rest = divmod(cols, width)
    tail = max(threads, next_power_of_two(rest))
    return (*(width,) * full, tail) if rest and tail < width else ()
