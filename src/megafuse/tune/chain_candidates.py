"""Which tiles of a chain to try: forms that fill a device in different ways first, then one factor at a time.

Pure, as ``candidates`` is. How often a matrix is read, how rows are held and how far programs walk all change what
registers and shared memory they take, and so how many of them run at once: what does not fit is left to the compiler.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megafuse.compiler.variants import ChainRules, ChainTile, KernelTiles
from megafuse.core.sizes import ceil_div

BEST_SINGLE = 5  # changes that are tried in pairs
Change = tuple[str, Any]  # a factor and its value


@dataclass(frozen=True)
class Form:
    """Rows, warps and orientation of a tile, and for how many programs an SM is to have work at once."""

    rows: int
    warps: int
    turned: bool
    per_sm: int


WALKS = (
    Form(64, 4, False, 2), Form(64, 8, True, 2), Form(32, 8, True, 2), Form(32, 4, False, 2), Form(128, 8, False, 1),
    Form(64, 4, True, 2), Form(32, 8, True, 1), Form(64, 8, True, 1), Form(64, 4, False, 3), Form(16, 8, True, 2),
    Form(32, 4, False, 4), Form(64, 8, False, 1), Form(128, 8, True, 1), Form(16, 4, False, 4), Form(16, 8, False, 1),
)  # fmt: skip
SUMS = (
    Form(64, 8, True, 1), Form(32, 8, True, 1), Form(16, 8, True, 1), Form(32, 8, True, 2), Form(64, 4, True, 1),
    Form(32, 8, False, 1), Form(128, 8, True, 1), Form(64, 8, True, 2), Form(64, 8, False, 1), Form(32, 4, True, 2),
    Form(16, 4, True, 1), Form(32, 4, False, 1), Form(16, 8, False, 1), Form(64, 16, True, 1),
)  # fmt: skip
PLAIN = (
    Form(1, 4, False, 2), Form(16, 4, False, 2), Form(16, 8, False, 1), Form(1, 8, False, 2), Form(32, 8, False, 1),
    Form(32, 4, False, 1), Form(16, 4, False, 4), Form(1, 2, False, 4), Form(64, 8, False, 1),
)  # fmt: skip


def chain_tiles(
    rules: ChainRules, round_name: str, best: KernelTiles, times: Mapping[KernelTiles, float]
) -> Iterator[KernelTiles]:
    """Legal tiles for a round, the most promising first; some may have been tried.

    None has narrow lines: these have to be tried in another process before they may run, as the heuristic's are. Other
    forms than the best's may not hold the matrices that it loads first: they are tried with none, too.
    """
    makers = {"coarse": _coarse, "factors": _factors, "refine": _refine}
    assert best.chain is not None
    for tile in makers[round_name](rules, best.chain, times):
        if not rules.problem(tile) and not (tile.turned and tile.rows < rules.unit):
            yield as_tiles(tile)
            if tile.first and _form(tile) != _form(best.chain):
                yield as_tiles(replace(tile, first=0))


def _form(tile: ChainTile) -> tuple[int, int, bool]:
    """What decides how many matrices fit."""
    return tile.rows, tile.num_warps, tile.turned


def as_tiles(tile: ChainTile) -> KernelTiles:
    """The tiles of a kernel that is a chain."""
    return KernelTiles((), tile.num_warps, tile)


def changed(tile: ChainTile, changes: Iterable[Change], rules: ChainRules) -> ChainTile:
    """``tile`` with some factors set; what a program walks stays near what it was where another factor decides it."""
    for factor, value in changes:
        if factor == "rows":
            programs = max(_at_once(rules), ceil_div(rules.walk.rows, tile.rows_per_chunk))
            tile = _walking(replace(tile, rows=value), ceil_div(ceil_div(rules.walk.rows, value), programs))
        elif factor == "walk":
            tile = _walking(tile, value)
        elif factor == "early":
            tile = replace(tile, early=value, num_stages=1)
        elif factor == "num_stages":  # another way to load rows before they are needed
            tile = replace(tile, early=False, num_stages=value)
        elif factor == "held":
            tile = replace(tile, held=value, first=0)
        else:
            tile = replace(tile, **{factor: value})
    return tile


def _at_once(rules: ChainRules, per_sm: int = 1) -> int:
    """Programs of each problem that run at once."""
    return max(1, rules.sms * per_sm // rules.walk.problems)


def _walking(tile: ChainTile, steps: int) -> ChainTile:
    """``tile`` with so many row tiles a program."""
    many = steps > 1
    return replace(
        tile,
        rows_per_chunk=steps * tile.rows,
        num_stages=tile.num_stages if many else 1,
        early=tile.early and many,
        first=0 if many else tile.first,
        shares=1 if many else tile.shares,
    )


# --- rounds ---------------------------------------------------------------------------------------------------------


def _coarse(rules: ChainRules, best: ChainTile, times: Mapping[KernelTiles, float]) -> Iterator[ChainTile]:
    """The forms that suit the kind of chain: rows of the next tile come early where there are no sums to hold."""
    for form in PLAIN if rules.plain else SUMS if rules.sums else WALKS:
        tiles = ceil_div(rules.walk.rows, form.rows)
        steps = ceil_div(tiles, min(tiles, _at_once(rules, form.per_sm)))
        early = not (rules.plain or rules.sums)
        tile = replace(best, rows=form.rows, num_warps=form.warps, turned=form.turned, num_stages=1, early=early)
        yield _walking(replace(tile, shares=max(1, min(rules.most_shares, _at_once(rules) // tiles))), steps)


def _factors(rules: ChainRules, best: ChainTile, times: Mapping[KernelTiles, float]) -> Iterator[ChainTile]:
    """One factor at a time; the factors take turns, so that a bound on the number cuts all of them."""
    for turn in itertools.zip_longest(*single_changes(best, rules).values()):
        yield from (changed(best, [change], rules) for change in turn if change is not None)


def _refine(rules: ChainRules, best: ChainTile, times: Mapping[KernelTiles, float]) -> Iterator[ChainTile]:
    """Pairs of single changes, best-timed first, then the neighbours of the best."""
    single = [c for changes in single_changes(best, rules).values() for c in changes]
    timed = [(times.get(as_tiles(changed(best, [c], rules)), math.inf), c) for c in single]
    good = [c for seconds, c in sorted(timed, key=lambda pair: pair[0]) if seconds < math.inf][:BEST_SINGLE]
    for first, second in itertools.combinations(good, 2):
        if first[0] != second[0]:
            yield changed(best, [first, second], rules)
    yield from _factors(rules, best, times)


def single_changes(tile: ChainTile, rules: ChainRules) -> dict[str, list[Change]]:
    """All changes of one factor, nearest values first, by factor."""
    walk = tile.rows_per_chunk // tile.rows
    tiles = ceil_div(rules.walk.rows, tile.rows)
    steps = [1, 2, *(ceil_div(tiles, _at_once(rules, n)) for n in (1, 2, 3, 4))]
    options: dict[str, list[Any]] = {
        "walk": _nearest([*steps, 2 * walk, walk // 2], walk),
        "rows": _nearest([1, tile.rows // 4, tile.rows // 2, 2 * tile.rows, 4 * tile.rows], tile.rows),
        "num_warps": _nearest([2, 4, 8] if rules.plain else [4, 8, 16], tile.num_warps),
        "turned": [not tile.turned],
        "early": [not tile.early],
        "num_stages": _nearest([1, 2, 3], tile.num_stages),
        "held": [not tile.held],
        "first": [n for n in sorted({0, rules.most_first // 2, rules.most_first}) if n != tile.first],
        "shares": _nearest(range(1, rules.most_shares + 1), tile.shares),
    }
    return {factor: [(factor, value) for value in values] for factor, values in options.items()}


def _nearest(values: Iterable[int], at: int) -> list[int]:
    return sorted({v for v in values if v not in (at, 0)}, key=lambda v: (abs(math.log2(v / at)), v))
