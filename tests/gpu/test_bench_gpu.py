"""The benchmarks on a real device, at a small size."""

from __future__ import annotations

import shutil

import pytest
import torch

from megafuse.bench.cases import make_case
from megafuse.bench.measure import GEMM, Settings, measure_case
from megafuse.bench.timing import copy_bandwidth
from megafuse.bench.traffic import NcuJob, measure_traffic
from megafuse.core.errors import TargetError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SOURCE = {"kind": "rank_mixer", "shape": [64, 16, 256, 2], "dtype": "bfloat16"}


def test_all_sections_of_a_small_block() -> None:
    sections = ("memory", "step", "graph", "host", "kernels")
    settings = Settings(sections=sections, rounds=3, host_steps=5, host_rounds=1, check="quick")
    result = measure_case(make_case(SOURCE), settings)
    print(result)
    assert result.errors == []
    assert len(result.gemm["products"]) == 6
    assert GEMM not in result.rivals
    for rival in result.rivals.values():
        assert rival.checked["ok"], rival.checked
        assert rival.step["mean"] > result.gemm["graph"]["median"]
        assert rival.graph["median"] > result.gemm["graph"]["median"] * 0.8
        assert rival.memory["activation"] > 0
        assert rival.host["median"] > 1
        assert rival.kernels
    planned = {k["name"] for k in result.rivals["megafuse"].plan["kernels"]}
    assert planned <= {k["name"] for k in result.rivals["megafuse"].kernels}


def test_copy_bandwidth_is_plausible() -> None:
    rate, times = copy_bandwidth(samples=5)
    print(f"copy {rate / 1e12:.2f} TB/s, {times}")
    assert 1e11 < rate < 2e13


def test_traffic_of_a_small_block() -> None:
    if shutil.which("ncu") is None:
        pytest.skip("no ncu on the PATH")
    try:
        traffic = measure_traffic(NcuJob(SOURCE, "eager"))
    except TargetError as error:
        pytest.skip(f"ncu cannot read counters here: {error}")
    print(traffic.total, [k.name for k in traffic.kernels])
    assert len(traffic.kernels) > 20
    assert traffic.total > 0
