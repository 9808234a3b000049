"""What changes on a module after fusing is seen at the next call: nothing captured goes silently stale."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import megafuse


class Stateful(nn.Module):
    """``seq(norm(x) * a) * t``: a plain float, a tensor that is no buffer, submodules of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a = 2.0
        self.t = torch.tensor(2.0)
        self.norm = nn.LayerNorm(4)
        self.seq = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.seq(self.norm(x) * self.a) * self.t


def other_norm(m: Stateful) -> None:
    m.norm = nn.LayerNorm(4)
    nn.init.normal_(m.norm.weight)


def new_parameter(m: Stateful) -> None:
    m.norm.weight = nn.Parameter(torch.full((4,), 3.0))


CHANGES: dict[str, Callable[[Stateful], object]] = {
    "plain attribute": lambda m: setattr(m, "a", 3.0),
    "tensor in place": lambda m: m.t.fill_(5.0),
    "tensor replaced": lambda m: setattr(m, "t", torch.tensor(7.0)),
    "submodule replaced": other_norm,
    "submodule appended": lambda m: m.seq.append(nn.Tanh()),
    "hook of a child": lambda m: m.norm.register_forward_hook(lambda _m, _i, out: out * 2),
    "hook of the module": lambda m: m.register_forward_hook(lambda _m, _i, out: out + 1),
    "weights in place": lambda m: m.norm.weight.data.mul_(2.0),
    "parameter replaced": new_parameter,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_fusing_is_seen(change: str) -> None:
    module, x = Stateful(), torch.randn(3, 4)
    fused = megafuse.fuse(module, x, target="interpret")
    before = fused(x)
    CHANGES[change](module)
    wanted = module(x)
    assert not torch.allclose(before, wanted)
    is_child_hook = change == "hook of a child"
    with pytest.warns(megafuse.NotFusedWarning, match="hook") if is_child_hook else contextlib.nullcontext():
        torch.testing.assert_close(fused(x), wanted)
        torch.testing.assert_close(copy.deepcopy(fused)(x), wanted)


def test_list_items_are_state() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [2.0]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weights[0]

    module = Listed()
    fused = megafuse.fuse(module, torch.ones(3), target="interpret")
    module.weights[0] = 9.0
    assert torch.equal(fused(torch.ones(3)), torch.full((3,), 9.0))
    assert type(megafuse.fuse(fused, torch.ones(3), target="interpret")).__name__ == "FusedListed"


def test_outputs_that_take_no_part_in_backward() -> None:
    def two_heads(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.sqrt()

    x = torch.tensor([0.0, 1.0, 4.0], requires_grad=True)
    fused = megafuse.fuse(two_heads, x, target="interpret")
    with pytest.warns(UserWarning, match="some of its outputs"):
        (grad,) = torch.autograd.grad(fused(x)[0].sum(), x)
    assert torch.equal(grad, torch.full((3,), 2.0))


def test_what_tracing_does_not_take_is_said() -> None:
    with pytest.raises(megafuse.CaptureError, match="cannot trace"):
        megafuse.fuse(lambda x: x[[2, 0]] * 2, torch.randn(3), target="interpret")


def test_equal_outputs_with_memory_of_their_own() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.clone()

    for dtype in (torch.float32, torch.bfloat16):
        first, second = megafuse.fuse(twice, torch.ones(5, 7, dtype=dtype), target="interpret")(
            torch.ones(5, 7, dtype=dtype)
        )
        first.add_(1)
        assert torch.equal(second, torch.full_like(second, 2.0))


def test_library_call_between_a_sum_and_its_follower() -> None:
    def between(x: Tensor, w: Tensor) -> Tensor:
        total = x.sum(0)
        return torch.mv(w, total) + total

    x, w = torch.randn(3000, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    fused = megafuse.fuse(between, x, w, target="interpret")
    megafuse.check(between, x, w, fused=fused, seeds=2).raise_if_failed()


def test_long_chains_and_empty_values() -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(150):
            x = torch.sin(x * 1.01)
        return x

    x = torch.randn(5, 7)
    torch.testing.assert_close(megafuse.fuse(long, x, target="interpret")(x), long(x), rtol=1e-4, atol=1e-5)

    def partly_empty(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :0] * 2, x * 3

    with pytest.warns(megafuse.NotFusedWarning, match="empty"):
        empty, full = megafuse.fuse(partly_empty, x, target="interpret")(x)
    assert empty.shape == (5, 0)
    assert torch.equal(full, x * 3)
    norm = nn.LayerNorm(5)
    fused = megafuse.fuse(norm, torch.randn(0, 5), target="interpret")
    torch.testing.assert_close(fused(torch.ones(4, 5)), norm(torch.ones(4, 5)))
