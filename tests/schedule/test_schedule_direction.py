"""Which kernels start with their last rows."""

from __future__ import annotations

import pytest

from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Graph
from schedule_graphs import arg, graph, mixed, norm, step_of


def turned(made: Graph) -> list[bool]:
    """Of each kernel, in order of their launches."""
    return [k.last_first for k in step_of(made).kernels]


def two_norms(batch: int) -> Graph:
    """Statistics of all tokens of a sample, then norms of its mixed tokens: two kernels that read the input."""
    b = Builder()
    x = arg(b, 0, batch, 16, 256)
    return graph([x], norm(b, mixed(b, norm(b, x))))


@pytest.mark.parametrize(("batch", "large"), [(4096, True), (16, False)])
def test_what_the_cache_does_not_hold_whole_is_taken_from_its_end(batch: int, large: bool) -> None:
    assert turned(two_norms(batch)) == [False, large]


@pytest.mark.parametrize(("rows", "large"), [(65536, True), (1024, False)])
def test_library_calls_walk_from_the_first_row(rows: int, large: bool) -> None:
    b = Builder()
    x, w = arg(b, 0, 1, rows, 512), arg(b, 1, 1, 512, 512)
    made = b.map("exp", norm(b, b.dot(x, w, DType.F32)))
    assert turned(graph([x, w], made)) == [large]


def test_directions_take_turns() -> None:
    """A kernel after one that started with its last rows starts with the first."""
    b = Builder()
    x = arg(b, 0, 4096, 16, 256)
    once = norm(b, mixed(b, norm(b, x)))
    found = turned(graph([x], norm(b, mixed(b, once))))
    assert len(found) > 2
    assert found == [n % 2 == 1 for n in range(len(found))]


def test_what_the_call_before_did_not_touch_is_taken_from_its_start() -> None:
    b = Builder()
    x, y = arg(b, 0, 4096, 16, 256), arg(b, 1, 65536, 512)
    assert not any(turned(graph([x, y], norm(b, mixed(b, x)), norm(b, y))))
