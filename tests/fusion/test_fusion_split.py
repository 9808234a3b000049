"""Which products are cut along K, into how many parts, and the two kernels that this makes."""

from __future__ import annotations

import pytest

from fusion_graphs import DEVICE, arg, graph
from megafuse.core.dtypes import DType
from megafuse.core.sizes import ceil_div
from megafuse.fusion.epilogue import LIBRARY, DotRule
from megafuse.fusion.plan import Cover
from megafuse.fusion.planner import cover_options
from megafuse.fusion.split_dot import split_of
from megafuse.ir.graph import Builder, Graph, Node
from megafuse.schedule.step import build_step
from megafuse.schedule.types import DotCall, Launch

AUTO = DotRule(fuse=True)
BF16 = DType.BF16


def weight_gradient(p: int, m: int, n: int, k: int, dtype: DType = BF16) -> tuple[Graph, Node]:
    """``x.T @ dy`` over k rows."""
    b = Builder()
    x, dy = arg(b, 0, p, k, m, dtype=dtype), arg(b, 1, p, k, n, dtype=dtype)
    dot = b.dot(b.permute(x, (0, 2, 1)), dy, dtype)
    return graph((x, dy), dot), dot


def best(made: Graph, dots: DotRule = AUTO) -> Cover:
    return min(cover_options(made, {}, DEVICE, dots), key=lambda o: o.seconds).cover()


@pytest.mark.parametrize("dtype", [BF16, DType.F16])
def test_a_narrow_weight_gradient_is_cut_into_parts(dtype: DType):
    made, dot = weight_gradient(1, 128, 128, 65536, dtype)
    cover = best(made)
    assert cover.splits == {dot: split_of(dot, DEVICE).parts}  # type: ignore[union-attr]
    assert any("parts of K" in d for d in cover.decisions)
    step = build_step(cover, DEVICE)
    assert [type(c) for c in step.forward if isinstance(c, Launch | DotCall)] == [Launch, Launch]
    first, second = step.kernels
    assert first.dot is not None and first.dot.splits > 8
    sums = step.buffer(first.writes[0])
    assert sums.dtype is DType.F32 and sums.shape == (first.dot.splits, 1, 128, 128)
    assert second.reads == (sums.name,) and step.buffer(second.writes[0]).dtype is dtype


def test_parts_are_whole_blocks_and_none_is_empty():
    made, dot = weight_gradient(3, 96, 80, 10_007)
    cover = best(made)
    (kernel,) = [k for k in build_step(cover, DEVICE).kernels if k.dot is not None]
    assert kernel.dot is not None and dot in cover.splits
    parts, depth = kernel.dot.splits, kernel.dot.tile.depth
    span = ceil_div(ceil_div(10_007, parts), depth) * depth
    assert (parts - 1) * span < 10_007 <= parts * span


@pytest.mark.parametrize(
    "shape", [(1, 4096, 4096, 65536), (64, 128, 128, 65536), (1, 128, 128, 768), (1, 1, 128, 65536)]
)
def test_products_that_fill_the_device_or_are_short_stay_with_the_library(shape: tuple[int, int, int, int]):
    made, dot = weight_gradient(*shape)
    assert split_of(dot, DEVICE) is None
    assert best(made).splits == {}


def test_only_where_generated_dots_are_asked_for():
    made, _ = weight_gradient(1, 128, 128, 65536)
    assert best(made, LIBRARY).splits == {}


def test_products_with_bias_and_wide_types_stay_with_the_library():
    _, dot = weight_gradient(1, 128, 128, 65536, DType.F64)
    assert split_of(dot, DEVICE) is None
    b = Builder()
    x, w, bias = arg(b, 0, 1, 64, 65536, dtype=BF16), arg(b, 1, 1, 65536, 64, dtype=BF16), arg(b, 2, 64, dtype=BF16)
    assert split_of(b.dot(x, w, BF16, bias), DEVICE) is None
