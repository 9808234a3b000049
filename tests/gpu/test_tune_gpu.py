"""Tuning on a GPU: the result is right, no slower than the heuristic, kept, and found again at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import megafuse
from megafuse.api import engine_of
from megafuse.compiler import KnownTiles, compile_call, reschedule
from megafuse.compiler.engine import dot_rule
from megafuse.compiler.variants import ChainTile, KernelTiles, make_variants, subjects
from megafuse.core.dtypes import DType
from megafuse.core.errors import InputError
from megafuse.runtime.device import live_device_spec
from megafuse.runtime.plan_store import write_plan
from megafuse.tune import entries_of, tune_step
from megafuse.tune.bench import Bench, event_timer
from megafuse.workloads.rank_mixer_block import RankMixerBlock

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400)]
SECONDS = 50.0
NOISE = 1.05  # of the heuristic's time: two medians of the same kernel differ by less
SOURCE = Path(__file__).resolve().parents[2] / "src"


def norm():
    torch.manual_seed(0)
    x = torch.randn(8192, 1280, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return nn.LayerNorm(1280).to("cuda", torch.bfloat16), x


def block():
    torch.manual_seed(0)
    x = torch.randn(256, 16, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return RankMixerBlock(16, 256, 2).to("cuda", torch.bfloat16), x


def mlp(train):
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(128, 128, bias=False), nn.Softplus())]
    x = torch.randn(4096, 128, device="cuda", dtype=torch.float16, requires_grad=train)
    return nn.Sequential(*layers[:-1]).to("cuda", torch.float16).requires_grad_(train), x


CASES = {"norm": norm, "block": block, "mlp": lambda: mlp(True), "mlp_forward": lambda: mlp(False)}


@pytest.fixture(scope="module", params=CASES)
def tuned(request, tmp_path_factory):
    """A module tuned into a cache of its own: (name, module, input, result, seconds, compiled)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGAFUSE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        fn, x = CASES[request.param]()
        compiled = compile_call(fn, (x,), {}, live_device_spec(), dots=dot_rule("library"))
        start = time.perf_counter()
        result = tune_step(compiled, seconds=SECONDS)
        yield request.param, fn, x, result, time.perf_counter() - start, compiled


def test_it_ends_in_time_with_a_result_for_every_kernel(tuned):
    _, _, _, result, seconds, compiled = tuned
    assert seconds < SECONDS + 30
    known = KnownTiles(compiled.device.name)
    made = reschedule(compiled, known)
    assert known.missing(made) == [], result.stopped
    assert any(k.tried > 1 for k in result.kernels), [k.rejected for k in result.kernels]
    assert result.problems == ()


def test_tiles_of_chains_are_measured(tuned):
    """Several of each were run; the fp64 computation beside which results are judged was, too."""
    name, *_, result, _, compiled = tuned
    chains = [k for k in result.kernels if k.subject.chain is not None]
    assert len(chains) == {"mlp": 2, "mlp_forward": 1}.get(name, 0)
    for kernel in chains:
        assert kernel.tried - sum(kernel.rejected.values()) > 3, kernel.rejected
        assert not any("cannot be" in reason for reason in kernel.rejected), kernel.rejected
        assert kernel.report is not None
        assert kernel.report.registers > 0
        _check_apart(compiled, kernel)


def _check_apart(compiled, kernel):
    """The winner, and a plain other tile, agree with the heuristic; a kernel that reads other numbers does not."""
    bench = Bench(torch.device("cuda", torch.cuda.current_device()), "triton", event_timer)
    plain = ChainTile(64, 64, 4) if not kernel.subject.chain.sums else ChainTile(32, 64, 8)
    before = make_variants(compiled, {}, [kernel.subject.key], "triton")[kernel.subject.key]
    given = bench.given(before)
    for tiles in (kernel.tiles, KernelTiles((), plain.num_warps, plain)):
        found = make_variants(compiled, {kernel.subject.key: tiles}, [kernel.subject.key], "triton")
        assert bench.disagreement(found[kernel.subject.key], before, given) == "", tiles
    other = {n: t * 1.02 for n, t in given.items()}
    results, moved = bench.results(before, given), bench.results(before, other)
    exact = bench._precise(before, given, DType.F64)
    for name, value in results.items():
        error = (value.double() - exact[name]).norm()
        assert 10 * error < (moved[name].double() - exact[name]).norm(), name


