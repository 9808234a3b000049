"""Where 16-bit values are rounded: once per ATen op (or per step of one, as its CUDA kernel does), statistics never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafuse
from capture_helpers import casts, run_graph, seeded, to_array
from megafuse.capture.api import capture
from megafuse.capture.composites import hidden_composites
from megafuse.core.dtypes import DType
from megafuse.ir.types import Dot, Map, Reduce

BF16 = torch.bfloat16


def x16(*shape: int) -> Tensor:
    return seeded(*shape, dtype=BF16)


@pytest.mark.parametrize(
    ("fn", "roundings"),
    [
        pytest.param(F.silu, 2, id="silu"),
        pytest.param(F.gelu, 2, id="gelu"),
        pytest.param(lambda x: F.gelu(x, approximate="tanh"), 2, id="gelu_tanh"),
        pytest.param(F.softplus, 2, id="softplus"),
        pytest.param(F.mish, 2, id="mish"),
        pytest.param(F.hardswish, 2, id="hardswish"),
        pytest.param(F.elu, 2, id="elu"),
        pytest.param(lambda x: F.softmax(x, -1), 2, id="softmax"),
        pytest.param(lambda x: torch.sigmoid(x) * 0.1, 6, id="sigmoid_scaled"),
        pytest.param(lambda x: F.layer_norm(x, (8,)), 2, id="layer_norm"),
        pytest.param(lambda x: x.float().sin().to(BF16), 2, id="upcast"),
    ],
)
def test_one_rounding_per_op(fn: Callable[..., Any], roundings: int) -> None:
    captured = capture(fn, (x16(4, 8),))
    assert casts(captured) == roundings
    arithmetic = {n.dtype for n in captured.graph.nodes if n.is_a(Map, Reduce)}
    assert arithmetic <= {DType.F32, DType.BOOL}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("fn", "slope"),
    [
        pytest.param(torch.tanh, lambda y, g: g * (1 - y * y), id="tanh"),
        pytest.param(torch.sigmoid, lambda y, g: g * (1 - y) * y, id="sigmoid"),
    ],
)
def test_backwards_whose_cuda_kernels_round_each_step(
    fn: Callable[..., Any], slope: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    """PyTorch's kernels compute these in the 16-bit type itself, as its operators on tensors of that type do."""
    x, g = seeded(4096, dtype=dtype), seeded(4096, dtype=dtype, seed=1).detach()
    captured = capture(fn, (x,))
    (y, grad) = run_graph(captured, [x], [g], "native")
    want = slope(torch.tensor(np.asarray(y, np.float32)).to(dtype), g)
    assert np.array_equal(np.asarray(grad, np.float32), want.float().numpy())


def test_a_cube_rounds_its_square() -> None:
    x = seeded(4096, dtype=BF16)
    captured = capture(lambda v: v**3, (x,))
    (out, _) = run_graph(captured, [x], [torch.ones_like(x)], "native")
    v = x.detach()
    assert np.array_equal(np.asarray(out, np.float32), to_array(v * v * v))


def test_layer_norm_parameters_round_once_each() -> None:
    module = nn.LayerNorm(8).to(BF16)
    captured = capture(module, (x16(4, 8),))
    assert casts(captured) == 4  # y, dx, dgamma, dbeta


def test_integer_operands_round_to_the_common_type() -> None:
    captured = capture(lambda x, i: x * i, (x16(4), torch.tensor([1, 2, 3, 257])))
    x = torch.ones(4, dtype=BF16)
    (out, _) = run_graph(captured, [x, torch.tensor([1, 2, 3, 257])], [x], "native")
    assert float(out[3]) == 256.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_native_mode_agrees_with_pytorch(dtype: torch.dtype) -> None:
    """Rounded where PyTorch rounds: the same values but for single ulps of functions and summation order."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.LayerNorm(8), nn.GELU()).to(dtype)
    x = seeded(16, 8, dtype=dtype)
    captured = capture(module, (x,))
    want = module(x)
    tensors = [x, *module.parameters()]
    got = run_graph(captured, tensors, [torch.ones_like(want)], "native")[0]
    difference = abs(got.astype("float64") - to_array(want))
    assert difference.max() <= 8 * torch.finfo(dtype).eps
    assert (difference == 0).mean() > 0.9


def test_linear_bias_goes_into_the_dot() -> None:
    captured = capture(nn.Linear(4, 3), (seeded(2, 4, dtype=torch.float32),))
    dots = [n for n in captured.graph.forward_nodes() if n.is_a(Dot)]
    assert [len(d.args) for d in dots] == [3]
    assert all(n.dtype is DType.F32 for n in dots)


def test_layout_changes_cost_nothing() -> None:
    captured = capture(lambda x: x.clone().contiguous().detach() + 0, (seeded(3, 4, grad=False),))
    assert len(captured.graph.nodes) <= 4


def test_composites_that_autograd_does_not_see_on_meta() -> None:
    names = {str(op) for op in hidden_composites()}
    assert {"aten.relu6.default", "aten.where.ScalarOther"} <= names
    before = [dict(op.py_kernels) for op in hidden_composites()]
    capture(F.relu6, (seeded(3),))
    assert [dict(op.py_kernels) for op in hidden_composites()] == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_elements_of_a_filled_tensor_are_of_its_type(dtype):
    """A number beside a tensor is computed with as it is; a tensor that is full of it holds what its type can."""
    x = torch.arange(1, 200, dtype=torch.float32).to(dtype)
    for fn in (
        lambda v: v / torch.full_like(v, 0.1),
        lambda v: v * torch.full((), 1e-8, dtype=dtype) * 1e4,
        lambda v: v + torch.ones_like(v) * 0.1,
        lambda v: v * v.new_full((199,), 1 / 3),
    ):
        assert torch.equal(megafuse.fuse(fn, x, target="interpret")(x), fn(x))
