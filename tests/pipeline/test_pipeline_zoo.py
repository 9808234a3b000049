"""Every workload through the whole pipeline: right by the rule, in generated kernels, and with the block's traffic."""

from __future__ import annotations

import functools

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
SCATTERS = {  # gradients of what is read by index, and the share of the ops that is generated beside them
    "dot_interaction": ({"aten.index_put.default"}, 0.89),  # of as many elements as the matrices of products
    "categorical_tower": ({"aten.embedding_dense_backward.default"}, 0.95),
}


def coverage(graph: Graph) -> float:
    """Share of the floating-point operations other than dots that generated kernels compute.

    A pointwise op makes one for each result, a reduction one for each value that it takes in; an ATen call that runs as
    it is counts as one for each result.
    """
    made = sum(n.args[0].type.numel if n.is_a(Reduce) else n.type.numel for n in graph.nodes
               if n.dtype.is_float and n.is_a(Map, Cast, Reduce))  # fmt: skip
    opaque = sum(n.type.numel for n in graph.nodes if n.dtype.is_float and n.is_a(Opaque))
    return made / (made + opaque)


def assert_generated(name: str, compiled: Compiled) -> None:
    """At least one kernel, at least 95 % of the ops in kernels, and no op left out but the known ones."""
    assert compiled.step.kernels
    scattered, share = SCATTERS.get(name, (set(), 0.95))
    assert {e.target for e in compiled.captured.support.opaque} == scattered
    assert {e.reason for e in compiled.captured.support.opaque} <= {"scatters by index"}
    assert coverage(compiled.graph) >= share


@pytest.mark.parametrize(("name", "size", "dtype"), CASES, ids=[f"{n}-{s}" for n, s, _ in CASES])
def test_workload(name: str, size: str, dtype: torch.dtype) -> None:
    """``small`` in fp32 and ``odd`` in bf16."""
    module, inputs = get(name).make(size, dtype=dtype)
    fused = megafuse.fuse(module, *inputs, target="interpret")
    assert_generated(name, compiled_of(fused))
    check_few(module, *inputs, fused=fused)


# --- traffic ----------------------------------------------------------------------------------------------------------

BATCH, TOKENS, DIM, K = 512, 16, 256, 2  # A, one [B, T, D] tensor in bf16, is 4 MiB: parameters hardly count
TOLERANCE = 0.10

# Mutations that compute with more or fewer large tensors than the block, in tensors of A's size moved in one step:
#
# mutation     | A  | why
# -------------|----|----
# no_residual  | -4 | norm2 and its backward do not read out1 (-2); the two sums of gradients at the residuals, each of
#              |    | which reads one tensor more than a single path, are not there (-2)
# three_gates  | +6 | Z is [B, T, 3H] instead of [B, T, 2H] = 4 A: 2 A more, read in forward, read in backward, and its
#              |    | gradient written
#
# All others move what the block moves: another norm, gate or permutation of the same tensors.
EXPECTED_DIFFERENCE = {"no_residual": -4.0, "three_gates": 6.0}


@functools.cache
def traffic(name: str) -> float:
    """Predicted DRAM bytes of the generated kernels of one step, in units of A. Nothing is run."""
    workload = get(name)
    sizes = workload.sizes("gpu", batch=BATCH, tokens=TOKENS, dim=DIM, k=K)
    with torch.device("meta"):
        module = workload.build(**{k: v for k, v in sizes.items() if k not in workload.input_sizes})
    shape = (BATCH, DIM, TOKENS) if name == "channels_first" else (BATCH, TOKENS, DIM)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    compiled = compile_call(module.to(torch.bfloat16), (x,), {}, device_spec(90))
    return sum(k.dram_bytes for k in compiled.step.kernels) / (x.numel() * x.element_size())


@pytest.mark.parametrize("name", names("mutation"))
def test_mutations_move_what_the_block_moves(name: str) -> None:
    expected = traffic("rank_mixer_block") + EXPECTED_DIFFERENCE.get(name, 0.0)
    allowed = 0.02 if name in EXPECTED_DIFFERENCE else TOLERANCE
    assert traffic(name) == pytest.approx(expected, rel=allowed)
