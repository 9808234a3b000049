"""Which tiles are tried: legal ones, few, and all of them give right results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafuse.compiler.variants import KernelTiles, make_variants, subjects
from megafuse.schedule.types import Tile, TileRules
from megafuse.tune.candidates import MOST, ROUNDS, Move, candidates, changed, legal, piece_options, single_moves
from tune_helpers import CASES, bench_with, subject_of

FREE = TileRules(1000, 640, False, False, False, False, True, False)
ROWS = TileRules(1000, 640, True, False, False, False, True, False)
SUMS = TileRules(1000, 640, True, True, False, False, True, False, longest_sum=64)
PAIRS = TileRules(1000, 640, True, True, False, False, True, False, run=50)
WHOLE = TileRules(1000, 640, False, True, True, False, False, False)
BLOCKS = TileRules(1000, 64000, True, False, False, True, True, False)
LEGAL = {
    "free": (FREE, Tile(2, 2, (256,), col_grid=True)),
    "rows": (ROWS, Tile(1, 1, (512, 128))),
    "sums": (SUMS, Tile(2, 100, (512, 128), num_stages=3)),
    "abreast": (PAIRS, Tile(1, 100, (512, 128), num_stages=3, abreast=2)),
    "whole": (WHOLE, Tile(2, 0, (256,), 256)),
    "blocks": (BLOCKS, Tile(1, 1, (2048,), 2048)),
}
ILLEGAL = [
    ("free", {"row_tile": 3}, "powers of two"),
    ("free", {"pieces": ()}, "powers of two"),
    ("free", {"num_warps": 32}, "more than 16 warps"),
    ("free", {"row_tile": 256, "rows_per_chunk": 256, "num_warps": 1}, "elements a thread"),
    ("free", {"col_grid": False}, "one piece, or spread"),
    ("free", {"pieces": (256, 256)}, "one piece, or spread"),
    ("free", {"pieces": (1024,)}, "one piece, or spread"),
    ("free", {"rows_per_chunk": 4}, "several row tiles"),
    ("free", {"hoist": False}, "without a row loop"),
    ("rows", {"pieces": (512,)}, "do not cover"),
    ("rows", {"pieces": (512, 128, 128)}, "or some are empty"),
    ("rows", {"pieces": (1024,), "col_grid": True}, "all columns in one program"),
    ("rows", {"pieces": (512,), "col_block": 512}, "all columns in one program"),
    ("rows", {"num_stages": 2}, "no row loop"),
    ("sums", {"rows_per_chunk": 101}, "cut tiles"),
    ("sums", {"rows_per_chunk": 200}, "lose bits"),
    ("sums", {"row_tile": 1024, "rows_per_chunk": 1024, "num_warps": 16}, "elements a thread"),
    ("sums", {"row_tile": 16, "rows_per_chunk": 1008, "num_warps": 16, "num_stages": 1}, "come or go"),
    ("sums", {"num_stages": 5}, "1 to 4 stages"),
    ("sums", {"rows_per_chunk": 2}, "no row loop"),
    ("sums", {"hoist": False}, "no row loop"),
    ("sums", {"row_tile": 1, "rows_per_chunk": 64, "abreast": 2}, "not all in one chunk, or along one axis"),
    ("abreast", {"rows_per_chunk": 101}, "not all in one chunk, or along one axis"),
    ("abreast", {"abreast": 4}, "not all in one chunk, or along one axis"),
    ("abreast", {"abreast": 8}, "more than 4 rows abreast"),
    ("abreast", {"abreast": 3}, "powers of two"),
    ("abreast", {"abreast": 0}, "powers of two"),
    ("abreast", {"row_tile": 2}, "loops over single rows"),
    ("abreast", {"rows_per_chunk": 2}, "no row loop"),
    ("whole", {"row_tile": 1, "abreast": 2}, "loops over single rows"),
    ("rows", {"abreast": 2}, "loops over single rows"),
    ("blocks", {"abreast": 2}, "loops over single rows"),
    ("whole", {"num_stages": 2}, "no row loop"),
    ("whole", {"pieces": (128,)}, "blocks of columns"),
    ("blocks", {"pieces": (65536,), "col_block": 0, "num_warps": 16}, "all columns in one program"),
]


@pytest.mark.parametrize("name", LEGAL)
def test_legal_tiles_have_no_problem(name):
    rules, tile = LEGAL[name]
    assert rules.problem(tile) == ""


@pytest.mark.parametrize(("name", "changes", "what"), ILLEGAL)
def test_each_rule_bites(name, changes, what):
    rules, tile = LEGAL[name]
    assert what in rules.problem(replace(tile, **changes))


@pytest.fixture(scope="module", params=CASES)
def compiled(request):
    return CASES[request.param]()


def rounds(subject):
    """Every round's candidates, with made-up times in between."""
    times = {subject.tiles: 1.0}
    for name in ROUNDS:
        found = candidates(subject, name, min(times, key=lambda t: times[t]), times)
        yield name, found, dict(times)
        times |= {t: 0.5 + 0.01 * (n % 7) for n, t in enumerate(found)}


