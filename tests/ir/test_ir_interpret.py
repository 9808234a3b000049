"""The evaluator against PyTorch and NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from ir_graphs import argument, graph_of, random_inputs
from megafuse.core.dtypes import DType
from megafuse.core.errors import InputError
from megafuse.ir.graph import Builder, Graph, Node
from megafuse.ir.interpret import Mode, evaluate
from megafuse.ir.types import Opaque, TensorType


def value(node: Node, *inputs: Node, arrays: list[np.ndarray] | None = None, mode: Mode = "native") -> np.ndarray:
    """The value of one node."""
    graph = graph_of(node, inputs=inputs)
    out = evaluate(graph, random_inputs(graph) if arrays is None else arrays, mode=mode)[0]
    assert out is not None
    return out


def test_dot_rounds_once() -> None:
    b = Builder()
    x, w, bias = (argument(b, s, DType.BF16, i) for i, s in enumerate([(2, 5, 64), (2, 64, 3), (3,)]))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=n.shape).astype(ml_dtypes.bfloat16) for n in (x, w, bias)]
    got = value(b.dot(x, w, DType.BF16, bias), x, w, bias, arrays=arrays)
    wide = [a.astype(np.float32) for a in arrays]
    np.testing.assert_array_equal(got, (wide[0] @ wide[1] + wide[2]).astype(ml_dtypes.bfloat16))


def test_f64_mode_ignores_narrowing() -> None:
    b = Builder()
    x = argument(b, (3,), DType.F32)
    third = b.cast(b.map("div", x, 3.0), DType.BF16)
    got = value(b.reduce("sum", third, [0]), x, arrays=[np.ones(3)], mode="f64")
    assert got.dtype == np.float64 and got == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("fn", ["sum", "max", "min", "prod"])
def test_16_bit_reductions_accumulate_in_fp32(fn: str) -> None:
    b = Builder()
    x = argument(b, (300, 2), DType.BF16)
    array = (1 + np.arange(600).reshape(300, 2) % 3 / 128).astype(ml_dtypes.bfloat16)
    reference = torch.from_numpy(array.astype(np.float64))
    want = {"sum": reference.sum, "max": reference.amax, "min": reference.amin, "prod": reference.prod}[fn](0)
    got = value(b.reduce(fn, x, [0]), x, arrays=[array])
    np.testing.assert_allclose(got.astype(np.float64), want.numpy(), rtol=2**-8)


def test_reductions_propagate_nan() -> None:
    b = Builder()
    x = argument(b, (3,))
    assert np.isnan(value(b.reduce("max", x, [0]), x, arrays=[np.array([1, np.nan, 3])]))


@pytest.mark.parametrize(("source", "target"), [(2.7, 2), (-2.7, -2), (300.0, 44)])
def test_float_to_narrow_integer_truncates_and_wraps(source: float, target: int) -> None:
    b = Builder()
    x = argument(b, (1,))
    assert value(b.cast(x, DType.I8), x, arrays=[np.array([source])])[0] == target


def test_casts_round_to_nearest_even() -> None:
    b = Builder()
    x = argument(b, (3,))
    array = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    got = value(b.cast(x, DType.BF16), x, arrays=[array]).astype(np.float32)
    np.testing.assert_array_equal(got, torch.from_numpy(array).bfloat16().float().numpy())


def test_moves() -> None:
    b = Builder()
    x = argument(b, (2, 3))
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    cases = {
        b.permute(x, (1, 0)): a.T,
        b.reshape(x, (3, 2)): a.reshape(3, 2),
        b.expand(b.reshape(x, (2, 1, 3)), (2, 4, 3)): np.repeat(a[:, None], 4, 1),
        b.slice(x, (1, 2), (2, 2), (-1, -2)): a[::-1, ::-2],
        b.slice(x, (0, 3), (2, 0)): a[:, 3:],
        b.pad(x, (1, 0), (3, 4), 7.0): np.pad(a, ((1, 0), (0, 1)), constant_values=7),
        b.concat([x, x], -1): np.concatenate([a, a], 1),
        b.iota((2, 3), 1): np.array([[0, 1, 2]] * 2),
    }
    for node, want in cases.items():
        np.testing.assert_array_equal(value(node, x, arrays=[a]), want)


def test_16_bit_constants_are_fp32_scalars_until_stored() -> None:
    b = Builder()
    x = argument(b, (1,), DType.BF16)
    wide = b.cast(b.const(0.1, DType.BF16), DType.F32)
    assert value(wide, x) == np.float32(0.1)
    assert value(b.reshape(b.const(0.1, DType.BF16), (1,)), x)[0] == ml_dtypes.bfloat16(0.1)


def test_where_and_broadcasting() -> None:
    b = Builder()
    x, y = argument(b, (2, 3), position=0), argument(b, (3,), position=1)
    node = b.map("where", b.map("gt", x, y), x, 0.0)
    a, c = np.arange(6.0).reshape(2, 3), np.full(3, 2.0)
    np.testing.assert_array_equal(value(node, x, y, arrays=[a, c]), np.where(a > c, a, 0))


def test_opaque_calls() -> None:
    b = Builder()
    x = argument(b, (3,))
    types = (None, TensorType((3,), DType.F32), TensorType((3,), DType.I64))
    call = b.opaque(Opaque("aten.sort.default", 0, "no converter", types), [x])
    graph = Graph((x,), (b.pick(call, 1), None, b.pick(call, 2)), 3)
    array = np.array([3.0, 1.0, 2.0], np.float32)

    def run(node: Node, args: list[np.ndarray]) -> tuple[np.ndarray | None, ...]:
        return None, np.sort(args[0]), np.argsort(args[0])

    values, nothing, order = evaluate(graph, [array], mode="native", opaque=run)
    assert nothing is None
    np.testing.assert_array_equal(values, [1, 2, 3])
    np.testing.assert_array_equal(order, [1, 2, 0])
    with pytest.raises(InputError, match="calls aten"):
        evaluate(graph, [array])


def test_wrong_inputs_are_named() -> None:
    b = Builder()
    x = argument(b, (3,))
    graph = graph_of(x, inputs=[x])
    with pytest.raises(InputError, match="'x0' has shape"):
        evaluate(graph, [np.zeros(4)])
    with pytest.raises(InputError, match="1 inputs, got 0"):
        evaluate(graph, [])


def test_outputs_are_own_arrays() -> None:
    b = Builder()
    x = argument(b, (1,))
    array = np.ones(1, np.float32)
    for node in (x, b.expand(x, (4,))):
        value(node, x, arrays=[array])[...] = 2
    assert array[0] == 1
