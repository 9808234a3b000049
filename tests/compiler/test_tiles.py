"""Tiles that whole modules get: enough programs, and programs that keep what their rows share."""

from __future__ import annotations

import torch
from torch import nn

from megafuse.compiler import compile_call
from megafuse.core.device import device_spec
from megafuse.schedule.types import KernelSchedule
from megafuse.workloads import get

DEVICE = device_spec(90)


def kernels(module: nn.Module, *shape: int) -> tuple[KernelSchedule, ...]:
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return compile_call(module.to("meta", torch.bfloat16), (x,), {}, DEVICE).step.kernels


def programs(kernel: KernelSchedule) -> int:
    phase = kernel.phases[0]
    rows = 1
    for axis in phase.loop:
        rows *= axis.size
    fixed = 1
    for axis in phase.fixed:
        fixed *= axis.size
    return fixed * -(-rows // phase.tile.rows_per_chunk)


def test_column_sums_over_narrow_rows_leave_programs_for_the_whole_gpu() -> None:
    for width in (40, 24, 8):
        sums = [k for k in kernels(nn.LayerNorm(width), 6000, width) if any(r.by_rows for r, _ in k.phases[0].targets)]
        assert sums
        for kernel in sums:
            tiles = -(-6000 // kernel.phases[0].tile.row_tile)
            assert programs(kernel) * kernel.num_warps >= min(DEVICE.sms, tiles), width


def test_a_gather_with_values_by_group_walks_single_rows_of_one_sample() -> None:
    """What the groups of a row share (statistics of the rows they come from) is computed once per sample."""
    module = get("rank_mixer_block").module({"batch": 256, "tokens": 64, "dim": 1280, "k": 2}, device="meta", perturb=0)
    found = [p for k in kernels(module, 256, 64, 1280) for p in k.phases if len(p.trace.nest.space.cols) > 1]
    gathers = [p for p in found if [a.size for a in p.fixed] == [256] and p.tile.row_tile == 1]
    assert gathers
    assert all([a.size for a in p.loop] == [64] for p in gathers)
