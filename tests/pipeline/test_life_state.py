"""A fused module as an object: hooks, modes, copies, files, state, and parts that are replaced after fusing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafuse
from life_modules import Net, batch, close, fused_net, net, results
from megafuse.api import engine_of

HOOKS: dict[str, Callable[[nn.Module, list[str]], Any]] = {
    "forward hook": lambda m, seen: m.register_forward_hook(lambda *_: seen.append("forward")),
    "forward pre hook": lambda m, seen: m.register_forward_pre_hook(lambda *_: seen.append("pre")),
    "backward hook": lambda m, seen: m.register_full_backward_hook(lambda *_: seen.append("backward")),
    "backward pre hook": lambda m, seen: m.register_full_backward_pre_hook(lambda *_: seen.append("backward pre")),
    "forward hook that changes the value": lambda m, seen: m.register_forward_hook(
        lambda _m, _i, out: (out * 2, seen.append("changed"))[0]
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_submodules_are_called(hook: str, when: str) -> None:
    module, x, seen = net(), batch(), []
    if when == "before":
        HOOKS[hook](module.norm, seen)
        with pytest.warns(megafuse.NotFusedWarning, match=f"norm .LayerNorm. has a {hook[:12]}"):
            fused = megafuse.fuse(module, x, target="interpret")
    else:
        fused = megafuse.fuse(module, x, target="interpret")
        handle = HOOKS[hook](module.norm, seen)
        with pytest.warns(megafuse.NotFusedWarning, match="norm .LayerNorm. has a"):
            fused(x)
    seen.clear()
    want = results(module, module, x)
    assert len(seen) == 1
    close(results(fused, module, x), want)
    assert len(seen) == 2
    if when == "after":
        handle.remove()
        close(results(fused, module, x), results(module, module, x))
        assert len(seen) == 2
        assert any(b.spec is not None for b in engine_of(fused).bindings)


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_the_module_run_around_the_step(hook: str) -> None:
    module, fused, x = fused_net()
    seen: list[str] = []
    HOOKS[hook](module, seen)
    want = results(module, module, x)
    close(results(fused, module, x), want)
    assert len(seen) == 2
    assert len(engine_of(fused).bindings) <= 2
    assert all(b.spec is not None for b in engine_of(fused).bindings)


def test_hooks_and_strict() -> None:
    module = net()
    module.w1.register_forward_hook(lambda *_: None)
    with pytest.raises(megafuse.CaptureError, match=r"w1 \(Linear\) has a forward hook"):
        megafuse.fuse(module, batch(), target="interpret", strict=True)


def test_global_hooks_are_called() -> None:
    _, fused, x = fused_net()
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    try:
        with pytest.warns(megafuse.NotFusedWarning, match="global module hooks"):
            fused(x)
    finally:
        handle.remove()
    assert "LayerNorm" in seen


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_hooks_that_only_compute_weights_are_traced() -> None:
    module, x = net(), batch()
    nn.utils.weight_norm(module.w1)
    nn.utils.prune.l1_unstructured(module.w2, "weight", amount=3)
    fused = megafuse.fuse(module, x, target="interpret")
    assert engine_of(fused).bindings[0].spec is not None
    close(results(fused, module, x), results(module, module, x))


class Recorder(nn.Module):
    """Keeps things on itself as it runs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.log, self.last = how, 0, [], None
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x))
        if self.how == "counter":
            self.calls += 1
        elif self.how == "list":
            self.log.append(y.detach())
        elif self.how == "tensor":
            self.last = y.sum()
        elif self.how == "once" and not hasattr(self, "table"):
            self.table = torch.arange(6.0)
        return y + self.table if self.how == "once" else y


