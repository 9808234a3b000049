"""Resources of compiled kernels in an explanation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import megafuse
from megafuse.compiler import compile_call
from megafuse.core.device import device_spec
from megafuse.explanation import KernelInfo, PlanInfo, Resources, with_resources
from megafuse.explanation.coalescing import coalescing
from megafuse.explanation.resources import resources_of
from megafuse.explanation.text import format_plan, resources_text
from megafuse.ir.graph import contiguous_strides
from megafuse.runtime.offline import CompileReport

DEVICE = device_spec(90)
REPORT = CompileReport("k0", "digest", 90, registers=128, spills=16, shared=2048)


def kernel(seconds: float, dram_bytes: int = 0, measured: float | None = None) -> KernelInfo:
    return KernelInfo("k0", True, (), (), (), (), 4, dram_bytes, seconds, measured=measured)


def paced(info: KernelInfo, found: Resources) -> Resources:
    plan = with_resources(PlanInfo("x", calls=(info,)), {"k0": found}, DEVICE)
    (only,) = plan.kernels
    assert only.resources is not None
    return only.resources


def test_figures_of_a_report() -> None:
    found = resources_of(REPORT, 4, 77, DEVICE)
    assert (found.registers, found.spills, found.shared, found.programs) == (128, 16, 2048, 77)
    assert found.room is not None
    assert (found.room.programs, found.room.limit) == (4, "registers")
    failed = resources_of(replace(REPORT, error="line one\nptxas died"), 4, 77, DEVICE)
    assert failed.room is None
    assert resources_text(failed) == "not compiled: ptxas died"


def test_the_pace_is_that_of_the_predicted_or_measured_time() -> None:
    found = resources_of(REPORT, 4, 10_000, DEVICE)
    launch = DEVICE.launch_seconds
    moved = int(DEVICE.dram_bandwidth * 1e-4)
    assert paced(kernel(launch * 1.1), found).pace == "launch"
    assert paced(kernel(1e-4 + launch, moved), found).pace == "memory"
    assert paced(kernel(1e-4 + launch, moved, measured=4e-4), found).pace == "registers (occupancy)"
    assert paced(kernel(4e-4, moved), replace(found, programs=20)).pace == "few programs"
    assert paced(kernel(launch), Resources(error="out of time")).error == "out of time"


def test_kernels_without_figures_are_left_as_they_are() -> None:
    plan = with_resources(PlanInfo("x", device="d", calls=(kernel(1e-6),)), {}, DEVICE)
    assert plan.kernels[0].resources is None
    assert "registers" not in format_plan(plan)


def test_explain_compiles_where_it_is_asked_to() -> None:
    pytest.importorskip("triton")
    x = torch.randn(6, 16, requires_grad=True)
    fused = megafuse.fuse(nn.Sequential(nn.LayerNorm(16), nn.SiLU()), x, target="interpret")
    (plan,) = megafuse.explain(fused, resources=True)
    for info in plan.kernels:
        assert info.resources is not None
        assert not info.resources.error
        assert info.resources.registers > 0
        assert info.resources.room is not None
        assert 0 < info.resources.room.share <= 1
        assert info.resources.pace == "launch"
        assert resources_text(info.resources) in format_plan(plan)
    assert all(k.resources is None for p in megafuse.explain(fused) for k in p.kernels)


@pytest.mark.parametrize(
    ("rows", "pieces", "share"), [(1, (64,), 1.0), (16, (64,), 1.0), (16, (2,), 8 / 32), (1, (4,), 0.5)]
)
def test_a_tile_uses_of_a_sector_what_it_has_side_by_side(rows: int, pieces: tuple[int, ...], share: float) -> None:
    x = torch.empty(96, 64, device="meta")
    compiled = compile_call(lambda x: x.softmax(-1), (x,), {}, DEVICE)
    (phase,) = compiled.step.kernels[0].phases
    tile = replace(phase.tile, row_tile=rows, pieces=pieces)
    assert coalescing([replace(phase, tile=tile)], lambda node: contiguous_strides(node.shape)) == share


def test_memory_that_runs_along_rows_needs_tiles_of_several_rows() -> None:
    x = torch.empty(64, 96, device="meta").t()
    compiled = compile_call(lambda x: x.softmax(-1), (x,), {}, DEVICE)
    (phase,) = compiled.step.kernels[0].phases
    for rows, share in ((1, 4 / 32), (4, 0.5), (8, 1.0)):
        tile = replace(phase.tile, row_tile=rows, pieces=(64,))
        assert coalescing([replace(phase, tile=tile)], lambda node: (1, 96)) == share
    assert coalescing([], lambda node: ()) == 1.0
