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
    assert np.abs(found[inside] / exact[inside] - 1).max() < 2e-6
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
