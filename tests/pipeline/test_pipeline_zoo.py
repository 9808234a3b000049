"""Every workload through the whole pipeline: right by the rule, in generated kernels, and with the block's traffic."""

from __future__ import annotations

import math

import pytest
import torch

import megafuse
from megafuse.compiler import Compiled, compile_call
from megafuse.core.device import device_spec
from megafuse.ir.graph import Graph
from megafuse.ir.types import Cast, Map, Opaque, Reduce
from megafuse.workloads import get, names
from pipeline_helpers import check_few, compiled_of

CASES = [(name, "small", torch.float32) for name in names()] + [(name, "odd", torch.bfloat16) for name in names()]
INDEXED = "dot_interaction"  # gathers entries of a matrix by a tensor of indices, and scatters their gradients


def coverage(graph: Graph) -> float:
    """Share of the floating-point ops other than dots that generated kernels compute."""
    made = sum(n.dtype.is_float and n.is_a(Map, Cast, Reduce) for n in graph.nodes)
    opaque = sum(n.dtype.is_float and n.is_a(Opaque) for n in graph.nodes)
    return made / (made + opaque)


def assert_generated(name: str, compiled: Compiled) -> None:
    """At least one kernel, at least 95 % of the ops in kernels, and no op left out but the known ones."""
    assert compiled.step.kernels
    assert coverage(compiled.graph) >= 0.95
    left = [(e.target, e.reason) for e in compiled.captured.support.opaque]
    if name != INDEXED:
        assert left == []
        return
    assert [target for target, _ in left] == ["aten.index.Tensor", "aten.index_put.default"]
    assert all("index" in reason or "converter" in reason for _, reason in left), left


@pytest.mark.parametrize(("name", "size", "dtype"), CASES, ids=[f"{n}-{s}" for n, s, _ in CASES])
def test_workload(name: str, size: str, dtype: torch.dtype) -> None:
    """``small`` in fp32 and ``odd`` in bf16."""
    module, inputs = get(name).make(size, dtype=dtype)
    fused = megafuse.fuse(module, *inputs, target="interpret")
    assert_generated(name, compiled_of(fused))
    check_few(module, *inputs, fused=fused)
