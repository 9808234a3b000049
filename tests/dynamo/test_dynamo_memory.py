"""Outputs that are views, and changes in place: as in eager mode, in generated kernels where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafuse
from dynamo_helpers import INTERPRET, check_compiled, compilations, compiled, graphs_made
from megafuse import NotFusedWarning

# PyTorch's own, raised when Dynamo looks at the result of an earlier graph
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def data(*shape: int, grad: bool = False, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def view_and_value(x: Tensor) -> Any:
    return x.view(-1), x.sin()


def halves(x: Tensor) -> Any:
    return (x.sin() * 2).chunk(2)


def value_and_views(x: Tensor) -> Any:
    h = x.exp()
    return h.t(), h[:, 0], h, h.detach(), h.sum()


def view_of_a_part(x: Tensor) -> Any:
    return x[1:].unsqueeze(0), x.cos().unbind(1), x


def changed_then_viewed(x: Tensor) -> Any:
    h = x.sin()
    h[:, 0] = 0
    h.mul_(2)
    return h, h.view(-1), x.view(2, -1)


VIEWED = [view_and_value, halves, value_and_views, view_of_a_part, changed_then_viewed]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", VIEWED)
def test_outputs_share_memory_as_in_eager_mode(fn: Callable[[Tensor], Any], dynamic: bool, grad: bool) -> None:
    with graphs_made() as made:
        ours, theirs = data(4, 6, grad=grad), data(4, 6, grad=grad)
        got, wanted = flat(compiled(fn, dynamic=dynamic)(ours)), flat(fn(theirs))
    assert compilations(made)
    assert sharing([ours, *got]) == sharing([theirs, *wanted])
    assert [t.requires_grad for t in got] == [t.requires_grad for t in wanted]
    torch.testing.assert_close(got, wanted, check_stride=True)
    ours_now, theirs_now = ([t.detach() for t in (x, *out)] for x, out in ((ours, got), (theirs, wanted)))
    ours_now[1].add_(1)
    theirs_now[1].add_(1)
    torch.testing.assert_close(ours_now, theirs_now)


@pytest.mark.parametrize("fn", VIEWED)
def test_gradients_through_views(fn: Callable[[Tensor], Any]) -> None:
    check_compiled(fn, data(4, 6, grad=True))


def flat(out: Any) -> list[Tensor]:
    return list(torch.utils._pytree.tree_leaves(out))


def sharing(tensors: list[Tensor]) -> list[int]:
    """For each tensor, the first one that has the same storage."""
    places = [t.untyped_storage().data_ptr() for t in tensors]
    return [places.index(p) for p in places]


def test_views_alone_run_no_kernels() -> None:
    with graphs_made() as made:
        x = data(4, 6)
        out = compiled(lambda x: x.view(-1)[2:])(x)
    assert not made
    assert out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


# --- changes in place -------------------------------------------------------------------------------------------------


def test_a_changed_input_is_changed() -> None:
    def fn(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.detach().sum(0)).mul_(0.5)
        return x * total

    (graph,) = check_compiled(fn, data(4, 6, grad=True), data(6))
    assert not graph.unfused


def test_an_input_changed_through_a_view_across_a_break() -> None:
    def fn(x: Tensor) -> Any:
        y = x * 2
        torch._dynamo.graph_break()
        first, _ = y.chunk(2)
        first.add_(1)
        return y.sin(), first

    x = data(4, 6)
    torch.testing.assert_close(compiled(fn)(x), fn(x))


def test_statistics_of_a_batch_norm() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    (graph,) = check_compiled(module, data(8, 6, grad=True))
    assert not graph.unfused
    norm, fused = module[1], compiled(module)
    before = norm.running_mean.clone()
    fused(data(8, 6))
    fused(data(8, 6, seed=2))
    assert norm.num_batches_tracked >= 2
    assert not torch.equal(norm.running_mean, before)
    module.eval()
    kept = norm.running_mean.clone()
    torch.testing.assert_close(fused(data(8, 6)), module(data(8, 6)))
    assert torch.equal(norm.running_mean, kept)


def test_a_change_that_takes_part_in_gradients_runs_as_it_is() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        x.mul_(w)
        return x.sum()

    def gradients(f: Callable[..., Tensor], *, leaf: bool) -> Any:
        w, x = data(4, 6, grad=True), data(4, 6, grad=not leaf, seed=2)
        h = x if leaf else x * 1
        out = f(h, w) + (h * h).sum()  # the changed value, and its history, are read behind the call
        return torch.autograd.grad(out, [w] if leaf else [w, x])

    for leaf in (True, False):
        torch._dynamo.reset()
        with pytest.warns(NotFusedWarning, match=r"in.place"):
            got = gradients(compiled(fn), leaf=leaf)
        torch.testing.assert_close(got, gradients(fn, leaf=leaf))
        torch._dynamo.reset()
        with pytest.raises(megafuse.CaptureError, match=r"in.place"):
            gradients(compiled(fn, options=INTERPRET | {"strict": True}), leaf=leaf)


def test_inputs_that_share_memory_and_change() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    def run(f: Callable[..., Tensor]) -> Any:
        whole = data(8)
        return f(whole[:6], whole[2:]), whole

    with pytest.warns(NotFusedWarning, match="shares memory"):
        got = run(compiled(fn))
    torch.testing.assert_close(got, run(fn))
