"""Fused callables in PyTorch's autograd: what the original does there, they do."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafuse
from megafuse.api import engine_of
from pipeline_helpers import check_few

RANK_MIXER = Path(__file__).resolve().parents[2] / "rank_mixer"
if str(RANK_MIXER) not in sys.path:
    sys.path.insert(0, str(RANK_MIXER))

from rank_mixer_src.layers import dense_ffn_v2_compute  # noqa: E402


class Small(nn.Module):
    """[B, D] -> [B, D]: LN(x + W2 silu(W1 x + b1))."""

    def __init__(self, dim: int = 6, hidden: int = 9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.w2(F.silu(self.w1(x))))


def made(batch: int = 5) -> tuple[nn.Module, nn.Module, Tensor]:
    """A module, its fused twin and an input."""
    module = Small()
    x = torch.randn(batch, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return module, megafuse.fuse(module, x, target="interpret"), x


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradients of all parameters, taken off."""
    found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=1e-4, atol=1e-5, msg=name)


def test_gradients_accumulate() -> None:
    module, fused, x = made()
    for _ in range(2):
        fused(x).sin().sum().backward()
    twice = gradients(module)
    fused(x).sin().sum().backward()
    once = gradients(module)
    assert_close(twice, {n: 2 * g for n, g in once.items()})


def test_a_kept_graph_gives_equal_gradients_again() -> None:
    module, fused, x = made()
    out = fused(x).cos().sum()
    wanted = [x, *module.parameters()]
    first = torch.autograd.grad(out, wanted, retain_graph=True)
    second = torch.autograd.grad(out, wanted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, wanted)


def test_double_backward_is_the_originals() -> None:
    module, fused, x = made()

    def penalty(fn: nn.Module) -> Tensor:
        (g,) = torch.autograd.grad(fn(x).pow(3).sum(), x, create_graph=True)
        return g.square().sum()

    penalty(module).backward()
    want = gradients(module)
    penalty(fused).backward()
    assert_close(gradients(module), want)


def test_inference_records_nothing() -> None:
    module, fused, x = made()
    with torch.no_grad():
        out = fused(x)
    assert not out.requires_grad
    torch.testing.assert_close(out, module(x).detach(), rtol=1e-5, atol=1e-6)
    with torch.inference_mode():
        torch.testing.assert_close(fused(x), out)


@pytest.mark.parametrize("frozen", ["input", "parameters", "some", "all"])
def test_requires_grad_patterns(frozen: str) -> None:
    module = Small()
    x = torch.randn(5, 6).requires_grad_(frozen not in ("input", "all"))
    for name, p in module.named_parameters():
        p.requires_grad_(frozen == "input" or (frozen == "some" and "norm" not in name))
    fused = megafuse.fuse(module, x, target="interpret")
    check_few(module, x, fused=fused)
    assert fused(x).requires_grad is (frozen != "all")


def test_a_parameter_frozen_later() -> None:
    module, fused, x = made()
    module.w1.weight.requires_grad_(False)
    check_few(module, x, fused=fused)


def test_shared_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x))) + x @ self.first.weight

    module, x = Tied(), torch.randn(5, 6, requires_grad=True)
    check_few(module, x, fused=megafuse.fuse(module, x, target="interpret"))


@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced", "offset"])
def test_inputs_of_any_layout(layout: str) -> None:
    base = torch.randn(13, 12)
    inputs = {
        "expanded": base[:1, :6].expand(5, 6),
        "transposed": base[:6, :5].t(),
        "sliced": base[:10:2, 1::2],
        "offset": base[3:8, 2:8],
    }
    module, x = Small(), inputs[layout].detach().requires_grad_()
    assert x.shape == (5, 6)
    check_few(module, x, fused=megafuse.fuse(module, x, target="interpret"))


def test_tangents_of_any_layout() -> None:
    module, fused, x = made()
    full = torch.randn(6, 5)
    for tangent in (full.t(), torch.ones(()).expand(5, 6), torch.randn(10, 12)[::2, ::2]):
        want = torch.autograd.grad(module(x), x, tangent)[0]
        torch.testing.assert_close(torch.autograd.grad(fused(x), x, tangent)[0], want, rtol=1e-4, atol=1e-5)


