"""Which tiles to try: a coarse grid first, then one factor at a time around the best, then what was good together.

Pure: from rules, tiles and measured times to further tiles, each legal by the rules that hold for the heuristic too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megafuse.compiler.variants import KernelTiles, Subject, Tile, TileRules, pieces_of_accesses
from megafuse.core.sizes import typical
from megafuse.tune.chain_candidates import chain_tiles

MOST = {"coarse": 9, "factors": 14, "refine": 6}  # candidates of a round
ROUNDS = tuple(MOST)
WARPS, STAGES, ABREAST = (1, 2, 4, 8, 16), (1, 2, 3, 4), (1, 2, 4)
LEAST_PIECE, MOST_PIECES = 64, 10
ACCESSES = (8, 4)  # elements of 16 bytes
SCALES = (1 / 4, 1 / 2, 2, 4)
LEAST_PER_THREAD = 1 / 2  # elements of one tile value: below, threads hold copies


@dataclass(frozen=True)
class Move:
    """One factor set to a value: warps, or rows, rows abreast, chunk, pieces, stages or hoist of a phase."""

    factor: str
    value: Any
    phase: int = 0


def candidates(
    subject: Subject, round_name: str, best: KernelTiles, times: Mapping[KernelTiles, float]
) -> list[KernelTiles]:
    """Tiles to try in a round: new, legal, at most ``MOST[round_name]``, the most promising first.

    ``times``: seconds of what was tried so far, infinite where it failed. ``best``: the fastest of them.
    """
    made: dict[KernelTiles, None] = {}
    for tiles in _options(subject, round_name, best, times):
        if tiles not in times:
            made[tiles] = None
        if len(made) == MOST[round_name]:
            break
    return list(made)


def _options(
    subject: Subject, round_name: str, best: KernelTiles, times: Mapping[KernelTiles, float]
) -> Iterator[KernelTiles]:
    """Legal tiles for a round, the most promising first."""
    if subject.chain is not None:
        yield from chain_tiles(subject.chain, round_name, best, times)
        return
    makers = {"coarse": _coarse, "factors": _factors, "refine": _refine}
    for moves in makers[round_name](subject, best, times):
        tiles = changed(best, moves, subject.rules)
        if tiles is not None and legal(tiles, subject.rules):
            yield tiles


def legal(tiles: KernelTiles, rules: Sequence[TileRules]) -> bool:
    """Every phase's tile satisfies its rules, and no thread has nothing to do."""
    pairs = zip(tiles.tiles, rules, strict=True)
    least = LEAST_PER_THREAD * 32 * tiles.num_warps
    busy = any(t.row_tile * sum(t.pieces) >= least for t in tiles.tiles)
    return (busy or tiles.num_warps == 1) and not any(r.problem(t) for t, r in pairs)


def changed(tiles: KernelTiles, moves: Iterable[Move], rules: Sequence[TileRules]) -> KernelTiles | None:
    """``tiles`` after some moves; None where a move does not fit."""
    for move in moves:
        if move.factor == "warps":
            warps = int(move.value)
            tiles = KernelTiles(tuple(replace(t, num_warps=warps) for t in tiles.tiles), warps)
            continue
        tile = _changed_tile(tiles.tiles[move.phase], move, rules[move.phase])
        if tile is None:
            return None
        tiles = replace(tiles, tiles=(*tiles.tiles[: move.phase], tile, *tiles.tiles[move.phase + 1 :]))
    return tiles


def _changed_tile(tile: Tile, move: Move, rules: TileRules) -> Tile | None:
    if move.factor == "rows":
        rows = int(move.value)
        return _with_chunk(replace(tile, row_tile=rows, abreast=1), tile.rows_per_chunk, rules)
    if move.factor == "abreast":
        return _with_chunk(replace(tile, abreast=int(move.value)), tile.rows_per_chunk, rules)
    if move.factor == "chunk":
        return _with_chunk(tile, move.value, rules)
    if move.factor == "pieces":
        return _with_pieces(tile, move.value, rules)
    if move.factor == "stages":
        return replace(tile, num_stages=move.value)
    return replace(tile, hoist=move.value, num_stages=tile.num_stages if move.value else 1)


