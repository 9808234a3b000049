"""Calls of fused callables: arguments and outputs of every structure, closures and globals, aliases, errors."""

from __future__ import annotations

import dataclasses
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import megafuse
from life_modules import batch, close, fused_net, net
from megafuse.api import engine_of


class Pair(NamedTuple):
    """Two outputs."""

    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Out:
    """A dataclass that nobody registered."""

    value: Tensor


@dataclasses.dataclass
class Registered:
    """A dataclass that torch's pytree knows."""

    value: Tensor
    scale: float


torch.export.register_dataclass(Registered)

STRUCTURES: dict[str, Callable[[Tensor], Any]] = {
    "named tuple": lambda x: Pair(x * 2, x.sum()), "dict": lambda x: {"b": x * 2, "a": [x.sin(), None, 3, "s"]},
    "none": lambda x: (None, x * 2), "nothing but none": lambda x: None,
    "bool and shape": lambda x: (x * 2, x.shape, True),
    "registered dataclass": lambda x: Registered(x * 2, 0.5), "empty tuple": lambda x: (),
    "nested": lambda x: ((x * 2,), {"k": Pair(x, x + 1)}), "the same twice": lambda x: [x * 2] * 2,
}  # fmt: skip


@pytest.mark.parametrize("which", STRUCTURES)
def test_output_structures(which: str) -> None:
    fn, x = STRUCTURES[which], batch()
    fused = megafuse.fuse(fn, x, target="interpret")
    for given in (x, batch(3)):
        found, want = fused(given), fn(given)
        assert type(found) is type(want)
        assert pytree.tree_structure(found) == pytree.tree_structure(want)
        close(found, want)


def test_dataclasses_that_hide_tensors_are_named() -> None:
    with pytest.raises(megafuse.CaptureError, match=r"inside a Out(.|\n)*register_dataclass"):
        megafuse.fuse(lambda x: Out(x * 2), batch(), target="interpret")
    with pytest.raises(megafuse.InputError, match=r"argument o is a Out that holds tensors(.|\n)*register_dataclass"):
        megafuse.fuse(lambda o: o.value * 2, Out(batch()), target="interpret")
    fused = megafuse.fuse(lambda o: o.value * o.scale, Registered(batch(), 2.0), target="interpret")
    close(fused(Registered(batch(seed=5), 3.0)), batch(seed=5) * 3)


class Listed:
    """A class whose node in an argument tree holds a list and a dict, which have no hash."""

    def __init__(self, value: Tensor, notes: list[dict[str, float]]) -> None:
        self.value, self.notes = value, notes


pytree.register_pytree_node(
    Listed,
    lambda n: ([n.value], n.notes),
    lambda values, notes: Listed(*values, notes),
    flatten_with_keys_fn=lambda n: ([(pytree.GetAttrKey("value"), n.value)], n.notes),
)


def test_what_a_tree_holds_beside_tensors_is_part_of_the_key() -> None:
    def fn(n: Listed) -> Tensor:
        return n.value * n.notes[0]["scale"]

    fused = megafuse.fuse(fn, Listed(batch(), [{"scale": 2.0}]), target="interpret")
    for scale in (2.0, 3.0, 2.0):
        close(fused(Listed(batch(seed=5), [{"scale": scale}])), batch(seed=5) * scale)


def signature(
    x: Tensor, w: Tensor | None = None, *rest: Tensor, scale: float = 2.0, bias: Tensor | None = None
) -> Tensor:
    y = x * scale
    y = y if w is None else y * w
    for r in rest:
        y = y + r
    return y if bias is None else y + bias


def test_ways_to_pass_arguments() -> None:
    x, w, b = batch(), batch(seed=2), torch.randn(6, requires_grad=True)
    fused = megafuse.fuse(signature, x, target="interpret")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}), ((x, w), {}), ((x,), {"w": w}), ((x, None), {"bias": b}), ((x, w, x, w), {"scale": 3}),
        ((x,), {"scale": 3.0, "bias": b}), ((), {"x": x}), ((), {"bias": b, "x": x, "w": w}), ((x,), {"scale": 2.5}),
    ]  # fmt: skip
    for args, kwargs in [*calls, *calls]:
        close(fused(*args, **kwargs), signature(*args, **kwargs))
    close(
        torch.autograd.grad(fused(x=x, bias=b).sum(), [x, b]), torch.autograd.grad(signature(x, bias=b).sum(), [x, b])
    )


SCALE, WEIGHT, MODULE = 2.0, torch.full((6,), 3.0), nn.Linear(6, 6)


def helper(x: Tensor) -> Tensor:
    return x * SCALE


def with_globals(x: Tensor) -> Tensor:
    return MODULE(helper(x) + WEIGHT)


class WithGlobals(nn.Module):
    """Reads globals in forward, and in a function that it calls."""

    def forward(self, x: Tensor) -> Tensor:
        return helper(x) + WEIGHT


