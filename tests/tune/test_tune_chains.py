"""Tiles of chains: legal ones are tried, the fastest that is right is kept, and a plan file brings it back."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from megafuse.cli.measured import tile_text
from megafuse.compiler import KnownTiles, reschedule
from megafuse.compiler.plans import tiles_as_data
from megafuse.compiler.variants import (
    ChainRules,
    ChainTile,
    KernelTiles,
    Subject,
    in_precision,
    make_variants,
    subjects,
)
from megafuse.core.dtypes import DType
from megafuse.ir.chain import Walk
from megafuse.runtime.offline import CompileReport
from megafuse.runtime.plan_store import Entry, TuningWarning, read_entry, read_plan, write_entry, write_plan
from megafuse.tune.bench import Bench
from megafuse.tune.candidates import MOST, ROUNDS, candidates
from megafuse.tune.chain_candidates import chain_tiles, changed
from megafuse.tune.occupancy import misfit
from megafuse.tune.step import compiler, entries_of, run
from tune_chains import CHAINS, RUN, by_form, chained, mlp
from tune_helpers import CASES, DEVICE, bench_with

HERE = Path(__file__).parent
WALK = ChainRules(Walk(1, 10_000), 128, sums=False, split=True, plain=False, turns=True, narrow=True, unit=64, sms=132)
SUMS = replace(WALK, sums=True)
WHOLE = replace(SUMS, walk=Walk(1, 100), split=False)
SHARED = replace(SUMS, walk=Walk(1, 100), most_shares=3)
PLAIN = replace(WALK, width=64, plain=True, turns=False)
LEGAL = {
    "walk": (WALK, ChainTile(64, 128, 4, 2, early=True)),
    "sums": (SUMS, ChainTile(32, 96, 8, turned=True)),
    "whole": (WHOLE, ChainTile(32, 128, 8, turned=True)),
    "shared": (SHARED, ChainTile(32, 32, 8, turned=True, shares=3)),
    "plain": (PLAIN, ChainTile(1, 76, 4, held=False)),
}
ILLEGAL = [
    ("walk", {"rows": 48, "rows_per_chunk": 96}, "powers of two"),
    ("walk", {"num_warps": 0}, "powers of two"),
    ("walk", {"num_warps": 32}, "more than 16 warps"),
    ("walk", {"rows": 512, "rows_per_chunk": 1024}, "elements a thread"),
    ("walk", {"rows": 8, "rows_per_chunk": 16}, "16 rows or more"),
    ("walk", {"rows": 1, "rows_per_chunk": 2}, "16 rows or more"),
    ("walk", {"rows_per_chunk": 96}, "cut tiles"),
    ("walk", {"rows_per_chunk": 0}, "cut tiles"),
    ("walk", {"rows_per_chunk": 64}, "no row loop"),
    ("shared", {"shares": 4}, "1 to 3 programs"),
    ("shared", {"shares": 0}, "1 to 3 programs"),
    ("shared", {"rows_per_chunk": 64}, "share none"),
    ("walk", {"rows_per_chunk": 64, "num_stages": 1}, "no row loop"),
    ("walk", {"num_stages": 0}, "1 to 4 stages"),
    ("walk", {"num_stages": 5}, "1 to 4 stages"),
    ("walk", {"rows_per_chunk": 64 << 20}, "not there"),
    ("sums", {"rows_per_chunk": 32 * 400}, "come or go"),
    ("whole", {"rows_per_chunk": 32}, "come or go"),
    ("plain", {"turned": True}, "cannot be columns by rows"),
    ("plain", {"rows": 4}, "16 rows or more"),
]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAFUSE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def steps():
    """Compiled once each, when asked for."""
    return functools.cache(lambda name: CHAINS[name]())


def chain_subjects(compiled) -> list[Subject]:
    return [s for s in subjects(compiled.step) if s.chain is not None]


# --- rules and candidates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEGAL)
def test_legal_tiles_have_no_problem(name):
    rules, tile = LEGAL[name]
    assert rules.problem(tile) == ""


@pytest.mark.parametrize(("name", "changes", "what"), ILLEGAL)
def test_each_rule_bites(name, changes, what):
    rules, tile = LEGAL[name]
    assert what in rules.problem(replace(tile, **changes))


def test_narrow_tiles_of_columns_by_rows_need_a_device_that_makes_them_right():
    tile = LEGAL["sums"][1]
    assert "not trusted" in replace(SUMS, narrow=False).problem(tile)
    assert replace(SUMS, narrow=False).problem(replace(tile, turned=False)) == ""
    assert replace(SUMS, narrow=False).problem(replace(tile, rows=64, rows_per_chunk=64)) == ""


@pytest.mark.parametrize("name", CHAINS)
def test_candidates_are_new_legal_and_few(name, steps):
    compiled = steps(name)
    found = chain_subjects(compiled)
    assert found
    for subject in found:
        assert subject.chain.problem(subject.tiles.chain) == "", "the heuristic's"
        times = {subject.tiles: 1.0}
        for round_name in ROUNDS:
            best = min(times, key=lambda t: times[t])
            tiles = candidates(subject, round_name, best, times)
            assert 0 < len(tiles) <= MOST[round_name]
            assert len(set(tiles)) == len(tiles)
            assert not set(tiles) & set(times)
            assert [subject.chain.problem(t.chain) for t in tiles] == [""] * len(tiles)
            assert tiles == candidates(subject, round_name, best, times), "the same each time"
            times |= {t: 0.5 + 0.01 * (n % 7) for n, t in enumerate(tiles)}
        assert len({t.chain.rows for t in times}) > 1
        assert len({t.num_warps for t in times}) > 1


def test_several_ways_to_fill_a_device_are_tried(steps):
    """For many rows: programs beside one another with small tiles, one with large ones, both orientations."""
    (subject,) = chain_subjects(steps("square forward"))
    found = [t.chain for t in (subject.tiles, *candidates(subject, "coarse", subject.tiles, {subject.tiles: 1.0}))]
    programs = {(t.rows, t.num_warps, t.turned): -(-65536 // t.rows_per_chunk) for t in found}
    assert {(64, 4, False), (64, 8, True), (32, 4, False), (128, 8, False)} <= set(programs)
    assert programs[64, 4, False] > DEVICE.sms
    later = [t.chain for t in candidates(subject, "factors", subject.tiles, {subject.tiles: 1.0})]
    base = subject.tiles.chain
    for factor in ("rows", "num_warps", "num_stages", "held", "turned", "early", "rows_per_chunk"):
        assert any(getattr(t, factor) != getattr(base, factor) for t in later), factor


def test_rows_of_a_tile_leave_the_number_of_programs_near_what_it_was():
    tile = ChainTile(64, 128, 4)
    for rows in (16, 32, 128, 256):
        other = changed(tile, [("rows", rows)], WALK)
        assert other.rows_per_chunk % rows == 0
        assert abs(-(-10_000 // other.rows_per_chunk) - 79) <= 60
    assert changed(replace(tile, early=True, num_stages=3), [("walk", 1)], WALK) == ChainTile(64, 64, 4)


@pytest.mark.parametrize("round_name", ["coarse", "factors"])
def test_other_forms_are_tried_without_matrices_loaded_first_too(round_name):
    rules, best = replace(SHARED, most_first=3), ChainTile(64, 64, 8, turned=True, first=3)
    found = [t.chain for t in chain_tiles(rules, round_name, KernelTiles((), 8, best), {})]
    others = [t for t in found if t.first and (t.rows, t.num_warps, t.turned) != (64, 8, True)]
    assert others
    assert all(replace(t, first=0) in found for t in others)


@pytest.mark.parametrize("name", RUN)
def test_candidates_compute_what_the_heuristic_does(name, steps):
    compiled = steps(name)
    bench = bench_with(lambda variant: 1.0)
    for subject in chain_subjects(compiled):
        reference = make_variants(compiled, {}, [subject.key], "numpy")[subject.key]
        given = bench.given(reference)
        tried = [t for r in ("coarse", "factors") for t in candidates(subject, r, subject.tiles, {subject.tiles: 1.0})]
        for tiles in tried[::3]:
            made = make_variants(compiled, {subject.key: tiles}, [subject.key], "numpy")
            assert made[subject.key].tiles == tiles
            assert bench.disagreement(made[subject.key], reference, given) == ""


# --- the computation in fp64 ------------------------------------------------------------------------------------------


def test_chains_in_fp64_are_right_under_the_interpreter():
    pytest.importorskip("triton")
    paths = os.pathsep.join(map(str, (HERE.parents[1] / "src", HERE, HERE.parent / "codegen")))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", str(HERE / "tune_interpret.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len({name for name, *_ in rows}) == 2, "forward and backward"
    assert all(float(difference) <= 1e-13 * float(size) for _, _, difference, size in rows), rows


def test_the_computation_in_fp64_has_fewer_errors(steps):
    """Beside fp16 it is exact: NumPy's results of the two differ by roundings, and by more than fp32's."""
    compiled = steps("small")
    bench = bench_with(lambda variant: 1.0)
    for subject in chain_subjects(compiled):
        variant = make_variants(compiled, {}, [subject.key], "numpy")[subject.key]
        given = bench.given(variant)
        rounded = bench.results(variant, given)
        exact, single = (bench._precise(variant, given, d) for d in (DType.F64, DType.F32))
        for name, value in exact.items():
            assert value.dtype is torch.float64
            size = value.norm()
            assert (single[name] - value).norm() < 1e-5 * size
            assert 1e-5 * size < (rounded[name] - value).norm() < 0.02 * size


# --- the search -------------------------------------------------------------------------------------------------------


def tuned(compiled, bench, compile_=None, **options):
    return run(compiled, bench, compile_, seconds=200.0, **options)


def test_the_fastest_tiles_win_are_kept_and_found_again(steps, tmp_path):
    compiled = steps("ragged")
    result = tuned(compiled, bench_with(by_form(16, 4)))
    assert result.stopped == ""
    assert result.problems == ()
    won = {k.subject.name: k.tiles.chain for k in result.kernels if k.tiles.chain is not None}
    assert len(won) == 2, "forward and backward"
    assert all((t.rows, t.num_warps) == (16, 4) for t in won.values())
    again = reschedule(compiled, KnownTiles(DEVICE.name))
    assert {s.name: replace(s.tiles.chain, why="") for s in chain_subjects(again)} == won
    assert not again.step.notes
    keys = {s.key for s in subjects(again.step)}
    assert keys == {k.subject.key for k in result.kernels} & keys, "what adds up the partial sums is tuned too"
    write_plan(tmp_path / "plan.json", DEVICE.name, entries_of(compiled))
    plan = KnownTiles(DEVICE.name, read_plan(tmp_path / "plan.json"), required=True)
    pinned = reschedule(compiled, plan)
    assert [s.tiles for s in subjects(pinned.step)] == [s.tiles for s in subjects(again.step)]
    assert plan.missing(pinned) == []
    assert tuned(compiled, bench_with(lambda variant: 1.0)).kernels == (), "a second run measures nothing"


def test_chains_are_timed_with_what_adds_up_their_sums(steps):
    compiled = steps("ragged")
    _, back = chain_subjects(compiled)
    variant = make_variants(compiled, {}, [back.key], "numpy")[back.key]
    assert len(variant.sources) == 2, "one launch adds up all sums"
    assert {p.kind for p in variant.places} == {"given", "made", "partial"}
    assert [k.finishes for k in compiled.step.kernels if k.finishes] == [back.key]


@dataclass(frozen=True)
class Faulty(Bench):
    """Chains with 4 warps give one wrong element, or one that changes from run to run."""

    repeatable: bool = True

    def results(self, variant, given):
        found = super().results(variant, given)
        if variant.tiles.chain is not None and variant.tiles.num_warps == 4:
            first = next(iter(found.values())).view(-1)
            first[0] += (1 + first[0].abs()) * (0.5 if self.repeatable else torch.rand(()))
        return found


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_fast_chain_that_is_wrong_is_never_taken(repeatable, steps):
    compiled, plain = steps("ragged"), bench_with(by_form(16, 4))
    (back,) = [s.key for s in chain_subjects(compiled) if s.tiles.num_warps != 4]
    for bench, wins in ((plain, True), (Faulty(plain.device, plain.backend, plain.timer, repeatable), False)):
        (found,) = [k for k in tuned(compiled, bench, again=True).kernels if k.subject.key == back]
        assert (found.tiles.num_warps == 4) is wins
        assert wins or any(word in reason for reason in found.rejected for word in ("acceptance rule", "repeat"))


def test_what_spills_no_more_than_the_heuristic_is_run(steps):
    """Where sums fill the registers, all tiles may spill a little."""
    compiled = steps("ragged")
    (back,) = [s for s in chain_subjects(compiled) if s.tiles.num_warps == 8]

    def taken(own, others):
        def compile_(sources, seconds):
            spills = {(back.name, 8): own, (back.name, 4): others}
            found = [spills.get((s.entry, s.num_warps), 0) for s in sources]
            made = zip(sources, found, strict=True)
            return [CompileReport(s.entry, s.digest, 90, registers=40, spills=n, shared=1024) for s, n in made]

        result = tuned(compiled, bench_with(by_form(16, 4)), compile_, again=True)
        return next(k.tiles.num_warps for k in result.kernels if k.subject.key == back.key)

    assert [taken(24, 24), taken(24, 32), taken(0, 8)] == [4, 8, 8]


def test_what_spills_or_does_not_fit_is_not_run(steps):
    compiled, ran = steps("ragged"), set()

    def times(variant):
        if variant.tiles.chain is not None:
            ran.add((variant.tiles.num_warps, variant.sources[0].grid[0]))
        return 1.0 / variant.tiles.num_warps

    def compile_(sources, seconds):
        reports = [CompileReport(s.entry, s.digest, 90, registers=40, shared=1024) for s in sources]
        bad = [
            {"spills": 16} if s.num_warps == 16 else {"error": "ptxas lost an address"} if s.grid[0] > 40 else {}
            for s in sources
        ]
        return [replace(r, **b) for r, b in zip(reports, bad, strict=True)]

    result = tuned(compiled, bench_with(times), compile_)
    assert len(ran) > 2
    assert all(warps < 16 and programs <= 40 for warps, programs in ran)
    reasons = " ".join(r for k in result.kernels if k.subject.chain for r in k.rejected)
    for words in ("spills", "does not compile"):
        assert words in reasons
    entry = read_entry(next(k.subject.key for k in result.kernels if k.subject.chain), DEVICE.name)
    assert {"registers", "spills", "shared", "occupancy", "limit"} <= set(entry.facts)


@pytest.mark.slow
def test_candidates_compile():
    """For sm_90, in other processes; some spill, or the assembler makes them wrong, and are left."""
    pytest.importorskip("triton")
    compiled = CHAINS["square"]()
    for subject in chain_subjects(compiled):
        tiles = [subject.tiles, *candidates(subject, "coarse", subject.tiles, {subject.tiles: 1.0})[:4]]
        variants = [make_variants(compiled, {subject.key: t}, [subject.key], "triton")[subject.key] for t in tiles]
        sources = [v.sources[0] for v in (*variants, in_precision(variants[0], "triton", DType.F64))]
        reports = compiler(DEVICE)(sources, 200.0)
        assert [r.error for r in reports if "ptxas" not in r.error] == [""] * sum(
            "ptxas" not in r.error for r in reports
        )
        heuristic = replace(reports[0], layouts=1)  # it may have narrow lines, which are tried elsewhere
        assert misfit(heuristic, subject.tiles.num_warps, DEVICE) == ""
        assert "several layouts" in misfit(replace(heuristic, layouts=2), subject.tiles.num_warps, DEVICE)
        assert reports[-1].error == ""
        assert sum(misfit(r, s.num_warps, DEVICE) == "" for r, s in zip(reports[1:], sources[1:], strict=True)) > 1


# --- what is kept -----------------------------------------------------------------------------------------------------

TILE = ChainTile(64, 128, 4, 2, True, False, True, why="measured")
DATA = tiles_as_data(KernelTiles((), 4, TILE))[0]


def test_tiles_of_chains_survive_being_kept():
    entry = Entry("k" * 32, "k0_x", (DATA,), 4, 1e-5, 2e-5)
    write_entry(entry, "gpu")
    assert KnownTiles("gpu")(entry.key) == KernelTiles((), 4, TILE)
    assert tile_text(entry) == "64 rows in 128, next rows early, matrices kept, 4 warps, 2 stages"
    other = replace(entry, tiles=({**DATA, "rows_per_chunk": 64, "turned": True, "held": False, "num_stages": 1},))
    assert tile_text(other) == "64 rows, columns first, next rows early, matrices read again, 4 warps"


@pytest.mark.parametrize("change", [{"rows": 2.5}, {"rows": -64}, {"held": 1}, {"early": "yes"}, {"num_stages": True}])
def test_tiles_of_the_wrong_types_are_dropped(change):
    write_entry(Entry("k" * 32, "k0_x", ({**DATA, **change},), 4, 1e-5, 2e-5), "gpu")
    with pytest.warns(TuningWarning, match="not usable"):
        assert KnownTiles("gpu")("k" * 32) is None


@pytest.mark.parametrize("name", [n for n in DATA if n != "rows"])
def test_tiles_without_all_of_their_fields_are_dropped(name):
    write_entry(Entry("k" * 32, "k0_x", ({k: v for k, v in DATA.items() if k != name},), 4, 1e-5, 2e-5), "gpu")
    with pytest.warns(TuningWarning, match=f"a tile without '{name}'"):
        assert KnownTiles("gpu")("k" * 32) is None


@pytest.mark.parametrize(
    "change", [{"rows": 3}, {"rows": 1 << 40}, {"rows_per_chunk": 1}, {"num_stages": 99}, {"turned": True}]
)
def test_illegal_tiles_are_not_taken_and_the_plan_says_so(change, steps):
    compiled = steps("ragged")
    subject = chain_subjects(compiled)[0]
    forced = KernelTiles((), subject.tiles.num_warps, replace(subject.tiles.chain, **change))
    made = reschedule(compiled, {subject.key: forced}.get)
    assert [s.tiles for s in chain_subjects(made)] == [s.tiles for s in chain_subjects(compiled)]
    assert any("were not taken" in note for note in made.step.notes)


def test_tiles_of_another_kind_of_kernel_are_not_taken(steps):
    chain, norms = steps("tiny"), CASES["norms"]()
    first, other = chain_subjects(chain)[0], subjects(norms.step)[0]
    made = reschedule(chain, {first.key: other.tiles}.get)
    assert any("not of a chain" in note for note in made.step.notes)
    made = reschedule(norms, {other.key: first.tiles}.get)
    assert any("0 phases" in note for note in made.step.notes)


# --- keys -------------------------------------------------------------------------------------------------------------


def keys(module, rows=300, dtype=torch.bfloat16, **options):
    width = next(m.in_features for m in module.modules() if isinstance(m, nn.Linear))
    return [s.key for s in chain_subjects(chained(module, rows, width, dtype, **options))]


class Twins(nn.Module):
    """As ``mlp([64, 64, 64])`` with ReLU, by other names, on other lines."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.swapped = swapped

    def forward(self, data):
        hidden = torch.relu(self.first(data))
        return self.last(hidden + data if self.swapped else hidden)


