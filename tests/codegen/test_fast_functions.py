"""Errors of the fast functions over their whole range, and where they may be used."""

from __future__ import annotations

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

from megafuse.codegen.triton.helpers import HELPERS
from megafuse.codegen.triton.ops import bound, template
from megafuse.compiler import compile_call
from megafuse.core.device import device_spec
from megafuse.core.dtypes import DType


def helper(name: str):
    """A helper that is plain arithmetic, as a function of fp32 arrays."""
    space: dict[str, object] = {}
    exec(HELPERS[name].replace("@triton.jit", ""), space)
    return space[name]


def test_log1p_between_0_and_1():
    x = np.concatenate([np.linspace(0, 1, 1 << 20), np.logspace(-37, 0, 1 << 16)]).astype(np.float32)
    exact = np.log1p(x.astype(np.float64))
    found = helper("_log1p_unit")(x)
    assert found.dtype == np.float32
    inside = x > 0
    assert np.abs(found[inside] / exact[inside] - 1).max() < 1e-5
    assert found[x == 0].max() == 0
    assert np.isnan(helper("_log1p_unit")(np.float32("nan")))


@pytest.mark.parametrize("of", ["positive", "negative", ""])
def test_log1p_of_anything_else_is_the_full_one(of: str):
    assert template("log1p", DType.F32, True, of) == "libdevice.log1p({a})"
    assert template("log1p", DType.F32, False, "unit") == "libdevice.log1p({a})"
    assert template("log1p", DType.F32, True, "unit") == "_log1p_unit({a})"


def test_ranges_follow_from_the_functions_before():
    known = ""
    for fn, expected in (("abs", "positive"), ("neg", "negative"), ("exp", "unit"), ("log1p", "")):
        known = bound(fn, known)
        assert known == expected
    assert bound("exp", "") == bound("neg", "unit") == bound("exp", "positive") == ""
    assert bound("abs", "unit") == "positive"


def test_the_branch_of_softplus_that_is_left_out_changes_no_bit():
    """From 25 ln 2 on, softplus is its argument, and its derivative 1, in fp32."""
    x = np.linspace(25 * math.log(2), 120, 1 << 18).astype(np.float32)
    x = np.concatenate([x, np.float32([np.inf, 3e38])])
    tail = np.exp(-x)
    assert tail.dtype == np.float32
    assert np.array_equal(x + np.log1p(tail), x)
    assert np.all(np.float32(1) / (np.float32(1) + tail) == 1)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_fast_softplus_adds_little_to_the_rounding(dtype: str):
    """Of every 16-bit number: within a fiftieth of an ulp of that type; tails, infinity and NaN included."""
    half = dtype == "fp16"
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bits.view(np.float16).astype(np.float64) if half else (bits.astype(np.uint32) << 16).view(np.float32)
    x = x[np.isfinite(x)].astype(np.float32)
    tail = np.exp(-np.abs(x.astype(np.float64)))
    exact = np.maximum(x, 0) + np.log1p(tail)
    found = np.maximum(x, np.float32(0)) + helper("_log1p_unit")(tail.astype(np.float32))
    ulp = np.exp2(
        np.maximum(np.floor(np.log2(np.maximum(exact, 2.0**-126))) - (10 if half else 7), -24 if half else -133)
    )
    assert (np.abs(found - exact) / ulp).max() < 0.02
    special = np.float32([np.inf, -np.inf, np.nan])
    found = np.maximum(special, np.float32(0)) + helper("_log1p_unit")(np.exp(-np.abs(special)))
    assert found[0] == np.inf and found[1] == 0 and np.isnan(found[2])


def run_helper(name: str, x: np.ndarray) -> np.ndarray:
    """A helper of fp32 arrays, with Triton's functions replaced by numpy's and instructions by rounded fp64."""
    power = lambda v: np.exp2(v.astype(np.float64)).astype(np.float32)  # noqa: E731
    sigmoid = lambda v: (1 / (1 + np.exp(-v.astype(np.float64)))).astype(np.float32)  # noqa: E731
    space: dict[str, object] = {"tl": SimpleNamespace(abs=np.abs, where=np.where), "_exp2": power}
    space |= {"_sigmoid": sigmoid}
    exec(HELPERS[name].replace("@triton.jit", ""), space)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return space[name](x)


@pytest.mark.parametrize(("name", "exact"), [("_one_plus_erf", lambda v: math.erfc(-v)), ("_one_plus_tanh", None)])
def test_one_plus_a_function_is_right_relative_to_its_own_size(name, exact):
    """In fp32 the sum is right to 2**-24 alone, which far from 0 is more than the value."""
    exact = exact or (lambda v: 2 / (1 + math.exp(-2 * v)))
    x = np.concatenate([np.linspace(-3.9, 8, 200001), -np.logspace(-30, 0.5, 20001), np.logspace(-30, 2, 20001)])
    x = x.astype(np.float32)
    true = np.array([exact(float(v)) for v in x])
    found = run_helper(name, x)
    assert found.dtype == np.float32
    assert np.abs(found / true - 1).max() < 6e-6
    far = -np.concatenate([np.linspace(3.9, 30, 20001), np.logspace(1.4, 38, 2001)]).astype(np.float32)
    assert np.all(run_helper(name, far) >= 0)
    assert np.all(run_helper(name, far) <= [exact(float(v)) * 1.1 + 1e-12 if v > -300 else 0 for v in far])
    special = run_helper(name, np.float32([np.inf, -np.inf, np.nan]))
    assert special[0] == 2 and special[1] == 0 and np.isnan(special[2])


