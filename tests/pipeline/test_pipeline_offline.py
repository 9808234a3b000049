"""Kernels at production-like sizes go through Triton's compiler for sm_90: what NumPy accepts, it must accept too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megafuse.compiler import compile_call
from megafuse.core.device import device_spec
from megafuse.core.occupancy import occupancy
from megafuse.runtime.offline import compile_offline
from megafuse.workloads import get

pytest.importorskip("triton")


@pytest.mark.parametrize("name", ["hand_norm", "cast_before_affine"])
def test_single_rows_with_rounded_statistics_compile(name: str) -> None:
    """Rows wide enough for one a tile: values per row are single elements, which packed roundings cannot take."""
    workload = get(name)
    sizes = workload.sizes("gpu", batch=8, tokens=64, dim=1280)
    with torch.device("meta"):
        module = workload.build(**{k: v for k, v in sizes.items() if k not in workload.input_sizes})
    x = torch.empty(8, 64, 1280, dtype=torch.bfloat16, device="meta", requires_grad=True)
    compiled = compile_call(module.to(torch.bfloat16), (x,), {}, device_spec(90))
    assert any(p.row_tile == 1 for program in compiled.programs for p in program.phases)
    for report in compile_offline(compiled.artifact("triton").kernels[:3]):
        assert not report.error, report.error
        assert report.spills == 0


@pytest.mark.parametrize(("tokens", "batch", "hidden"), [(32, 256, 1024), (64, 1024, 2560)])
def test_programs_that_walk_pairs_of_rows_run_at_once(tokens: int, batch: int, hidden: int) -> None:
    """Counted by the registers of one row there were more than an SM holds, and a few ran alone in a second wave."""

    def gated(z: Tensor, bias: Tensor, *norms: Tensor) -> Tensor:
        u, gate = (z + bias[:, None]).chunk(2, -1)
        normed = functional.layer_norm(u, (hidden,), *norms[:2])
        return normed * functional.silu(functional.layer_norm(gate, (hidden,), *norms[2:]))

    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    device = device_spec(90)
    args = (tensor(tokens, batch, 2 * hidden), tensor(tokens, 2 * hidden), *(tensor(hidden) for _ in range(4)))
    compiled = compile_call(gated, args, {}, device)
    tile = compiled.step.kernels[0].phases[0].tile
    assert tile.row_tile == 2
    source = compiled.artifact("triton").kernels[0]
    (report,) = compile_offline([source])
    assert report.spills == 0
    held = occupancy(report.registers, report.shared, tile.num_warps, device)
    assert source.grid[0] <= held.programs * device.sms
