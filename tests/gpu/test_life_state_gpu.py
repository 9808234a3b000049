"""PyTorch's ordinary life on a GPU: gradients kept and summed, hooks, modes, copies, files, parts that are replaced."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafuse
from megafuse.api import engine_of
from megafuse.validate import CheckOptions, check

PIPELINE = Path(__file__).resolve().parents[1] / "pipeline"
if str(PIPELINE) not in sys.path:
    sys.path.insert(0, str(PIPELINE))

from life_modules import Net, close, net, results  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE, TARGET = "cuda", "cuda"
FEW = CheckOptions(seeds=2, small_seeds=1, repeats=2)


def batch(rows: int = 64, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf input [rows, 6]."""
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return x.requires_grad_()


def fused_net() -> tuple[Net, Net, Tensor]:
    """A module on the device, its fused twin and an input."""
    module, x = net().to(DEVICE), batch()
    return module, megafuse.fuse(module, x, target=TARGET), x


def is_fused(fused: Any) -> bool:
    """The newest binding runs generated kernels."""
    return engine_of(fused).bindings[-1].spec is not None


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_over_backward_calls(set_to_none: bool) -> None:
    module, fused, _ = fused_net()
    grads = []
    for fn in (module, fused):
        module.zero_grad(set_to_none=True)
        for round_ in range(2):
            module.zero_grad(set_to_none=set_to_none)
            for seed in range(3):
                fn(batch(seed=seed + round_)).sin().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert len(grads[1]) == len(list(module.parameters()))
    close(grads[1], grads[0])


def test_a_graph_that_is_kept_gives_equal_gradients() -> None:
    module, fused, x = fused_net()
    targets = [x, *module.parameters()]
    loss = fused(x).sin().sum()
    first, second = (torch.autograd.grad(loss, targets, retain_graph=True) for _ in range(2))
    last = torch.autograd.grad(loss, targets)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, last, strict=True))
    close(last, torch.autograd.grad(module(x).sin().sum(), targets))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, targets)


def test_double_backward() -> None:
    module, fused, x = fused_net()
    found = []
    for fn in (module, fused):
        (grad,) = torch.autograd.grad(fn(x).sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), [x, *module.parameters()], allow_unused=True))
    close(found[1], found[0])


COTANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda y: y.sum(),
    "transposed": lambda y: (y.t() @ torch.linspace(0, 1, y.shape[0], device=y.device)).sum(),
    "of a transposed view": lambda y: (y.t().contiguous() * torch.randn_like(y.t())).sum() * 0 + y.t().sin().sum(),
    "sliced": lambda y: y[::2, 1:].sum(),
    "zero": lambda y: (y * 0).sum(),
}


@pytest.mark.parametrize("which", COTANGENTS)
def test_cotangents(which: str) -> None:
    module, fused, x = fused_net()
    want, found = (torch.autograd.grad(COTANGENTS[which](f(x)), [x, *module.parameters()]) for f in (module, fused))
    close(found, want)


def test_cotangents_given_in_any_layout() -> None:
    module, fused, x = fused_net()
    targets = [x, *module.parameters()]
    for tangent in (torch.randn(6, 64, device=DEVICE).t(), torch.randn(1, 6, device=DEVICE).expand(64, 6)):
        close(torch.autograd.grad(fused(x), targets, tangent), torch.autograd.grad(module(x), targets, tangent))


def test_frozen_parameters_and_flags_toggled_after_fusing() -> None:
    module, fused, x = fused_net()
    for flag in (False, True, False):
        module.w1.weight.requires_grad_(flag)
        found = results(fused, module, x)
        assert ("w1.weight" in found[1]) is flag
        close(found, results(module, module, x))
        assert is_fused(fused)
    assert len(engine_of(fused).bindings) == 2
    module.requires_grad_(False)
    close(results(fused, module, x), results(module, module, x))
    assert not fused(x.detach()).requires_grad


def test_hooks_on_parameters_fire() -> None:
    module, fused, x = fused_net()
    seen: list[str] = []
    module.w1.weight.register_hook(lambda g: g * 2)
    module.w2.weight.register_post_accumulate_grad_hook(lambda p: seen.append("w2"))
    close(results(fused, module, x)[1], results(module, module, x)[1])
    fused(x).sum().backward()
    assert seen == ["w2"]


def test_hooks_on_submodules_run_the_original_while_they_are_there() -> None:
    module, fused, x = fused_net()
    seen: list[int] = []
    handle = module.norm.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(megafuse.NotFusedWarning, match="norm .LayerNorm. has a forward hook"):
        close(results(fused, module, x), results(module, module, x))
    assert len(seen) == 2
    handle.remove()
    close(results(fused, module, x), results(module, module, x))
    assert len(seen) == 2
    assert engine_of(fused).generations == 1


def test_hooks_on_the_module_run_around_the_step() -> None:
    module, fused, x = fused_net()
    module.register_forward_hook(lambda _m, _i, out: out * 2)
    close(results(fused, module, x), results(module, module, x))
    assert is_fused(fused)


