"""The tiles of a kernel: those that measurement chose, where it did, else the heuristic's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import ceil_div, is_open, may_exceed
from megafuse.ir.nest import Root
from megafuse.schedule.identity import kernel_key
from megafuse.schedule.residency import tile_loads
from megafuse.schedule.row_walk import innermost, rows_at_once
from megafuse.schedule.tiling import LONGEST_SUM, TileRequest, choose_tile, most_parts
from megafuse.schedule.types import KernelTiles, Tile, TileRules

Known = Callable[[str], KernelTiles | None]


def nothing_known(key: str) -> None:
    """No kernel has tiles other than the heuristic's."""


@dataclass(frozen=True)
class Choice:
    """Tiles and their rules, one for each phase. ``problem``: why tiles that were known could not be taken."""

    key: str
    tiles: tuple[Tile, ...]
    rules: tuple[TileRules, ...]
    num_warps: int
    problem: str = ""


def choose_tiles(
    requests: Sequence[TileRequest],
    device: DeviceSpec,
    known: Known,
    stored: Callable[[Root], bool],
    blocks_per_sm: int = 0,
) -> Choice:
    """Choose the tiles of a kernel with the given phases.

    ``known(key)`` gives tiles to take in place of the heuristic's. They are taken if they are legal here, and are
    otherwise left with the reason.
    """
    extra = (blocks_per_sm, [is_open(r.chunk_unit) or r.chunk_unit for r in requests], [r.whole_loop for r in requests])
    key = kernel_key([(r.trace, r.fixed) for r in requests], requests[0].strides, stored, extra)
    tiles = tuple(rows_at_once(r, choose_tile(r, device), device) for r in requests)
    rules = tuple(tile_rules(r, t) for r, t in zip(requests, tiles, strict=True))
    heuristic = Choice(key, tiles, rules, _kernel_warps(tiles, blocks_per_sm))
    forced = known(key)
    if forced is None:
        return heuristic
    if len(forced.tiles) != len(tiles):
        return replace(heuristic, problem=f"they are for {len(forced.tiles)} phases, it has {len(tiles)}")
    taken = tuple(settled(t, r) for t, r in zip(forced.tiles, rules, strict=True))
    problems = [r.problem(replace(t, num_warps=forced.num_warps)) for t, r in zip(taken, rules, strict=True)]
    problem = next((p for p in problems if p), "")
    return replace(heuristic, problem=problem) if problem else Choice(key, taken, rules, forced.num_warps)


def tile_rules(request: TileRequest, heuristic: Tile) -> TileRules:
    """What any tile of the phase must satisfy; how columns are held and whether sums are split stays as it is."""
    trace, space = request.trace, request.trace.nest.space
    rows = math.prod(a.size for a in space.rows if a.name not in request.fixed)
    exact = request.by_rows and all(i.dtype.size >= 4 for i in tile_loads(trace))
    return TileRules(
        rows=rows,
        cols=space.num_cols,
        over_cols=any(i.kind == "reduce" for i in trace.insts),
        walked=request.walked,
        whole_loop=request.whole_loop,
        blocked=bool(heuristic.col_block),
        split=may_exceed(rows, heuristic.rows_per_chunk),
        wide=is_open(space.num_cols),
        longest_sum=LONGEST_SUM if exact else 0,
        run=innermost(request) if request.walked else 1,
        parts=most_parts(trace),
    )


def settled(tile: Tile, rules: TileRules) -> Tile:
    """``tile`` with the chunk that follows from its rows where the walk leaves no choice."""
    if rules.whole_loop:
        rows = rules.rows
        chunk = rows * tile.row_tile if is_open(rows) else ceil_div(rows, tile.row_tile) * tile.row_tile
        return replace(tile, rows_per_chunk=chunk)
    return tile if rules.walked else replace(tile, rows_per_chunk=tile.row_tile)


def _kernel_warps(tiles: Sequence[Tile], blocks_per_sm: int) -> int:
    """Phases of one kernel share their warps. Few programs per SM need more to keep as many loads in flight."""
    warps = max(t.num_warps for t in tiles)
    return max(warps, 16 // blocks_per_sm) if blocks_per_sm in (1, 2) else warps