def test_heuristic_tiles_are_legal_by_the_same_rules(compiled):
    for subject in subjects(compiled.step):
        assert [r.problem(t) for r, t in zip(subject.rules, subject.tiles.tiles, strict=True)] == [""] * len(
            subject.rules
        )


def test_candidates_are_new_legal_and_few(compiled):
    for subject in subjects(compiled.step):
        for name, found, before in rounds(subject):
            assert len(found) <= MOST[name]
            assert len(set(found)) == len(found)
            assert not set(found) & set(before)
            assert all(legal(t, subject.rules) for t in found)


def test_every_round_has_something_to_try():
    subject = subject_of(CASES["norms"](), summed=True)
    assert all(found for _, found, _ in rounds(subject))
    factors = candidates(subject, "factors", subject.tiles, {subject.tiles: 1.0})
    base = subject.tiles.tiles[0]
    for factor in ("row_tile", "rows_per_chunk", "pieces", "hoist", "num_warps"):
        assert any(getattr(t.tiles[0], factor) != getattr(base, factor) for t in factors), factor


def test_rows_abreast_are_tried_and_rows_of_a_tile_end_them():
    """A chunk is then a multiple of the rows abreast, and tiles of several rows are none that stand abreast."""
    subject = subject_of(CASES["norms"](), summed=True)
    single = KernelTiles((replace(subject.tiles.tiles[0], row_tile=1, rows_per_chunk=31),), subject.tiles.num_warps)
    wide = changed(single, [Move("abreast", 2)], subject.rules)
    assert [(t.row_tile, t.abreast, t.rows_per_chunk) for t in wide.tiles] == [(1, 2, 32)]
    assert legal(wide, subject.rules)
    assert ("abreast", 2) in {(m.factor, m.value) for m in single_moves(subject, single)["abreast", 0]}
    tall = changed(wide, [Move("rows", 2)], subject.rules)
    assert [(t.row_tile, t.abreast, t.rows_per_chunk) for t in tall.tiles] == [(2, 1, 32)]
    found = candidates(subject, "factors", single, {single: 1.0})
    assert {t.tiles[0].abreast for t in found} >= {1, 2}


def test_candidates_are_the_same_each_time():
    for name in ("block", "plain"):
        first, second = (subjects(CASES[name]().step) for _ in range(2))
        assert [s.key for s in first] == [s.key for s in second]
        assert [list(rounds(s)) for s in first] == [list(rounds(s)) for s in second]


def test_candidates_give_right_results(compiled):
    """Of each round the first, a middle one and the last: made by the schedule stage as asked, and equal in results."""
    bench = bench_with(lambda variant: 1.0)
    for subject in subjects(compiled.step)[:6]:
        reference = make_variants(compiled, {}, [subject.key], "numpy")[subject.key]
        given = bench.given(reference)
        for _, found, _ in rounds(subject):
            for tiles in {id(t): t for t in (*found[:1], *found[len(found) // 2 :][:1], *found[-1:])}.values():
                made = make_variants(compiled, {subject.key: tiles}, [subject.key], "numpy")
                assert made[subject.key].tiles == tiles, subject.name
                assert bench.disagreement(made[subject.key], reference, given) == "", (subject.name, tiles)


def test_a_chunk_changes_the_partial_sums_and_what_adds_them_up():
    compiled = CASES["norms"]()
    subject = subject_of(compiled, summed=True)
    tile = subject.tiles.tiles[0]
    more = KernelTiles((replace(tile, rows_per_chunk=2 * tile.rows_per_chunk),), subject.tiles.num_warps)
    before, after = (make_variants(compiled, t, [subject.key], "numpy")[subject.key] for t in ({}, {subject.key: more}))
    counts = [[p.shape[0] for p in v.places if p.kind == "partial"] for v in (before, after)]
    assert counts[0]
    assert counts[1] == [(n + 1) // 2 for n in counts[0]]
    assert [p.name for p in before.places if p.kind == "made"] == [p.name for p in after.places if p.kind == "made"]


def test_pieces_cover_columns_that_are_no_power_of_two():
    for cols in (65, 100, 640, 1280, 1300, 2560):
        rules = replace(ROWS, cols=cols)
        options = piece_options(Tile(1, 1, (4096,)), rules)
        assert options
        assert all(rules.problem(Tile(1, 1, p, num_warps=16)) == "" for p in options), cols
    assert (512, 512, 256) in piece_options(Tile(1, 1, (2048,), num_warps=2), replace(ROWS, cols=1280))