@pytest.mark.parametrize("how", ["counter", "list", "tensor", "once"])
def test_what_forward_keeps_on_the_module_is_kept(how: str) -> None:
    module, x = Recorder(how), batch()
    with pytest.warns(megafuse.NotFusedWarning, match="Recorder.(calls|log|last|table)"):
        fused = megafuse.fuse(module, x, target="interpret")
    assert (module.calls, module.log, module.last, hasattr(module, "table")) == (0, [], None, False)
    found = [results(fused, module, x) for _ in range(2)]
    kept = {"counter": module.calls == 2, "list": len(module.log) == 2, "once": hasattr(module, "table"),
            "tensor": isinstance(module.last, Tensor) and module.last.device.type == "cpu"}  # fmt: skip
    assert kept[how]
    close(found, [results(module, module, x)] * 2)
    assert (engine_of(fused).bindings[-1].spec is not None) is (how == "once")


def test_a_module_that_always_changes_is_not_captured_for_ever() -> None:
    module, x = Recorder("counter"), batch()
    with pytest.warns(megafuse.NotFusedWarning):
        fused = megafuse.fuse(module, x, target="interpret")
    for _ in range(12):
        fused(x)
    assert module.calls == 12
    assert len(engine_of(fused).bindings) < 8


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickle(protocol: int) -> None:
    module, fused, x = fused_net()
    fused.eval()
    twin = pickle.loads(pickle.dumps(fused, protocol))
    assert isinstance(twin, Net)
    assert not twin.training
    assert engine_of(twin).options == engine_of(fused).options
    assert engine_of(twin).bindings == []
    close(results(twin, twin, x), results(module, module, x))
    assert len(engine_of(twin).bindings) == 1
    with torch.no_grad():
        twin.w1.weight.zero_()
    assert not torch.equal(twin.w1.weight, fused.w1.weight)


def scaled(x: Tensor, scale: float = 2.0) -> Tensor:
    return torch.tanh(x) * scale


def test_pickle_of_a_function() -> None:
    fused = pickle.loads(pickle.dumps(megafuse.fuse(scaled, batch(), target="interpret")))
    close(fused(batch(3), scale=3.0), scaled(batch(3), scale=3.0))


def test_save_and_load_the_whole_module() -> None:
    _, fused, x = fused_net()
    model = nn.Sequential(nn.Linear(6, 6), fused)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert engine_of(twin[1]) is not engine_of(fused)
    close(results(twin, twin, x), results(model, model, x))


def test_state_dict_both_ways() -> None:
    module, fused, x = fused_net()
    assert list(fused.state_dict()) == list(module.state_dict())
    other = net(seed=3)
    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    close(other(x), module(x))
    fused.load_state_dict(net(seed=4).state_dict(), strict=True)
    close(fused(x), net(seed=4)(x))
    fused.load_state_dict(net(seed=5).state_dict(), strict=True, assign=True)
    close(results(fused, module, x), results(module, module, x))
    close(fused(x), net(seed=5)(x))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_copies(make: Callable[[nn.Module], nn.Module]) -> None:
    module, fused, x = fused_net()
    twin, plain = make(fused), make(module)
    twin.extra, plain.extra = 1, 1
    assert not hasattr(module, "extra")
    twin.eval()
    assert module.training
    for one in (twin, plain):
        with torch.no_grad():
            one.w1.weight.mul_(1.5)
    close(results(twin, twin, x), results(plain, plain, x))
    close(results(fused, module, x), results(module, module, x))


def test_a_class_with_its_own_deepcopy() -> None:
    class Own(Net):
        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
            made = type(self)()
            made.load_state_dict(self.state_dict())
            return made

    torch.manual_seed(0)
    module, x = Own(), batch()
    twin = copy.deepcopy(megafuse.fuse(module, x, target="interpret"))
    with torch.no_grad():
        twin.w1.weight.zero_()
    assert module.w1.weight.any()
    close(twin(x), nn.functional.layer_norm(x + twin.w2(nn.functional.silu(twin.w1(x))) * 0.5, (6,)))


def _retie(m: Any) -> None:
    m.w2.bias = nn.Parameter(torch.ones(6))


