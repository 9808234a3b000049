"""Errors of the fast functions over their whole range, and where they may be used."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megafuse.codegen.triton.helpers import HELPERS
from megafuse.codegen.triton.ops import bound, template
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
