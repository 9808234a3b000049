"""What is read by index: the captured graph is PyTorch's function, gradients are scatters with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture_helpers import compare, double, seeded
from megafuse.capture.api import capture
from megafuse.core.errors import NotFusableError
from megafuse.ir.types import Gather

Case = tuple[Callable[..., Any], tuple[int, ...], list[Tensor]]


def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers from ``low`` to ``high`` - 1, with repeats, the same every time."""
    return torch.randint(low, high, shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


# (function of a float tensor and indices, the tensor's shape, indices)
CASES: dict[str, Case] = {
    "embedding": (lambda x, i: F.embedding(i, x), (7, 5), [ints(0, 7, 3, 4)]),
    "embedding_i32": (lambda x, i: F.embedding(i, x), (7, 5), [ints(0, 7, 3, 4, dtype=torch.int32)]),
    "embedding_of_one": (lambda x, i: F.embedding(i, x), (7, 5), [torch.tensor(3)]),
    "embedding_of_none": (lambda x, i: F.embedding(i, x), (7, 5), [ints(0, 7, 0)]),
    "padding": (lambda x, i: F.embedding(i, x, padding_idx=2), (7, 5), [ints(0, 7, 13)]),
    "by_frequency": (lambda x, i: F.embedding(i, x, scale_grad_by_freq=True), (7, 5), [ints(0, 7, 13)]),
    "index_select": (lambda x, i: x.index_select(1, i), (3, 7, 5), [ints(0, 7, 4)]),
    "index_select_of_one": (lambda x, i: x.index_select(-1, i), (3, 7), [torch.tensor(6)]),
    "index_select_i32": (lambda x, i: x.index_select(0, i), (3, 7), [ints(0, 3, 6, dtype=torch.int32)]),
    "first": (lambda x, i: x[i], (7, 5), [ints(-7, 7, 3, 4)]),
    "middle": (lambda x, i: x[:, i], (3, 7, 5), [ints(-7, 7, 4)]),
    "last": (lambda x, i: x[..., i], (3, 7, 5), [ints(-5, 5, 2, 3)]),
    "index_i32": (lambda x, i: x[i], (7, 5), [ints(-7, 7, 6, dtype=torch.int32)]),
    "two": (lambda x, i, j: x[:, i, j], (3, 7, 5), [ints(-7, 7, 6), ints(-5, 5, 6)]),
    "two_that_broadcast": (lambda x, i, j: x[i, j], (7, 5, 2), [ints(-7, 7, 4, 1), ints(-5, 5, 6)]),
    "two_apart": (lambda x, i, j: x[i, :, j], (3, 7, 5), [ints(-3, 3, 6), ints(-5, 5, 6)]),
    "three": (lambda x, i, j: x[i, j, i], (3, 7, 3), [ints(-3, 3, 6), ints(-7, 7, 6)]),
    "of_an_index": (lambda x, i, j: x[i[j]], (7, 5), [ints(-7, 7, 9), ints(0, 9, 4)]),
    "take": (lambda x, i: torch.take(x, i), (5, 7), [ints(-35, 35, 4, 3)]),
    "gather": (lambda x, i: x.gather(1, i), (3, 7, 5), [ints(0, 7, 3, 4, 5)]),
    "gather_shorter": (lambda x, i: x.gather(-1, i), (3, 7, 5), [ints(0, 5, 2, 4, 6)]),
    "gather_of_one": (lambda x, i: x.gather(0, i), (), [torch.tensor(0)]),
    "gather_in_one": (lambda x, i: x.gather(0, i), (), [ints(0, 1, 3)]),
    "gather_of_computed": (lambda x, i: x.softmax(1).gather(1, i), (4, 9), [ints(0, 9, 4, 3)]),
    "view": (lambda x, i: x.view(15, 6)[i], (3, 5, 6), [ints(-15, 15, 4)]),
    "transposed": (lambda x, i: x.t()[i], (6, 15), [ints(-15, 15, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_pytorchs_function(name: str) -> None:
    fn, shape, indices = CASES[name]
    c = compare(lambda x, *i: fn(x, *i).sin() * 2, seeded(*shape), *indices).captured
    assert any(n.is_a(Gather) for n in c.graph.nodes)
    (left,) = c.support.opaque
    assert left.reason.startswith("scatters by index")
    ordered = left.target.split(".")[1] in ("embedding_dense_backward", "index_put")
    assert ordered == (not left.reason.endswith("in no fixed order"))


def test_tables_of_other_types_need_no_gradient() -> None:
    x, i = seeded(3, 4), ints(0, 9, 3, 4)
    c = compare(lambda x, t, m, i: torch.where(m[i], x * t[i], -x), x, ints(-5, 5, 9), ints(0, 2, 9).bool(), i).captured
    assert not c.support.opaque


def test_one_element_of_each_line_of_a_computed_value_is_compared() -> None:
    c = compare(lambda x, i: x.log_softmax(1).gather(1, i[:, None]), seeded(4, 9), ints(0, 9, 4)).captured
    assert not c.support.opaque and not any(n.is_a(Gather) for n in c.graph.nodes)


def test_rows_that_are_renormalised_are_the_library_s() -> None:
    module = double(nn.Embedding(5, 4, max_norm=0.5))
    c = compare(lambda i: F.silu(module(i)), torch.tensor([[0, 3], [3, 4]])).captured
    reasons = {e.target: e.reason for e in c.support.opaque}
    assert reasons["aten.embedding_renorm.default"] == "changes rows of a table in place"


@pytest.mark.parametrize("sparse", ["embedding", "gather"])
def test_sparse_gradients_are_left_to_pytorch(sparse: str) -> None:
    fns: dict[str, Callable[..., Tensor]] = {
        "embedding": lambda x, i: F.embedding(i, x, sparse=True),
        "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, 5), sparse_grad=True),
    }
    args = seeded(7, 5, dtype=torch.float32), ints(0, 7, 3)
    with pytest.raises(NotFusableError, match="gives a sparse tensor"):
        capture(fns[sparse], args)
    no_gradient = args[0].detach(), args[1]
    assert not capture(fns[sparse], no_gradient).support.opaque
