"""Which sizes of two calls are open, and how captures at several sizes become one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafuse.capture.api import capture
from megafuse.capture.open_call import Layout, open_calls
from megafuse.capture.types import Captured
from megafuse.capture.unify import Differs, Scalar, corners, unify
from megafuse.core.sizes import Dim, is_open
from megafuse.ir.verify import verify

N = Dim("n", 64)


def layout(*shape: int) -> Layout:
    t = torch.empty(shape)
    return tuple(t.shape), t.stride()


def texts(first: list[Layout], second: list[Layout], arguments: int | None = None) -> list[str]:
    return [repr(c.layouts) for c in open_calls(first, second, len(first) if arguments is None else arguments)]


def test_sizes_that_differ_alike_are_one() -> None:
    found = texts([layout(8, 4), layout(8, 3), layout(5)], [layout(16, 4), layout(16, 3), layout(5)])
    assert found == ["(((n, 4), (4, 1)), ((n, 3), (3, 1)), ((5,), (1,)))"]


def test_sizes_that_differ_otherwise_are_independent_or_follow() -> None:
    assert texts([layout(8, 4), layout(160)], [layout(16, 4), layout(320)]) == [
        "(((n, 4), (4, 1)), ((m,), (1,)))",
        "(((n, 4), (4, 1)), ((n * 20,), (1,)))",
    ]
    assert texts([layout(8, 5, 3)], [layout(16, 7, 3)]) == ["(((n, m, 3), (m * 3, 3, 1)),)"]


def test_strides_are_those_of_dense_tensors_or_fixed() -> None:
    a, b = torch.empty(5, 8).t(), torch.empty(5, 16).t()
    assert texts([((8, 5), a.stride())], [((16, 5), b.stride())]) == ["(((n, 5), (1, n)),)"]
    assert texts([((8, 5), (30, 1))], [((16, 5), (30, 1))]) == ["(((n, 5), (30, 1)),)"]
    assert texts([((8, 5), (30, 1))], [((16, 5), (40, 1))]) == []


def test_what_no_open_size_explains() -> None:
    assert texts([layout(8, 4)], [layout(8, 4, 1)]) == []
    assert texts([layout(1, 4)], [layout(8, 4)]) == [] and texts([layout(8, 4)], [layout(0, 4)]) == []
    assert texts([layout(8), layout(3)], [layout(8), layout(4)], arguments=1) == []  # a parameter


def test_sizes_are_read_off_a_call() -> None:
    (call,) = open_calls([layout(8, 4), layout(8)], [layout(16, 4), layout(16)], 2)
    assert call.values([layout(37, 4), layout(37)]) == {"n": 37}
    assert call.values([layout(37, 4), layout(38)]) is None and call.values([layout(1, 4), layout(1)]) is None
    assert call.values([layout(37, 5), layout(37)]) is None and call.values([layout(37, 4)]) is None
    assert call.values([((37, 4), (8, 1)), layout(37)]) is None


def captures(fn: Callable[..., Any], *shape: Any, sizes: tuple[int, ...] = (11, 17, 40)) -> list[Captured]:
    return [capture(fn, (torch.randn([s if d is None else d for d in shape], requires_grad=True),)) for s in sizes]


def together(fn: Callable[..., Any], *shape: Any) -> tuple[Captured, list[Scalar]]:
    found, scalars = unify(captures(fn, *shape), [{"n": s} for s in (11, 17, 40)], [N])
    verify(found.graph)
    return found, scalars


def test_a_module_becomes_one_graph_with_open_sizes() -> None:
    found, scalars = together(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.SiLU()), None, 3, 6)
    assert not scalars and repr(found.graph.inputs[0].shape) == "(n, 3, 6)"
    assert repr(found.out_strides) == "((15, 5, 1),)"
    assert any(repr(node.shape) == "(1, n * 3, 5)" for node in found.graph.nodes)


def test_numbers_that_depend_on_the_size_become_scalars() -> None:
    found, scalars = together(lambda x: (x * 2).mean(), None, 6)
    assert {repr(s.size) for s in scalars} == {"n * 6"} and {s.at({"n": 5}) for s in scalars} <= {1 / 30, 30.0}
    assert [n.attrs.name for n in found.graph.inputs][1:2] == ["scalar_0"]
    assert len(found.leaves) == 1 + len(scalars) and found.graph.inputs[-1].attrs.role == "tangent"


def test_offsets_and_results_may_depend_on_the_size() -> None:
    found, _ = together(lambda x: (x[-1], x[1:] - x[:-1], x.shape[0] * 3), None, 6)
    assert ("value",) not in found.out_spec.leaves and is_open(found.out_spec.leaves[-1][1])
    assert repr(found.out_spec.leaves[-1][1]) == "n * 3"


def by_size(x: Tensor) -> Tensor:
    return torch.relu(x) if x.shape[0] > 16 else torch.tanh(x)


def fewer(x: Tensor) -> Tensor:
    return x[: x.shape[0] // 2] * 2


def rooted(x: Tensor) -> Tensor:
    return x * x.shape[0] ** 0.5


def listed(x: Tensor) -> Tensor:
    return x + torch.tensor([float(i) for i in range(x.shape[0])])[:, None]


@pytest.mark.parametrize(
    ("fn", "message"),
    [(by_size, "something else|depending on the size"), (fewer, "no simple rule"), (rooted, "no simple rule"),
     (listed, "constant tensors|no simple rule")],
)  # fmt: skip
def test_what_depends_on_the_size_otherwise_is_refused(fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(Differs, match=message):
        together(fn, None, 6)


def test_two_open_sizes() -> None:
    points = [*corners({"n": 5, "m": 7}, {"n": 9, "m": 11}), {"n": 30, "m": 20}]
    module = nn.Sequential(nn.Linear(6, 4), nn.GELU())
    found = [capture(module, (torch.randn(p["n"], p["m"], 6, requires_grad=True),)) for p in points]
    one, scalars = unify(found, points, [N, Dim("m", 16)])
    verify(one.graph)
    assert not scalars and any(repr(node.shape) == "(1, m * n, 4)" for node in one.graph.nodes)


def test_a_capture_that_does_not_follow_the_others_is_refused() -> None:
    """The third point is what shows that two were not enough."""
    found = captures(lambda x: F.pad(x, (0, 0, 0, x.shape[0] % 6)), None, 6, sizes=(11, 17, 40))
    with pytest.raises(Differs):
        unify(found, [{"n": 11}, {"n": 17}, {"n": 40}], [N])
