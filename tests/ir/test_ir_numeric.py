"""Every pointwise function against PyTorch, edges included."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Graph
from megafuse.ir.interpret import evaluate
from megafuse.ir.numeric import FUNCTIONS
from megafuse.ir.ops import MAP_FNS
from megafuse.ir.types import TensorType

EDGES = "nan inf -inf 0 -0.0 1 -1 0.5 1.5 2.5 -2.5 3 -3 7.3 -0.3 1e-30 88 -200"
VALUES = torch.tensor([float(x) for x in EDGES.split()], dtype=torch.float64)
INTS = torch.tensor([-7, -2, -1, 1, 2, 5], dtype=torch.int32)

UNIT = torch.cat([torch.linspace(0.0005, 0.9995, 41), torch.tensor([1e-300, 1e-20, 1e-6, 0, 1, 2])]).double()
UNARY = [n for n, f in MAP_FNS.items() if f.arity == 1 and n != "not"]
BINARY = [n for n, f in MAP_FNS.items() if f.arity == 2 and n not in ("and", "or", "xor", "shl", "shr")]
INT_BINARY = "add sub mul div pow fmod remainder floordiv maximum minimum and or xor lt eq".split()
TORCH = {
    "recip": torch.reciprocal,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}


def reference(fn: str) -> Callable[..., torch.Tensor]:
    """PyTorch's function of that name."""
    return TORCH.get(fn) or getattr(torch, fn, None) or getattr(torch.special, fn)


def pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of values."""
    a, b = torch.meshgrid(values, values, indexing="ij")
    return a.reshape(-1), b.reshape(-1)


def test_every_function_is_implemented() -> None:
    assert set(FUNCTIONS) == set(MAP_FNS)


@pytest.mark.parametrize("fn", UNARY)
def test_unary_float(fn: str) -> None:
    with np.errstate(all="ignore"):
        got = FUNCTIONS[fn](VALUES.numpy())
    np.testing.assert_allclose(got, reference(fn)(VALUES).numpy(), rtol=1e-12, atol=0 if fn != "lgamma" else 1e-15)


@pytest.mark.parametrize("fn", ["erfinv", "ndtri"])
def test_inverses_on_their_domain(fn: str) -> None:
    np.testing.assert_allclose(FUNCTIONS[fn](UNIT.numpy()), reference(fn)(UNIT).numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("fn", BINARY)
def test_binary_float(fn: str) -> None:
    a, b = pairs(VALUES)
    with np.errstate(all="ignore"):
        got = FUNCTIONS[fn](a.numpy(), b.numpy())
    want = reference(fn)(a, b).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-12)
    if got.dtype.kind == "f":
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])


@pytest.mark.parametrize("fn", INT_BINARY)
def test_binary_int(fn: str) -> None:
    a, b = pairs(INTS)
    if fn == "div":
        want = torch.div(a, b, rounding_mode="trunc")
    elif fn == "pow":
        want = torch.tensor([int(x) ** int(y) if y > 0 else int(float(x) ** int(y)) for x, y in zip(a, b, strict=True)])
    else:
        want = reference(fn)(a, b)
    np.testing.assert_array_equal(FUNCTIONS[fn](a.numpy(), b.numpy()), want.numpy())


@pytest.mark.parametrize("fn", ["shl", "shr"])
def test_shifts(fn: str) -> None:
    a, b = np.array([1, -8, 5], np.int32), np.array([3, 1, 2], np.int32)
    want = {"shl": [8, -16, 20], "shr": [0, -4, 1]}[fn]
    np.testing.assert_array_equal(FUNCTIONS[fn](a, b), want)


@pytest.mark.parametrize("fn", ["sigmoid", "erf", "add", "remainder", "tanh"])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
def test_16_bit_maps_compute_in_fp32_and_round_once(fn: str, dtype: DType) -> None:
    torch_dtype = torch.bfloat16 if dtype is DType.BF16 else torch.float16
    b = Builder()
    x = b.input("x", TensorType((64,), dtype), (1,), "arg", 0)
    node = b.map(fn, *[x, 0.7][: MAP_FNS[fn].arity])
    value = torch.linspace(-3, 3, 64).to(torch_dtype)
    (got,) = evaluate(Graph((x,), (node,), 1), [value.float().numpy()], mode="native")
    args = [value.float(), torch.tensor(0.7)][: MAP_FNS[fn].arity]
    want = reference(fn)(*args).to(torch_dtype)
    assert got is not None and got.dtype.itemsize == 2
    np.testing.assert_allclose(got.astype(np.float32), want.float().numpy(), rtol=0, atol=1e-7)
