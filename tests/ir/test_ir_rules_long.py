"""Long reductions: cut where few results stand on many elements, and equal to the whole within rounding."""

from __future__ import annotations

import numpy as np
import pytest

from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Graph, contiguous_strides
from megafuse.ir.interpret import evaluate
from megafuse.ir.rewrite import rewrite
from megafuse.ir.rules_long import LONG_RULES
from megafuse.ir.types import Reduce, TensorType
from megafuse.ir.verify import verify


def reduction(fn: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> Graph:
    b = Builder()
    x = b.input("x", TensorType(shape, DType.F32), contiguous_strides(shape), "arg", 0)
    return Graph((x,), (b.reduce(fn, x, axes),), 1)


@pytest.mark.parametrize("fn", ["sum", "max", "min"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((64, 512), (0, 1)), ((40000,), (0,)), ((3, 36000), (1,)), ((20, 3, 1000), (0, 2)), ((1, 130, 1, 300), (1, 2, 3))],
)
def test_cut_reductions_equal_the_whole(fn: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    graph = reduction(fn, shape, axes)
    cut = rewrite(graph, LONG_RULES, "long")
    verify(cut)
    assert sum(n.is_a(Reduce) for n in cut.nodes) > 1
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    (whole,), (parts,) = evaluate(graph, [x]), evaluate(cut, [x])
    np.testing.assert_allclose(parts, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "axes"), [((600, 20000), (1,)), ((64, 128), (0, 1)), ((40000, 64), (0,)), ((16411,), (0,))]
)
def test_others_stay_whole(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Many results, few elements, a kept last axis, and a prime length are left as they are."""
    assert sum(n.is_a(Reduce) for n in rewrite(reduction("sum", shape, axes), LONG_RULES, "long").nodes) == 1