REPLACED: dict[str, Callable[[Any], Any]] = {
    "data assigned": lambda m: setattr(m.w1.weight, "data", torch.randn(9, 6)),
    "parameter replaced": lambda m: setattr(m.w1, "weight", nn.Parameter(torch.randn(9, 6))),
    "bias removed": lambda m: setattr(m.w1, "bias", None),
    "bias added": _retie,
    "buffer replaced": lambda m: setattr(m, "scale", torch.randn(6)),
    "half precision": lambda m: m.bfloat16(),
    "double precision": lambda m: m.to(torch.float64),
    "frozen": lambda m: m.w1.requires_grad_(False),
    "all frozen": lambda m: m.requires_grad_(False),
    "wider": lambda m: (setattr(m, "w1", nn.Linear(6, 4)), setattr(m, "w2", nn.Linear(4, 6))),
    "bias elsewhere": lambda m: (setattr(m.w1, "bias", None), _retie(m)),
    "parameter of another name": lambda m: (delattr(m.w1, "bias"), setattr(m.w1, "bias", nn.Parameter(torch.ones(9)))),
    "optimizer step": lambda m: [p.data.sub_(0.1) for p in m.parameters()],
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m.w1),
}


@pytest.mark.parametrize("change", REPLACED)
def test_parts_replaced_after_fusing(change: str) -> None:
    module, fused, x = fused_net()
    fused(x)
    torch.manual_seed(7)
    REPLACED[change](module)
    dtype = next(module.parameters()).dtype
    x = x.detach().to(dtype).requires_grad_()
    close(results(fused, module, x), results(module, module, x), loose=dtype is torch.bfloat16)
    assert engine_of(fused).bindings[-1].spec is not None


def test_parameters_tied_and_untied_after_fusing() -> None:
    module, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), batch()
    fused = megafuse.fuse(module, x, target="interpret")
    own = module[2].weight
    module[2].weight = module[0].weight
    close(results(fused, module, x), results(module, module, x))
    tied = megafuse.fuse(module, x, target="interpret")
    module[2].weight = own
    close(results(tied, module, x), results(module, module, x))


def test_requires_grad_toggled_back_and_forth() -> None:
    module, fused, x = fused_net()
    for flag in (False, True, False, True):
        module.w1.weight.requires_grad_(flag)
        found = results(fused, module, x)
        assert ("w1.weight" in found[1]) is flag
        close(found, results(module, module, x))
    assert len(engine_of(fused).bindings) == 2


def test_train_and_eval_of_dropout_and_batch_norm() -> None:
    module, x = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.0)), batch(8)
    fused, twin = megafuse.fuse(module, x, target="interpret"), copy.deepcopy(module)
    for mode in (True, False, True):
        fused.train(mode)
        twin.train(mode)
        close(fused(x), twin(x))
    close(list(module.buffers()), list(twin.buffers()))


def test_inference_mode() -> None:
    module, fused, x = fused_net()
    with torch.inference_mode():
        out = fused(x)
        assert out.is_inference()
        made = torch.randn(5, 6)
        close(fused(made), module(made))
    assert not out.requires_grad
    with torch.no_grad():
        close(fused(made), module(made))  # an inference tensor outside
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        module(made)
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        fused(made)


@pytest.mark.parametrize("table", ["_parameters", "_buffers"])
def test_tensors_are_read_from_the_tables_that_a_module_has_now(table: str) -> None:
    """Libraries that shard parameters put tables of their own in place of a module's."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.eye(4))
            self.register_buffer("c", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) * self.w + self.c

    module, x = Scaled(), torch.randn(4, 4)
    fused = megafuse.fuse(module, x, target="interpret")
    fused(x)
    setattr(module, table, dict(getattr(module, table)))
    module.w, module.c = nn.Parameter(torch.full((4, 4), 0.7)), torch.full((4,), 3.0)
    for _ in range(2):
        torch.testing.assert_close(fused(x), module(x))
