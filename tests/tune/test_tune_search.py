"""The search with made-up times: it finds the fastest, takes nothing that is wrong, and keeps what it has."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest
import torch

from megafuse.compiler import KnownTiles, reschedule
from megafuse.compiler.variants import subjects
from megafuse.runtime import plan_store
from megafuse.runtime.offline import CompileReport
from megafuse.tune.bench import Bench
from megafuse.tune.step import run
from tune_helpers import CASES, DEVICE, bench_with, by_distance


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAFUSE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def norms():
    return CASES["norms"]()


def tuned(compiled, bench, compile_=None, seconds=200.0, **options):
    return run(compiled, bench, compile_, seconds=seconds, **options)


def test_the_fastest_tiles_win_and_are_kept(norms):
    result = tuned(norms, bench_with(by_distance(8, 8)))
    assert result.stopped == ""
    keys = {s.key for s in subjects(reschedule(norms, KnownTiles(DEVICE.name)).step)}
    assert keys <= {k.subject.key for k in result.kernels}, "the kernels that add up partial sums are tuned too"
    for kernel in result.kernels:
        assert kernel.seconds <= kernel.heuristic_seconds
        entry = plan_store.read_entry(kernel.subject.key, DEVICE.name)
        assert entry is not None
        assert entry.num_warps == kernel.tiles.num_warps
    first = result.kernels[0]
    assert first.changed
    assert (first.tiles.num_warps, first.tiles.tiles[0].row_tile) == (8, 8)


def test_a_second_run_measures_nothing(norms):
    tuned(norms, bench_with(by_distance(8, 8)))
    count = []
    start = time.perf_counter()
    second = tuned(norms, bench_with(lambda variant: count.append(1) or 1.0))
    assert second.kernels == ()
    assert not count
    assert time.perf_counter() - start < 3
    assert tuned(norms, bench_with(by_distance(1, 1)), again=True).kernels


def test_the_heuristic_stays_where_nothing_is_faster(norms):
    heuristic = {s.key: s.tiles for s in subjects(norms.step)}
    result = tuned(norms, bench_with(lambda v: 1.0 if v.tiles == heuristic.get(v.key) else 1.1))
    assert not any(k.changed for k in result.kernels if k.subject.key in heuristic)


def test_a_lucky_sample_does_not_win(norms):
    """Faster at first, not when both are timed again in turn."""
    heuristic = {s.key: s.tiles for s in subjects(norms.step)}
    seen: dict[object, int] = {}

    def times(variant):
        seen[variant.tiles] = seen.get(variant.tiles, 0) + 1
        return 1.0 if variant.tiles == heuristic.get(variant.key) or seen[variant.tiles] > 2 else 0.5

    result = tuned(norms, bench_with(times))
    mine = [k for k in result.kernels if k.subject.key in heuristic and not k.subject.finishes]
    assert mine
    assert not any(k.changed for k in mine)
    assert any("is not faster when timed again" in k.rejected for k in mine)


@dataclass(frozen=True)
class Faulty(Bench):
    """Kernels with 8 warps give one wrong element (a kernel that reduces), or one that changes from run to run."""

    change: float = 0.01
    repeatable: bool = True

    def results(self, variant, given):
        found = super().results(variant, given)
        if variant.tiles.num_warps == 8:
            name = next(n for n, t in found.items() if t.is_floating_point())
            shift = self.change if self.repeatable else self.change * torch.rand(())
            found[name].view(-1)[0] += (1 + found[name].view(-1)[0].abs()) * shift
        return found


@pytest.mark.parametrize("fault", [{"change": 0.01}, {"change": float("nan")}, {"repeatable": False}])
@pytest.mark.parametrize("case", ["norms", "plain"])
def test_a_fast_kernel_that_is_wrong_is_never_taken(case, fault):
    compiled = CASES[case]()
    plain = bench_with(by_distance(8, 8))
    right = tuned(compiled, plain, again=True)
    wrong = tuned(compiled, Faulty(plain.device, plain.backend, plain.timer, **fault), again=True)
    assert any(k.tiles.num_warps == 8 for k in right.kernels), "the fault would not be met"
    changed = [k for k in wrong.kernels if k.subject.tiles.num_warps != 8]
    assert all(k.tiles.num_warps != 8 for k in changed)
    words = ("acceptance rule", "repeat", "changes the bits")
    assert any(word in reason for k in changed for reason in k.rejected for word in words)


def test_what_spills_or_does_not_fit_is_not_run(norms):
    ran = set()

    def times(variant):
        ran.add(variant.tiles.num_warps)
        return 1.0 / variant.tiles.num_warps

    def compile_(sources, seconds):
        reports = [CompileReport(s.entry, s.digest, 90, registers=40, shared=1024) for s in sources]
        bad = {4: {"spills": 16}, 8: {"shared": 300_000}, 16: {"error": "ptxas died"}}
        return [replace(r, **bad.get(s.num_warps, {})) for r, s in zip(reports, sources, strict=True)]

    result = tuned(norms, bench_with(times), compile_)
    assert ran <= {1, 2} | {s.tiles.num_warps for s in subjects(norms.step)}
    reasons = " ".join(r for k in result.kernels for r in k.rejected)
    for words in ("spills", "shared memory", "does not compile"):
        assert words in reasons


def test_what_cannot_be_run_loses_and_the_rest_goes_on(norms):
    def times(variant):
        if variant.tiles.num_warps > 2:
            raise RuntimeError("CUDA error: too many resources requested for launch")
        return 1.0 / variant.tiles.num_warps

    result = tuned(norms, bench_with(times))
    assert result.kernels
    assert all(k.tiles.num_warps <= 2 for k in result.kernels)
    assert any("cannot be run" in k.rejected for k in result.kernels)


def test_a_kernel_that_cannot_be_run_at_all_is_named(norms):
    first = subjects(norms.step)[0]

    def times(variant):
        if variant.key == first.key:
            raise RuntimeError("no such instruction")
        return by_distance(8, 8)(variant)

    result = tuned(norms, bench_with(times))
    assert any(first.name in p and "no such instruction" in p for p in result.problems)
    assert first.key not in {k.subject.key for k in result.kernels}
    assert any(k.changed for k in result.kernels)


def test_an_interrupt_keeps_what_there_is(norms):
    count = [0]

    def times(variant):
        count[0] += 1
        if count[0] == 30:
            raise KeyboardInterrupt
        return by_distance(8, 8)(variant)

    result = tuned(norms, bench_with(times))
    assert result.stopped == "interrupted"
    assert any(k.changed for k in result.kernels)
    for kernel in result.kernels:
        entry = plan_store.read_entry(kernel.subject.key, DEVICE.name)
        assert entry is not None
        assert entry.num_warps == kernel.tiles.num_warps


def test_without_time_every_kernel_has_the_heuristic_measured(norms):
    result = tuned(norms, bench_with(by_distance(8, 8)), seconds=0.0)
    assert result.stopped == "out of time"
    assert {k.subject.key for k in result.kernels} == {s.key for s in subjects(norms.step)}
    assert not any(k.changed for k in result.kernels)


def test_progress_is_told(norms):
    said = []
    tuned(norms, bench_with(by_distance(8, 8)), say=lambda text, done, total: said.append((text, done, total)))
    assert any("timing" in text for text, _, _ in said)
    assert all(done <= total for _, done, total in said)


def test_results_do_not_depend_on_the_order_of_timing(norms):
    first = tuned(norms, bench_with(by_distance(4, 4)), again=True)
    second = tuned(norms, bench_with(by_distance(4, 4)), again=True)
    assert [k.tiles for k in first.kernels] == [k.tiles for k in second.kernels]