@pytest.mark.parametrize("original", [with_globals, WithGlobals()])
def test_globals_that_change_are_seen(original: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, here = batch(), sys.modules[__name__]
    fused = megafuse.fuse(original, x, target="interpret")
    close(fused(x), original(x))
    WEIGHT.mul_(2)
    close(fused(x), original(x))
    for name, value in {"SCALE": 5.0, "WEIGHT": torch.randn(6), "MODULE": nn.Linear(6, 6, bias=False)}.items():
        monkeypatch.setattr(here, name, value)
        close(fused(x), original(x))
    monkeypatch.setattr(here, "helper", lambda x: x - 1)
    close(fused(x), original(x))


def test_closures_are_inputs_and_seen_when_they_change() -> None:
    weight, scale, flags = nn.Parameter(torch.randn(6, 6)), 2.0, [1.0]

    def inner(x: Tensor) -> Tensor:
        return x @ weight

    def fn(x: Tensor) -> Tensor:
        return inner(x) * scale + flags[0]

    x = batch()
    fused = megafuse.fuse(fn, x, target="interpret")
    for _ in range(2):
        wanted = torch.autograd.grad(fn(x).sin().sum(), [x, weight])
        close(torch.autograd.grad(fused(x).sin().sum(), [x, weight]), wanted)
        with torch.no_grad():
            weight.mul_(0.5)
    weight.requires_grad_(False)
    assert fused(x.detach()).requires_grad is False
    weight.requires_grad_(True)
    assert fused(x.detach()).requires_grad
    weight = nn.Parameter(torch.randn(6, 6))
    close(fused(x), fn(x))
    scale = 3.0
    close(fused(x), fn(x))
    flags[0] = 4.0
    close(fused(x), fn(x))
    weight.data = weight.data.double()
    close(fused(x.double()), fn(x.double()))


def test_double_backward_reaches_closures_and_says_what_it_does_not_reach() -> None:
    weight, x = nn.Parameter(torch.randn(6, 6)), batch()

    class Holder:
        inner = weight

    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x @ weight)

    def hidden(x: Tensor, holder: Any = Holder) -> Tensor:
        return torch.tanh(x @ holder.inner)

    def twice(f: Callable[[Tensor], Tensor]) -> Tensor:
        (grad,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), weight)[0]

    close(twice(megafuse.fuse(fn, x, target="interpret")), twice(fn))
    fused = megafuse.fuse(hidden, x, target="interpret")
    close(torch.autograd.grad(fused(x).sum(), weight), torch.autograd.grad(hidden(x).sum(), weight))
    with pytest.raises(RuntimeError, match="tensors inside of other objects"):
        twice(fused)


def test_default_arguments_that_are_tensors() -> None:
    def fn(x: Tensor, w: Tensor = torch.full((6,), 2.0)) -> Tensor:  # noqa: B008
        return x * w

    fused = megafuse.fuse(fn, batch(), target="interpret")
    assert fn.__defaults__ is not None
    fn.__defaults__[0].fill_(5.0)
    close(fused(batch()), batch() * 5)
    fn.__defaults__ = (torch.full((6,), 7.0),)
    close(fused(batch()), batch() * 7)


def test_views_and_overlapping_inputs() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(a) * b.sum(-1, keepdim=True)

    base = torch.randn(12, 6)
    fused = megafuse.fuse(fn, base[:5], base[3:8], target="interpret")
    for a, b in ((base[:5], base[3:8]), (base[:5], base[:5]), (base[2:7], base[:1].expand(5, 6))):
        close(fused(a, b), fn(a, b))
    leaf = base.clone().requires_grad_()
    found = torch.autograd.grad(fused(leaf[:5], leaf[3:8]).sum(), leaf)
    close(found, torch.autograd.grad(fn(leaf[:5], leaf[3:8]).sum(), leaf))


def test_outputs_that_alias_inputs() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.view(-1), x.t(), x * 2

    fused, x = megafuse.fuse(fn, torch.randn(5, 6), target="interpret"), torch.randn(5, 6)
    found = fused(x)
    close(found, fn(x))
    close([o.stride() for o in found], [o.stride() for o in fn(x)])
    found[2].add_(1)
    close(fused(x), fn(x))
    leaf = batch()
    close(
        torch.autograd.grad(sum(o.sum() for o in fused(leaf)), leaf),
        torch.autograd.grad(sum(o.sum() for o in fn(leaf)), leaf),
    )


def test_an_input_changed_in_place() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2).add_(1)
        return x * y

    fused = megafuse.fuse(fn, torch.randn(5, 6), torch.randn(5, 6), target="interpret")
    ours, theirs, y = torch.ones(5, 6), torch.ones(5, 6), torch.randn(5, 6)
    close(fused(ours, y), fn(theirs, y))
    close(ours, theirs)
    mine, its = torch.arange(30.0).view(5, 6), torch.arange(30.0).view(5, 6)
    close(fused(mine, mine), fn(its, its))  # one tensor twice: the change is seen through the other
    close(mine, its)
    with pytest.raises(RuntimeError, match="leaf"):
        fn(batch(), y)
    with pytest.raises((RuntimeError, megafuse.CaptureError), match="leaf"):
        fused(batch(), y)


