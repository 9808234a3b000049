"""The ready modules: parameters of the plain ``nn.Sequential``, fused calls, and the life of a module around them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import megafuse
from megafuse import InputError, NotFusedWarning, UnsupportedError
from megafuse.api import engine_of, plain
from megafuse.nn import ACTIVATIONS, MLP, FusedMLPSoftplus, FusedMLPSoftplusWN, SquaredReLU
from mlp_modules import plain_mlp, rows

WIDTHS = (5, 12, 7, 3)
INTERPRET = {"target": "interpret", "strict": True}
MAKERS: dict[str, Callable[..., MLP]] = {
    "mlp": lambda **k: MLP(WIDTHS, "silu", **k),
    "softplus": lambda **k: FusedMLPSoftplus(D=5, H=12, out_features=3, **k),
    "weight norm": lambda **k: FusedMLPSoftplusWN(D=5, H=12, out_features=3, **k),
}


def seeded(make: Callable[..., MLP], **keywords: object) -> MLP:
    torch.manual_seed(7)
    return make(**keywords)


def same_step(one: nn.Module, other: nn.Module, x: torch.Tensor) -> None:
    """Both give the same bits: outputs, input gradient and gradients of parameters by name."""
    found = []
    for module in (one, other):
        module.zero_grad(set_to_none=True)
        leaf = x.detach().clone().requires_grad_()
        out = module(leaf)
        out.sum().backward()
        found.append([out, leaf.grad, *(p.grad for _, p in sorted(module.named_parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_calls_run_generated_kernels_and_are_right(make: Callable[..., MLP]) -> None:
    module = seeded(make, **INTERPRET)
    x = rows(9, 5)
    module(x).sum().backward()
    plan = next(iter(megafuse.explain(module)))
    assert plan.kernels
    assert not plan.opaque
    assert plan.coverage.share == 1.0
    report = megafuse.check(module, x, seeds=2)
    assert report.ok, str(report)


def test_check_of_a_ready_module_compares_with_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = seeded(MAKERS["mlp"], **INTERPRET)
    monkeypatch.setattr(MLP, "forward", lambda self, x: nn.Sequential.forward(self, x) * 1.01)
    report = megafuse.check(module, rows(64, 5), seeds=1)
    assert not report.ok


@pytest.mark.parametrize("norm", [False, True], ids=["linear", "weight norm"])
@pytest.mark.parametrize("bias", [False, True])
def test_state_dicts_go_both_ways(bias: bool, norm: bool) -> None:
    reference = plain_mlp(WIDTHS, bias=bias, norm=norm)
    module = MLP(WIDTHS, bias=bias, weight_norm=norm, **INTERPRET)
    assert list(module.state_dict()) == list(reference.state_dict())
    module.load_state_dict(reference.state_dict())
    x = rows(6, 5, grad=False)
    assert torch.equal(plain(module)(x), reference(x))
    again = plain_mlp(WIDTHS, bias=bias, norm=norm)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x), reference(x))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_checkpoints_of_the_older_weight_norm_load() -> None:
    older = nn.Sequential(*(nn.utils.weight_norm(m) if isinstance(m, nn.Linear) else m for m in plain_mlp(WIDTHS)))
    module = MLP(WIDTHS, weight_norm=True, **INTERPRET)
    module.load_state_dict(older.state_dict())
    x = rows(6, 5, grad=False)
    assert torch.allclose(plain(module)(x), older(x))


def test_widths_layers_and_activations_of_the_softplus_modules() -> None:
    module = FusedMLPSoftplus(D=6, H=11, out_features=2, layers=5, beta=3.0, threshold=7.0)
    linears = [m for m in module if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in linears] == [(6, 11), (11, 11), (11, 11), (11, 11), (11, 2)]
    assert all(m.bias is None for m in linears)
    assert [(m.beta, m.threshold) for m in module if isinstance(m, nn.Softplus)] == [(3.0, 7.0)] * 4
    assert len(FusedMLPSoftplus(D=6, H=11, out_features=2, layers=1)) == 1
    normed = FusedMLPSoftplusWN(D=6, H=11, out_features=2, bias=True)
    assert "2.parametrizations.weight.original0" in normed.state_dict()
    assert normed[4].bias is not None


def test_activations_by_name_by_module_and_by_maker() -> None:
    assert {type(MLP([2, 3, 4], name)[1]) for name in ACTIVATIONS} >= {nn.Softplus, nn.GELU, nn.Tanh, SquaredReLU}
    given = nn.LeakyReLU(0.3)
    module = MLP([2, 3, 3, 4], given, last_activation=lambda: nn.ELU(0.5))
    assert [m.negative_slope for m in module if isinstance(m, nn.LeakyReLU)] == [0.3, 0.3]
    assert all(m is not given for m in module)
    assert module[-1].alpha == 0.5


def test_an_activation_with_parameters_is_one_for_each_layer() -> None:
    module = MLP([4, 6, 6, 2], nn.PReLU(), **INTERPRET)
    assert module[1].weight is not module[3].weight
    report = megafuse.check(module, rows(8, 4), seeds=1)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLP([4]), r"argument widths: \[4\]"),
        (lambda: MLP([4, 0, 2]), r"argument widths: \[4, 0, 2\]"),
        (lambda: MLP([4, 2.5]), r"argument widths: \[4, 2.5\]"),
        (lambda: MLP([4, 4, 4], "softmin"), "argument activation: unknown name 'softmin'"),
        (lambda: MLP([4, 4, 4], lambda: 3), "argument activation: got .* which is no module"),
        (lambda: MLP([4, 4], last_activation=3), "argument activation: got 3"),
        (lambda: MLP([4, 4], activation=3), "argument activation: got 3"),
        (lambda: MLP([4, 4, 4], activation=torch.relu), "argument activation: .*relu.* makes no module"),
        (lambda: MLP([4, 4], tartget="cuda"), "unknown option tartget"),
        (lambda: MLP([4, 4], target="tpu"), "unknown target 'tpu'"),
        (lambda: FusedMLPSoftplus(D=4, H=4, out_features=4, layers=0), "argument layers: 0"),
    ],
)
def test_what_cannot_be_made_is_said(make: Callable[[], MLP], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_an_input_of_another_width_is_named() -> None:
    module = MLP([128, 8, 2], **INTERPRET)
    with pytest.raises(InputError, match=r"argument x: its shape is \[3, 100\], the MLP takes 128 features"):
        module(torch.randn(3, 100))
    with pytest.raises(InputError, match=r"argument x: its shape is \[\]"):
        module(torch.tensor(1.0))
    with pytest.raises(InputError, match="argument x: expected a tensor, got list"):
        module([1.0, 2.0])
    assert engine_of(module).generations == 0
    module[0] = nn.Linear(4, 8)
    assert module(torch.randn(3, 4)).shape == (3, 2)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)])
def test_an_empty_batch_gives_an_empty_result_and_zero_gradients(make: Callable[..., MLP], shape: tuple[int]) -> None:
    module = seeded(make, **INTERPRET)
    x = rows(*shape)
    out = module(x)
    assert out.shape == (*shape[:-1], 3)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("activation", ["softplus", "gelu_tanh", "relu", "sin"])
def test_values_that_are_not_finite_stay_in_their_rows(activation: str, value: float) -> None:
    torch.manual_seed(3)
    module = MLP(WIDTHS, activation, **INTERPRET)
    x = rows(40, 5)
    clean = module(x.detach())
    with torch.no_grad():
        x[17] = value
    out = module(x)
    others = torch.arange(40) != 17
    assert torch.equal(out[others], clean[others])
    reference = plain(module)(x)
    assert torch.equal(out.isnan(), reference.isnan())
    assert torch.equal(out.isinf(), reference.isinf())
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert grad[others].isfinite().all()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_copies_and_pickles_have_a_state_and_an_engine_of_their_own(make: Callable[..., MLP]) -> None:
    module, x = seeded(make, **INTERPRET), rows(6, 5)
    module(x)
    made = [copy.deepcopy(module), copy.deepcopy(seeded(make, **INTERPRET))]
    if not isinstance(module, FusedMLPSoftplusWN):  # PyTorch does not pickle parametrized modules
        made.append(pickle.loads(pickle.dumps(module)))
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        made.append(torch.load(buffer, weights_only=False))
    for other in made:
        assert type(other) is type(module)
        assert engine_of(other) is not engine_of(module)
        assert other.fuse_options == module.fuse_options
        same_step(module, other, x)
        assert engine_of(other).generations == 1
        with torch.no_grad():
            next(other.parameters()).add_(1.0)
    same_step(module, seeded(make, **INTERPRET), x)


def test_a_module_that_is_gone_takes_its_engine_with_it() -> None:
    module = seeded(MAKERS["mlp"], **INTERPRET)
    module(rows(4, 5))
    engine = weakref.ref(engine_of(module))
    del module
    gc.collect()
    assert engine() is None


def test_dtypes_and_modes_have_programs_of_their_own() -> None:
    module = seeded(MAKERS["softplus"], **INTERPRET)
    x = rows(6, 5)
    assert module(x).dtype == torch.float32
    assert module.half()(x.detach().half()).dtype == torch.float16
    assert module.to(torch.bfloat16)(x.detach().bfloat16()).dtype == torch.bfloat16
    made = engine_of(module).generations
    module.float()(x)
    assert engine_of(module).generations == made
    with torch.no_grad():
        assert not module(x).requires_grad
    with torch.inference_mode():
        assert module(x).is_inference()
    module.eval()
    same_step(module, plain_copy(module, bias=False), x)


def plain_copy(module: MLP, bias: bool = True) -> MLP:
    """Another object with the same values."""
    other = MLP([5, 12, 12, 3], nn.Softplus(), bias=bias, **INTERPRET)
    other.load_state_dict(module.state_dict())
    return other


def test_leading_axes_are_kept() -> None:
    module = seeded(MAKERS["mlp"], **INTERPRET)
    x = rows(2, 3, 4, 5, grad=False)
    out = module(x)
    assert out.shape == (2, 3, 4, 3)
    assert torch.equal(out.reshape(24, 3), module(x.reshape(24, 5)))
    assert module(x[0, 0, 0]).shape == (3,)


def test_frozen_parameters_get_no_gradients() -> None:
    module, x = seeded(MAKERS["mlp"], **INTERPRET), rows(6, 5)
    module[0].requires_grad_(False)
    module(x).sum().backward()
    assert module[0].weight.grad is None
    assert module[2].weight.grad is not None


def test_on_the_cpu_the_original_ops_run_and_that_is_said() -> None:
    module, x = seeded(MAKERS["softplus"]), rows(6, 5)
    with pytest.warns(NotFusedWarning, match="the tensors are on the CPU; the original ops run"):
        out = module(x)
    assert torch.equal(out, plain(module)(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(module(x), out)
    assert next(iter(megafuse.explain(module))).reason.startswith("the tensors are on the CPU")


def test_layers_can_be_taken_out_and_replaced() -> None:
    module, x = seeded(MAKERS["mlp"], **INTERPRET), rows(6, 5, grad=False)
    module(x)
    assert type(module[:2]) is nn.Sequential
    assert module[:2][0] is module[0]
    module[1] = nn.Tanh()
    assert torch.allclose(module(x), plain(module)(x), atol=1e-6)
    assert engine_of(module).generations == 2


def test_hooks_run_at_every_call() -> None:
    module, x = seeded(MAKERS["mlp"], **INTERPRET), rows(6, 5, grad=False)
    seen: list[torch.Size] = []
    handle = module.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    module(x)
    module(x)
    handle.remove()
    assert seen == [torch.Size([6, 3])] * 2


def test_inside_another_module_it_is_traced_as_the_plain_one() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(5), MLP(WIDTHS, "gelu"), nn.LayerNorm(3))
    fused = megafuse.fuse(net, rows(6, 5), **INTERPRET)
    assert fused(rows(6, 5)).shape == (6, 3)
    plan = next(iter(megafuse.explain(fused)))
    assert not plan.opaque
    report = megafuse.check(nn.Sequential(net[0], plain(net[1]), net[2]), rows(6, 5), fused=fused, seeds=1)
    assert report.ok, str(report)


def test_other_compilers_see_the_plain_layers() -> None:
    module, x = seeded(MAKERS["mlp"]), rows(6, 5)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), plain(module)(x))


def test_fusing_a_ready_module_gives_another_set_of_options() -> None:
    module, x = seeded(MAKERS["softplus"]), rows(6, 5)
    fused = megafuse.fuse(module, x, **INTERPRET)
    assert isinstance(fused, FusedMLPSoftplus)
    assert next(iter(megafuse.explain(fused))).kernels
    assert torch.allclose(fused(x), plain(module)(x), atol=1e-6)
    assert type(plain(fused)) is nn.Sequential
    again = copy.deepcopy(fused)
    assert torch.equal(again(x), fused(x))
    assert isinstance(again, FusedMLPSoftplus)


def test_strict_is_passed_on() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.logcumsumexp(x, -1)

    with pytest.raises(UnsupportedError):
        MLP([5, 4, 3], Odd(), **INTERPRET)(rows(6, 5))
    assert MLP([5, 4, 3], Odd(), target="interpret")(rows(6, 5)).shape == (6, 3)


def test_the_quick_start_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for the move there and for who runs the kernels."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "mlp.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) >= 3
    if not torch.cuda.is_available():
        monkeypatch.setattr(nn.Module, "cuda", lambda self: self)
        monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    scope: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotFusedWarning)
        for block in blocks:
            exec(compile(block, "docs/mlp.md", "exec"), scope)