def test_several_inputs_outputs_and_keywords() -> None:
    def fn(a: Tensor, b: Tensor, *, scale: float, rows: dict[str, Tensor]) -> dict[str, object]:
        gated = torch.sigmoid(a) * b * scale
        return {"gated": gated, "sums": (gated.sum(0), (a * rows["w"]).amax(-1)), "scale": scale, "plain": b.detach()}

    a, b = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    rows = {"w": torch.randn(6, requires_grad=True)}
    fused = megafuse.fuse(fn, a, b, scale=0.5, rows=rows, target="interpret")
    check_few(fn, a, b, fused=fused, scale=0.5, rows=rows)
    check_few(fn, a, b, fused=fused, scale=2.0, rows=rows)


def test_an_output_that_nobody_differentiates() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x).sum(-1), F.softmax(x, -1)

    x = torch.randn(4, 6, requires_grad=True)
    fused = megafuse.fuse(fn, x, target="interpret")
    for i in range(2):
        want = torch.autograd.grad(fn(x)[i].square().sum(), x)[0]
        with pytest.warns(UserWarning, match="some of its outputs"):
            found = torch.autograd.grad(fused(x)[i].square().sum(), x)[0]
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_a_function_that_takes_modules() -> None:
    t, d, h = 3, 6, 10
    sizes = {"w1": (t, d, 2 * h), "b1": (t, 2 * h), "wout": (t, h, d), "bout": (t, d)}
    weights = [nn.Parameter(torch.randn(*s) * 0.3) for s in sizes.values()]
    args = (torch.randn(5, t, d, requires_grad=True), *weights, nn.LayerNorm(h), nn.LayerNorm(h))
    fused = megafuse.fuse(dense_ffn_v2_compute, *args, target="interpret")
    check_few(dense_ffn_v2_compute, *args, fused=fused)


def test_train_and_eval() -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Small()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * (2.0 if self.training else 1.0)

    module, x = Switch(), torch.randn(5, 6, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret")
    check_few(module, x, fused=fused)
    module.eval()
    check_few(module, x, fused=fused)
    fused.train()
    assert module.training
    check_few(module, x, fused=fused)


@pytest.mark.parametrize("batch", [1, 8])
def test_another_batch_size(batch: int) -> None:
    module, fused, _ = made()
    check_few(module, torch.randn(batch, 6, requires_grad=True), fused=fused)
    assert len(engine_of(fused).bindings) == 2


def test_an_empty_batch() -> None:
    module, fused, _ = made()
    x = torch.randn(0, 6, requires_grad=True)
    out = fused(x)
    assert out.shape == (0, 6)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 6)
    assert all(not g.any() for g in gradients(module).values())


def test_state_is_shared() -> None:
    module, fused, x = made()
    assert isinstance(fused, Small)
    assert all(a is b for a, b in zip(module.parameters(), fused.parameters(), strict=True))
    assert module.state_dict().keys() == fused.state_dict().keys()
    with torch.no_grad():
        module.w2.weight.mul_(2)
    torch.testing.assert_close(fused(x), module(x), rtol=1e-5, atol=1e-5)
    fused.load_state_dict(Small(6, 9).state_dict())
    torch.testing.assert_close(fused(x), module(x), rtol=1e-5, atol=1e-5)


def test_a_copy_has_parameters_of_its_own() -> None:
    module, fused, x = made()
    twin = copy.deepcopy(fused)
    with torch.no_grad():
        twin.w2.weight.zero_()
    torch.testing.assert_close(fused(x), module(x), rtol=1e-5, atol=1e-5)
    reference = copy.deepcopy(module)
    with torch.no_grad():
        reference.w2.weight.zero_()
    torch.testing.assert_close(twin(x), reference(x), rtol=1e-5, atol=1e-5)


def test_a_saved_tensor_changed_in_place_is_noticed() -> None:
    module, fused, x = made()
    out = fused(x)
    with torch.no_grad():
        module.w2.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_strides_of_gradients_and_outputs() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x @ w)
        return y.t(), y

    x = torch.randn(5, 6, requires_grad=True)
    w = nn.Parameter(torch.randn(7, 6).t())
    fused = megafuse.fuse(fn, x, w, target="interpret")
    ours, theirs = fused(x, w), fn(x, w)
    assert [o.stride() for o in ours] == [o.stride() for o in theirs]
    (ours[0].sum() + ours[1].square().sum()).backward()
    assert w.grad is not None
    assert w.grad.stride() == w.stride()


def test_outputs_do_not_share_memory_with_inputs_unless_the_originals_do() -> None:
    x = torch.randn(3, 4)
    fused = megafuse.fuse(lambda x: x.clone(), x, target="interpret")
    out = fused(x)
    out.add_(1)
    assert not torch.equal(out, x)