def texts(fn, dtype: torch.dtype, count: int = 1) -> str:
    """Generated kernels of ``fn`` on vectors of a type."""
    args = [torch.empty(64, 256, dtype=dtype, device="meta") for _ in range(count)]
    return "".join(k.text for k in compile_call(fn, args, {}, device_spec(90)).artifact("triton").kernels)


@pytest.mark.parametrize(("approximate", "name"), [("none", "_one_plus_erf("), ("tanh", "_one_plus_tanh(")])
def test_gelu_of_16_bit_types_takes_the_sum_as_one_function(approximate, name):
    gelu = lambda v: torch.nn.functional.gelu(v, approximate=approximate)  # noqa: E731
    for dtype in (torch.bfloat16, torch.float16):
        assert name in texts(gelu, dtype)
        assert "tl.erf(" not in texts(gelu, dtype)
    assert name not in texts(gelu, torch.float32)


def test_a_term_that_others_read_too_is_kept():
    text = texts(lambda v: (((e := torch.erf(v.float())) + 1) * e).bfloat16(), torch.bfloat16)
    assert "tl.erf(" in text and "_one_plus_erf(" not in text
    text = texts(lambda v: (torch.erf(v.float()) + 2).bfloat16(), torch.bfloat16)
    assert "tl.erf(" in text and "_one_plus_erf(" not in text


def test_tanh_is_right_relative_to_its_own_size():
    x = np.concatenate([np.linspace(-12, 12, 400001), np.logspace(-37, 1, 40001)]).astype(np.float32)
    x = x[x != 0]
    true = np.tanh(x.astype(np.float64))
    found = run_helper("_tanh", x)
    assert found.dtype == np.float32
    assert np.abs(found / true - 1).max() < 2e-6
    special = run_helper("_tanh", np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0]))
    assert special[0] == 1 and special[1] == -1 and np.isnan(special[2])
    assert np.array_equal(np.signbit(special[3:]), [False, True])


def test_quotients_that_are_rounded_at_once_are_approximate():
    """By a number, a product with its inverse; whatever is not rounded at once, or to fp32, stays exact."""
    assert "* 0.03333" in texts(lambda v: torch.tanh(v / 30), torch.bfloat16)
    text = texts(lambda v, w: v / w, torch.bfloat16, 2)
    assert " / " in text and "div_rn" not in text
    assert "div_rn" in texts(lambda v, w: v / w, torch.float32, 2)
    assert "div_rn" in texts(lambda v, w: torch.floor(v.float() / w.float()), torch.bfloat16, 2)
    assert "div_rn" in texts(lambda v: v / 1e-45, torch.float32)
    assert "/ " in texts(lambda v: v / 1e-39, torch.bfloat16), "the inverse is no fp32 number"


def test_rounded_quotients_of_bf16_numbers_are_exact():
    """All pairs of significands: the quotient moved by two ulps of fp32 either way rounds to the same bf16 number."""
    a = np.arange(128, 256, dtype=np.float32)[:, None] * np.float32([1, 2])[:, None, None]
    b = np.arange(128, 256, dtype=np.float32)[None, :]
    exact = (a.astype(np.float64) / b).astype(np.float32)
    for moved in (exact * np.float32(1 + 2**-22), exact * np.float32(1 - 2**-22)):
        assert np.array_equal(moved.astype(ml_dtypes.bfloat16), exact.astype(ml_dtypes.bfloat16))


def test_near_functions_are_for_what_is_rounded_to_16_bits():
    """An fp32 result beside 16-bit values is judged as fp32: it gets the full function."""
    near, full = "_tanh(", "libdevice.tanh("
    assert near in texts(torch.tanh, torch.bfloat16)
    assert near in texts(lambda v: (torch.tanh(v.float()) * 3 + v).half(), torch.bfloat16)
    assert full in texts(torch.tanh, torch.float32)
    assert full in texts(lambda v: torch.tanh(v.float()), torch.bfloat16)
    assert full in texts(lambda v: torch.tanh(v.float()).sum(1).bfloat16(), torch.bfloat16)
    assert "tl.erf(" in texts(lambda v: torch.erf(v.float()) + 1, torch.bfloat16)
    mish = texts(torch.nn.functional.mish, torch.float16)
    assert near in mish and "libdevice" not in mish


def test_what_is_compared_or_rounded_to_whole_numbers_keeps_the_full_functions():
    """A small error before a step would be a whole step in some elements."""
    for fn in (
        lambda v: torch.floor(torch.tanh(v.float()) * 100).bfloat16(),
        lambda v: torch.where(torch.tanh(v.float()) > 0.5, v, -v),
        lambda v: (torch.tanh(v.float()) > 0.5).bfloat16() * v,
    ):
        assert "libdevice.tanh(" in texts(fn, torch.bfloat16)
    assert "_tanh(" in texts(lambda v: torch.where(v > 0, torch.tanh(v.float()), 0.5).bfloat16(), torch.bfloat16)
