"""Kernels at production-like sizes go through Triton's compiler for sm_90: what NumPy accepts, it must accept too."""

from __future__ import annotations

import pytest
import torch

from megafuse.compiler import compile_call
from megafuse.core.device import device_spec
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