def test_no_kernel_is_slower_than_the_heuristic(tuned):
    """Timed once more, from what the cache holds."""
    compiled = tuned[-1]
    bench = Bench(torch.device("cuda", torch.cuda.current_device()), "triton", event_timer)
    known = {s.key: s.tiles for s in subjects(reschedule(compiled, KnownTiles(compiled.device.name)).step)}
    for subject in subjects(compiled.step):
        if subject.finishes or known[subject.key] == subject.tiles:
            continue
        before, after = (make_variants(compiled, t, [subject.key], "triton")[subject.key] for t in ({}, known))
        given = bench.given(before)
        times = [[bench.seconds(v, given, 20) for v in (before, after)] for _ in range(3)]
        assert min(t[1] for t in times) < NOISE * min(t[0] for t in times), (subject.name, known[subject.key], times)
        assert bench.disagreement(after, before, given) == ""


def test_the_fused_module_takes_the_tiles_and_is_right(tuned):
    _, fn, x, _, _, compiled = tuned
    fused = megafuse.fuse(fn, x)
    (bound,) = engine_of(fused).bindings
    expected = subjects(reschedule(compiled, KnownTiles(compiled.device.name)).step)
    assert [s.tiles for s in subjects(bound.compiled.step)] == [s.tiles for s in expected]
    kernels = bound.compiled.step.kernels
    assert set(bound.compiled.measured) == {k.key for k in kernels if k.key}
    assert all(len(k.phases) > 1 for k in kernels if not k.key)  # finishers that share a launch
    assert "measured" in str(megafuse.explain(fused))
    report = megafuse.check(fn, x, fused=fused)
    assert report.ok, str(report)


def test_a_second_run_takes_no_time(tuned):
    _, fn, x, _, _, compiled = tuned
    start = time.perf_counter()
    assert tune_step(compiled, seconds=SECONDS).kernels == ()
    assert time.perf_counter() - start < 3
    plain = megafuse.fuse(fn, x, tune=False)  # what there is beside tuning: capture, planning, loading
    start = time.perf_counter()
    megafuse.fuse(fn, x, tune=True)
    assert time.perf_counter() - start < 3 + sum(engine_of(plain).bindings[0].compiled.seconds.values())


def test_a_plan_is_exported_pinned_and_required(tuned, tmp_path, monkeypatch):
    _, fn, x, _, _, compiled = tuned
    path = tmp_path / "plan.json"
    write_plan(path, compiled.device.name, entries_of(compiled))
    monkeypatch.setenv("MEGAFUSE_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("MEGAFUSE_REQUIRE_PLAN", "1")
    with pytest.raises(InputError, match="has no usable entry"):
        megafuse.fuse(fn, x)
    fused = megafuse.fuse(fn, x, plan=path)
    assert megafuse.check(fn, x, fused=fused).ok


COMMAND = ("--workload", "rank_mixer_block", "--batch-size", "64", "--tokens", "8", "--dim", "64", "--seconds", "20")


def test_the_command_prints_every_kernel_and_keeps_results(tmp_path):
    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "MEGAFUSE_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": paths}
    plan = tmp_path / "plan.json"
    command = [sys.executable, "-m", "megafuse.cli", "tune", *COMMAND, "--export", str(plan)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for word in ("heuristic", "best", "registers", "occupancy", "k0_", "tiles tried"):
        assert word in done.stdout
    assert plan.is_file()
    shown = [sys.executable, "-m", "megafuse.cli", "cache", "--tuned"]
    listed = subprocess.run(shown, env=environment, capture_output=True, text=True, timeout=100, check=True)
    assert "k0_" in listed.stdout
