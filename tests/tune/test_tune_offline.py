"""Candidates as Triton text: they compile for sm_90, in other processes, within the time given."""

from __future__ import annotations

import time

import pytest

from megafuse.compiler.variants import in_precision, make_variants
from megafuse.core.dtypes import DType
from megafuse.tune.candidates import candidates
from megafuse.tune.occupancy import misfit
from megafuse.tune.step import compiler
from tune_helpers import CASES, DEVICE, subject_of

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.mark.slow
def test_candidates_and_the_kernel_in_fp64_compile():
    compiled = CASES["norms bf16"]()
    subject = subject_of(compiled, summed=True)
    tiles = [subject.tiles, *candidates(subject, "factors", subject.tiles, {subject.tiles: 1.0})[::4]]
    variants = [make_variants(compiled, {subject.key: t}, [subject.key], "triton")[subject.key] for t in tiles]
    exact = in_precision(variants[0], "triton", DType.F64)
    sources = [s for v in (*variants, exact) for s in v.sources]
    reports = compiler(DEVICE)(sources, 200.0)
    assert [r.digest for r in reports] == [s.digest for s in sources]
    assert [r.error for r in reports] == [""] * len(sources)
    count = len(sources) - len(exact.sources)  # fp64 takes twice the registers, and need not be fast
    assert [misfit(r, s.num_warps, DEVICE) for r, s in zip(reports, sources[:count], strict=False)] == [""] * count
    assert all(r.registers > 0 for r in reports)


def test_what_is_not_reached_in_time_is_said():
    compiled = CASES["norms"]()
    subject = subject_of(compiled)
    sources = make_variants(compiled, {}, [subject.key], "triton")[subject.key].sources * 50
    start = time.perf_counter()
    reports = compiler(DEVICE)(sources, 0.5)
    assert time.perf_counter() - start < 10
    assert len(reports) == len(sources)
    assert "out of time" in misfit(reports[-1], 4, DEVICE)