def test_names_lines_and_the_device_do_not_count():
    plain = keys(mlp([64, 64, 64], activation=nn.ReLU))
    assert len(plain) == 2
    assert keys(Twins()) == plain
    assert keys(mlp([64, 64, 64], activation=nn.ReLU), device=replace(DEVICE, name="another")) == plain


@pytest.mark.parametrize(
    "other",
    [
        lambda: keys(mlp([64, 64, 64], activation=nn.ReLU), rows=301),
        lambda: keys(mlp([64, 60, 64], activation=nn.ReLU)),
        lambda: keys(mlp([64, 64, 64], activation=nn.SiLU)),
        lambda: keys(mlp([64, 64, 64], activation=nn.ReLU, bias=True)),
        lambda: keys(mlp([64, 64, 64], activation=nn.ReLU), dtype=torch.float16),
        lambda: keys(Twins(swapped=True)),
        lambda: keys(mlp([64, 64, 64], activation=nn.ReLU), train=False),
    ],
    ids=["rows", "width", "activation", "bias", "dtype", "what is read", "what is stored"],
)
def test_what_is_computed_and_what_is_stored_count(other):
    first, found = keys(mlp([64, 64, 64], activation=nn.ReLU)), other()
    assert found
    assert first[0] != found[0], "forward"
