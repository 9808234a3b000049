"""Open sizes: arithmetic is that of integers at every value; an answer is given only where it is the same for all."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafuse.core.sizes import (
    LEAST,
    Dim,
    OpenSize,
    ceil_div,
    divides,
    huge,
    is_open,
    may_exceed,
    open_dims,
    open_size,
    settle,
    typical,
)

N, M = Dim("n", 64), Dim("m", 10)
n, m = open_size(N), open_size(M)
VALUES = [{"n": a, "m": b} for a, b in itertools.product((2, 3, 7, 16, 1000), (2, 5, 64))]
RULES: list[Callable[[Any, Any], Any]] = [operator.add, operator.sub, operator.mul]
TESTS: list[Callable[[Any, Any], Any]] = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


def at(size: Any, values: dict[str, int]) -> int:
    return size.at(values) if is_open(size) else size


leaf = st.one_of(st.integers(-20, 20), st.sampled_from([n, m]))
size = st.recursive(leaf, lambda s: st.builds(lambda f, a, b: f(a, b), st.sampled_from(RULES), s, s), max_leaves=5)


@settings(max_examples=200, deadline=None)
@given(size, size)
def test_arithmetic_is_that_of_integers(a: Any, b: Any) -> None:
    for values in VALUES:
        x, y = at(a, values), at(b, values)
        assert [at(f(a, b), values) for f in RULES] == [f(x, y) for f in RULES]
        assert eval(repr(a), dict(values)) == x  # the text means the same
        assert eval(f"2 * {a}", dict(values)) == 2 * x


@settings(max_examples=200, deadline=None)
@given(size, size)
def test_an_answer_holds_for_all_values(a: Any, b: Any) -> None:
    for test in TESTS[:4]:
        try:
            answer = test(a, b)
        except OpenSize:
            continue
        assert all(test(at(a, v), at(b, v)) == answer for v in VALUES)
    if a == b:
        assert hash(a) == hash(b) and all(at(a, v) == at(b, v) for v in VALUES)


@settings(max_examples=200, deadline=None)
@given(size, st.one_of(st.integers(1, 40), size))
def test_division_gives_a_quotient_and_a_rest_or_no_answer(a: Any, b: Any) -> None:
    for rule in (operator.floordiv, operator.mod):
        try:
            found = rule(a, b)
        except (OpenSize, ZeroDivisionError):
            continue
        for v in VALUES:
            if at(b, v):
                assert at(found, v) == rule(at(a, v), at(b, v))


def test_what_is_known() -> None:
    assert n * 20 % 4 == 0 and (n * 20 + 3) % 4 == 3 and (n * m) // n == m and (n * n - n) // n == n - 1
    assert n > 1 and n * m > n and n - 1 < n and max(n * 20, n) == n * 20 and bool(n)
    assert divides(20, n * 20) and not divides(16, n) and may_exceed(n, 8) and not may_exceed(1, n)
    assert typical(n * 20) == 1280 and typical(7) == 7 and n * 20 / 2.0 == 640.0
    assert repr(ceil_div(n * 20, 64)) == "(n * 20 + 63) // 64" and ceil_div(n * 64, 64) == n
    assert f"row * {n * 20}" == "row * (n * 20)" and str((n, 20)) == "(n, 20)"
    assert n != 8 and n not in (1, 8) and n == open_size(N) and n != open_size(Dim("n", 65))


@pytest.mark.parametrize(
    "question",
    [
        lambda: n < 8,
        lambda: n * 2 > m,
        lambda: n % 4,
        lambda: range(n),
        lambda: n // m,
        lambda: 100 // n,
        lambda: m // n,
    ],
)
def test_what_depends_on_the_size_is_not_answered(question: Callable[[], Any]) -> None:
    with pytest.raises(OpenSize):
        question()


def test_huge_is_what_needs_wide_indices() -> None:
    assert huge(2**31) and not huge(2**30)
    assert not huge(n * 2**40) and huge(open_size(Dim("n", 64, wide=True)) * 2)


@dataclass(frozen=True)
class Record:
    shape: tuple[int, ...]
    name: str = "x"


def test_settling_leaves_what_has_no_open_size_as_it_is() -> None:
    plain, open_one = Record((1, 2)), Record((n, n * 20))
    assert settle(open_one, {"n": 3}) == Record((3, 60)) and settle([{"a": n}], {"n": 3}) == [{"a": 3}]
    assert settle(plain, {"n": 3}) is plain
    assert open_dims((plain, [open_one, (m + 1,)])) == (M, N) and open_dims(plain) == ()
    assert LEAST == 2