def _with_chunk(tile: Tile, rows: float, rules: TileRules) -> Tile:
    """Chunks of about ``rows`` rows, where the walk leaves a choice."""
    if rules.whole_loop:
        return replace(tile, rows_per_chunk=0)  # the schedule stage knows how many there are
    if not rules.walked:
        return replace(tile, rows_per_chunk=tile.row_tile)
    steps = max(1, round(rows / (tile.row_tile * tile.abreast)))
    steps = min(steps, rules.longest_sum // tile.abreast) if rules.longest_sum else steps
    chunk = steps * tile.row_tile * tile.abreast
    return replace(tile, rows_per_chunk=chunk, num_stages=tile.num_stages if steps > 1 else 1)


def _with_pieces(tile: Tile, pieces: tuple[int, ...], rules: TileRules) -> Tile | None:
    if rules.over_cols:
        return replace(tile, pieces=pieces, col_block=pieces[0] if rules.blocked else 0)
    wide = rules.wide or typical(rules.cols) > pieces[0]
    block = pieces[0] if wide and rules.whole_loop else 0
    return replace(tile, pieces=pieces, col_block=block, col_grid=wide and not rules.whole_loop)


# --- rounds ---------------------------------------------------------------------------------------------------------


def _coarse(subject: Subject, best: KernelTiles, times: Mapping[KernelTiles, float]) -> Iterator[tuple[Move, ...]]:
    """Warps by rows, nearest first."""
    grid = [(w, r) for w, r in itertools.product((1, 2, 1 / 2, 4), (1, 2, 1 / 2, 4)) if (w, r) != (1, 1)]
    for w, r in sorted(grid, key=lambda pair: sum(abs(math.log2(f)) for f in pair)):
        rows = [_rows_move(best, p, r, subject.rules[p]) for p in range(len(best.tiles))] if r != 1 else []
        yield (*([Move("warps", round(best.num_warps * w))] if w != 1 else []), *(m for m in rows if m))


def _factors(subject: Subject, best: KernelTiles, times: Mapping[KernelTiles, float]) -> Iterator[tuple[Move, ...]]:
    """One factor at a time; the factors take turns, so that a bound on the number cuts all of them."""
    turns = [[(m,) for m in moves] for moves in single_moves(subject, best).values()]
    for row in itertools.zip_longest(*turns):
        yield from (m for m in row if m is not None)


def _refine(subject: Subject, best: KernelTiles, times: Mapping[KernelTiles, float]) -> Iterator[tuple[Move, ...]]:
    """Pairs of single changes, best-timed first, then the neighbours of the best."""
    single = [m for moves in single_moves(subject, best).values() for m in moves]
    timed = [(times.get(t, math.inf), m) for m in single if (t := changed(best, (m,), subject.rules)) is not None]
    good = [m for seconds, m in sorted(timed, key=lambda pair: pair[0]) if seconds < math.inf][:5]
    for first, second in itertools.combinations(good, 2):
        if (first.factor, first.phase) != (second.factor, second.phase):
            yield (first, second)
    yield from _factors(subject, best, times)


def single_moves(subject: Subject, tiles: KernelTiles) -> dict[tuple[str, int], list[Move]]:
    """All changes of one factor, nearest values first, by factor and phase."""
    found = {("warps", 0): [Move("warps", w) for w in _nearest(WARPS, tiles.num_warps)]}
    for phase, (tile, rules) in enumerate(zip(tiles.tiles, subject.rules, strict=True)):
        rows = [m for s in (1 / 2, 2, 1 / 4, 4) if (m := _rows_move(tiles, phase, s, rules))]
        found["rows", phase] = rows
        found["pieces", phase] = [Move("pieces", p, phase) for p in piece_options(tile, rules) if p != tile.pieces]
        if rules.walked and not rules.whole_loop:
            chunk = tile.rows_per_chunk
            found["chunk", phase] = [Move("chunk", chunk * s, phase) for s in (1 / 2, 2, 1 / 4, 4)]
            found["stages", phase] = [Move("stages", n, phase) for n in _nearest(STAGES, tile.num_stages)]
            found["abreast", phase] = [Move("abreast", n, phase) for n in _nearest(ABREAST, tile.abreast)]
            found["hoist", phase] = [Move("hoist", not tile.hoist, phase)]
    return found


def _rows_move(tiles: KernelTiles, phase: int, scale: float, rules: TileRules) -> Move | None:
    rows = tiles.tiles[phase].row_tile * scale
    most = 1 << max(0, (typical(rules.rows) - 1).bit_length())
    return Move("rows", int(rows), phase) if 1 <= rows <= most else None


def _nearest(values: Sequence[int], at: int) -> list[int]:
    return sorted((v for v in values if v != at), key=lambda v: (abs(math.log2(v / at)), v))


def piece_options(tile: Tile, rules: TileRules) -> list[tuple[int, ...]]:
    """Ways to hold the columns: whole in equal pieces or with a tail, or in blocks of other widths."""
    cols = typical(rules.cols)
    full = 1 << max(0, (cols - 1).bit_length())
    if not rules.over_cols or rules.blocked:
        widths = [int(tile.pieces[0] * s) for s in SCALES]
        return [(w,) for w in widths if 16 <= w <= full]
    found: list[tuple[int, ...]] = [(full,)]
    width = full // 2
    while width >= LEAST_PIECE and math.ceil(cols / width) <= MOST_PIECES:
        found.append((width,) * math.ceil(cols / width))
        width //= 2
    rest = cols - full // 2
    if full // 2 >= LEAST_PIECE and rest > 0:
        found.append((full // 2, max(16, 1 << (rest - 1).bit_length())))
    found += [p for n in ACCESSES if (p := pieces_of_accesses(cols, tile.num_warps, n))]
    padding = {p: sum(p) for p in dict.fromkeys(found)}
    return sorted(padding, key=lambda p: (padding[p], len(p)))