# --- state ------------------------------------------------------------------------------------------------------------


def test_train_and_eval() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Dropout(0.3)).to(DEVICE)
    twin, x = copy.deepcopy(module), batch()
    fused = megafuse.fuse(module, x, target=TARGET)
    for mode in (True, False, True):
        found = []
        for fn in (fused.train(mode), twin.train(mode)):
            torch.manual_seed(7)
            found.append(fn(x))
        close(found[0], found[1])
        assert is_fused(fused)
    close(list(module.buffers()), list(twin.buffers()))
    assert int(module[1].num_batches_tracked) == 2


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles(make: Callable[[nn.Module], nn.Module]) -> None:
    module, fused, x = fused_net()
    twin: Any = make(fused)
    assert isinstance(twin, Net)
    with torch.no_grad():
        twin.w1.weight.mul_(1.5)
    plain = net().to(DEVICE)
    with torch.no_grad():
        plain.w1.weight.mul_(1.5)
    close(results(twin, twin, x), results(plain, plain, x))
    assert is_fused(twin)
    close(results(fused, module, x), results(module, module, x))


def test_state_dict_both_ways() -> None:
    module, fused, x = fused_net()
    assert list(fused.state_dict()) == list(net().state_dict())
    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    file.seek(0)
    other = net(seed=3).to(DEVICE)
    other.load_state_dict(torch.load(file, weights_only=True, map_location=DEVICE), strict=True)
    close(other(x), module(x))
    for assign in (False, True):
        fused.load_state_dict({k: v.to(DEVICE) for k, v in net(seed=4 + assign).state_dict().items()}, assign=assign)
        close(fused(x), net(seed=4 + assign).to(DEVICE)(x))
        assert is_fused(fused)


def _replace(m: Any) -> None:
    m.w1.weight = nn.Parameter(torch.randn(9, 6, device=DEVICE))


REPLACED: dict[str, Callable[[Any], Any]] = {
    "data assigned": lambda m: setattr(m.w1.weight, "data", torch.randn(9, 6, device=DEVICE)),
    "parameter replaced": _replace,
    "edited in place": lambda m: [p.data.mul_(0.5) for p in m.parameters()],
    "not aligned": lambda m: setattr(m.w1.weight, "data", torch.randn(55, device=DEVICE)[1:].view(9, 6)),
    "transposed": lambda m: setattr(m.w1.weight, "data", torch.randn(6, 9, device=DEVICE).t()),
    "bias removed": lambda m: setattr(m.w1, "bias", None),
    "buffer replaced": lambda m: setattr(m, "scale", torch.randn(6, device=DEVICE)),
    "half precision": lambda m: m.bfloat16(),
    "double precision": lambda m: m.double(),
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
    assert is_fused(fused)


def test_functional_call() -> None:
    module, fused, x = fused_net()
    other = {n: p.detach().clone().mul_(1.5).requires_grad_() for n, p in module.named_parameters()}
    found = []
    for fn in (module, fused):
        out = torch.func.functional_call(fn, other, (x,))
        found.append([out, *torch.autograd.grad(out.sin().sum(), list(other.values()))])
    close(found[1], found[0])


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_few_rows_and_none(rows: int) -> None:
    """No rows: empty outputs and zero gradients of the parameters."""
    module, fused, _ = fused_net()
    found = [results(fn, module, batch(rows)) for fn in (fused, module)]
    assert found[0][0].shape == (rows, 6)
    assert found[0][1].keys() == found[1][1].keys()
    close(found[0], found[1])


# --- arguments --------------------------------------------------------------------------------------------------------


def mixed_types(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.tanh(x * y + z) * x.float().sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32, torch.float16),
        (torch.float16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float32),
    ],
)
def test_inputs_of_several_types(dtypes: tuple[torch.dtype, ...]) -> None:
    args = [batch(seed=i).detach().to(d).requires_grad_() for i, d in enumerate(dtypes)]
    fused = megafuse.fuse(mixed_types, *args, target=TARGET)
    assert fused(*args).dtype is mixed_types(*args).dtype
    assert is_fused(fused)
    check(mixed_types, *args, fused=fused, options=FEW).raise_if_failed()


class Plain(torch.Tensor):
    """A subclass with data of its own."""


def test_tensor_subclasses_are_refused_at_every_call() -> None:
    x = torch.randn(5, 6, device=DEVICE)
    with pytest.raises(megafuse.InputError, match="argument x is a Plain: tensor subclasses"):
        megafuse.fuse(lambda x: x * 2, x.as_subclass(Plain), target=TARGET)
    fused = megafuse.fuse(lambda x: x * 2, x, target=TARGET)
    for _ in range(2):
        with pytest.raises(megafuse.InputError, match="is a Plain: tensor subclasses"):
            fused(x.as_subclass(Plain))
    close(fused(x), x * 2)
