"""Every workload captures without opaque ops (gradients of tables aside) and with the right gradients."""

from __future__ import annotations

import pytest
import torch

import megafuse.workloads.mutations
import megafuse.workloads.rank_mixer_block
import megafuse.workloads.recommenders
import megafuse.workloads.strangers  # noqa: F401
from capture_helpers import casts, compare
from megafuse.capture.api import capture
from megafuse.workloads.types import get, names


@pytest.mark.parametrize("name", names())
def test_workload(name: str) -> None:
    module, inputs = get(name).make("small", dtype=torch.float64)
    support = compare(module, *inputs, tol=2e-6).captured.support  # some go through float32 by themselves
    assert {e.reason for e in support.opaque} <= {"scatters by index"}, str(support)


def test_block_in_bf16() -> None:
    module, inputs = get("rank_mixer_block").make("odd", dtype=torch.bfloat16)
    captured = capture(module, inputs, strict=True)
    assert casts(captured) < 60