class Wrapper(torch.Tensor):
    """A subclass that adds one to every product, without data of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = pytree.tree_map_only(Wrapper, lambda t: t.inner, args)
        return func(*args, **(kwargs or {})) + 1


class Plain(torch.Tensor):
    """A subclass with data of its own."""


def test_tensor_subclasses_are_refused_at_every_call() -> None:
    for wrap in (Wrapper, lambda t: t.as_subclass(Plain)):
        x = torch.randn(5, 6)
        with pytest.raises(megafuse.InputError, match=r"argument x is a (Wrapper|Plain): tensor"):
            megafuse.fuse(lambda x: x * 2, wrap(x), target="interpret")
        fused = megafuse.fuse(lambda x: x * 2, x, target="interpret")
        for _ in range(2):
            with pytest.raises(megafuse.InputError, match=r"(argument x|input 0) is a (Wrapper|Plain): tensor"):
                fused(wrap(x))
    fused = megafuse.fuse(lambda x: x * 2, torch.randn(5, 6), target="interpret")
    close(fused(nn.Parameter(torch.ones(5, 6))), torch.full((5, 6), 2.0))
    if hasattr(nn, "Buffer"):
        close(fused(nn.Buffer(torch.ones(5, 6))), torch.full((5, 6), 2.0))


def test_a_fused_module_inside_a_fused_function() -> None:
    module, inner, x = fused_net()

    def fn(x: Tensor) -> Tensor:
        return inner(x) * 2

    close(megafuse.fuse(fn, x, target="interpret")(x), module(x) * 2)


def test_a_fused_module_under_another_tracer() -> None:
    module, fused, x = fused_net()
    graph = torch.fx.experimental.proxy_tensor.make_fx(fused)(x.detach())
    close(graph(x.detach()), module(x))


class Breaks(nn.Module):
    """Fails in user code, at a depth, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fail(self.inner(x))

    def fail(self, x: Tensor) -> Tensor:
        if self.how == "type":
            return x + "a string"
        if self.how == "own":
            raise KeyError("of the user")
        if self.how == "attribute":
            return x.no_such_thing
        return torch.relu(3)


ERRORS = {"type": TypeError, "own": KeyError, "attribute": AttributeError, "call": TypeError}


@pytest.mark.parametrize("how", ERRORS)
def test_the_users_errors_are_the_users(how: str) -> None:
    module, x = Breaks(how), batch()
    with pytest.raises(ERRORS[how]) as plain:
        module(x)
    with pytest.raises(ERRORS[how]) as caught:
        megafuse.fuse(module, x, target="interpret")
    assert str(plain.value) == str(caught.value)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "fail"
    ours = [f.name for f in frames if "/megafuse/" in f.filename]
    assert ours == ["fuse"]  # none of our stages
    if sys.version_info >= (3, 11):
        assert any("while megafuse traced" in note for note in caught.value.__notes__)


def test_wrong_arguments_fail_as_they_do_in_python() -> None:
    _, fused, x = fused_net()
    for args, kwargs in (((), {}), ((x, x), {}), ((x,), {"y": x})):
        with pytest.raises(TypeError, match="forward"):
            net()(*args, **kwargs)
        with pytest.raises(TypeError, match="forward"):
            fused(*args, **kwargs)


def test_constants_made_from_sizes() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * torch.tensor([float(i) for i in range(x.shape[0])])[:, None]

    fused = megafuse.fuse(fn, batch(5), target="interpret")
    for rows in (5, 3, 7, 5):
        close(fused(batch(rows)), fn(batch(rows)))
    assert engine_of(fused).bindings


def test_warnings_point_at_the_users_line() -> None:
    def empty_inside(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x), x[:, 3:3] * 2

    hooked, x = net(), batch()
    hooked.w1.register_forward_hook(lambda *_: None)
    _, fused, _ = fused_net()
    both = megafuse.fuse(lambda x: (x.sin(), x.cos()), x, target="interpret")
    rooted = megafuse.fuse(lambda x: x * x.shape[0] ** 0.5, x, target="interpret", max_specializations=1)
    for call in (
        lambda: megafuse.fuse(net(), x),
        lambda: megafuse.fuse(hooked, x, target="interpret"),
        lambda: megafuse.fuse(empty_inside, x, target="interpret"),
        lambda: torch.func.vmap(fused)(x.detach()[None]),
        lambda: both(x)[0].sum().backward(),
        lambda: rooted(batch(4)),
        lambda: torch.compile(net(), backend="megafuse")(x),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
        assert {w.filename for w in said if "original ops" in str(w.message)} == {__file__}
