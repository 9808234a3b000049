"""Autocast and gradient scaling: a fused callable casts where PyTorch's autocast casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafuse
from life_modules import batch, close, fused_net, net, results
from megafuse.api import engine_of
from megafuse.capture.api import capture
from megafuse.ir.types import Cast
from pipeline_helpers import check_few

NARROW = [torch.bfloat16, torch.float16]


def attention(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bd,ed->be", x, w).softmax(-1) @ w


def mixed_arguments(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return torch.cat([y, x]), torch.stack([y, y]) + x


def losses(x: Tensor, w: Tensor) -> Tensor:
    return F.mse_loss(x @ w, x) + F.smooth_l1_loss(x @ w, x)


def disabled_inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    with torch.autocast("cpu", enabled=False):
        z = y.float() @ w
    return y, z @ w


def enabled_inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.tanh(x @ w)
    return y, x @ w


FUNCTIONS: list[Callable[[Tensor, Tensor], Any]] = [
    attention, mixed_arguments, losses, disabled_inside,
    lambda x, w: F.layer_norm(x @ w, (6,)), lambda x, w: (x @ w).prod(-1), lambda x, w: (x @ w).sum(0),
    lambda x, w: (x @ w).double() @ w.double(), lambda x, w: (x @ w, x + w),
    lambda x, w: torch.linalg.vector_norm(x @ w),
]  # fmt: skip


@pytest.mark.parametrize("dtype", NARROW)
def test_a_module_under_autocast(dtype: torch.dtype) -> None:
    module, x = net(), batch()
    with torch.autocast("cpu", dtype=dtype):
        fused = megafuse.fuse(module, x, target="interpret")
        assert fused(x).dtype is module(x).dtype
        check_few(module, x, fused=fused)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_casts_are_autocasts(number: int, dtype: torch.dtype) -> None:
    fn, x = FUNCTIONS[number], torch.randn(6, 6, requires_grad=True)
    w = nn.Parameter(torch.randn(6, 6) * 0.4)
    with torch.autocast("cpu", dtype=dtype):
        fused = megafuse.fuse(fn, x, w, target="interpret")
        close([t.dtype for t in _list(fused(x, w))], [t.dtype for t in _list(fn(x, w))])
        check_few(fn, x, w, fused=fused)


@pytest.mark.parametrize("outer", [None, torch.float16, torch.bfloat16])
def test_autocast_entered_inside(outer: torch.dtype | None) -> None:
    x, w = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    cache = outer is torch.bfloat16  # PyTorch's cache mixes up the two types of one weight
    with torch.autocast("cpu", dtype=outer or torch.float16, enabled=outer is not None, cache_enabled=cache):
        fused = megafuse.fuse(enabled_inside, x, w, target="interpret")
        close([t.dtype for t in fused(x, w)], [t.dtype for t in enabled_inside(x, w)])
        check_few(enabled_inside, x, w, fused=fused)


def _list(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def test_autocast_entered_and_left_after_fusing() -> None:
    module, fused, x = fused_net()
    plain = fused(x)
    for dtype in NARROW:
        with torch.autocast("cpu", dtype=dtype):
            narrow = fused(x)
        with torch.autocast("cpu", dtype=dtype):
            close(narrow, module(x), loose=True)
        assert not torch.equal(narrow, plain)
        narrow.float().sum().backward()
    assert torch.equal(fused(x), plain)
    assert len(engine_of(fused).bindings) == 3
    with torch.autocast("cpu", dtype=torch.float16), torch.autocast("cpu", enabled=False):
        assert torch.equal(fused(x), plain)
    assert len(engine_of(fused).bindings) == 3


def test_autocast_of_another_device_changes_nothing() -> None:
    _, fused, x = fused_net()
    plain = fused(x)
    with torch.autocast("xpu", dtype=torch.bfloat16, enabled=False):
        assert torch.equal(fused(x), plain)


def test_backward_under_autocast_computes_in_the_forwards_types() -> None:
    _, fused, x = fused_net()
    (want,) = torch.autograd.grad(fused(x).sin().sum(), x)
    out = fused(x).sin().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(out, x)
    assert torch.equal(found, want)


def test_double_backward_runs_in_the_forwards_autocast() -> None:
    module, fused, x = fused_net()
    found = []
    for fn in (fused, module):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = fn(x).float().pow(2).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        found.append(torch.autograd.grad(grad.sum(), module.w1.weight)[0])
    close(found[0], found[1], loose=True)


def test_a_weight_used_twice_is_cast_once() -> None:
    w = nn.Parameter(torch.randn(6, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = capture(lambda x, w: (x @ w) @ w, (torch.randn(5, 6), w))
    to_narrow = [n for n in captured.graph.nodes if isinstance(n.attrs, Cast) and n.args[0] is captured.graph.inputs[1]]
    assert len(to_narrow) == 1


def test_what_autocast_bans_on_cuda_is_refused() -> None:
    """Stand-ins of CUDA tensors on the meta device; CUDA's autocast state can be set without CUDA."""
    x = torch.rand(3, device="meta")
    assert capture(F.binary_cross_entropy, (x, x)).graph.num_forward == 1
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with pytest.raises(megafuse.CaptureError, match="unsafe to autocast"):
            capture(F.binary_cross_entropy, (x, x))
        captured = capture(lambda x, w: F.layer_norm(x @ w, (6,)), (torch.empty(6, 6, device="meta"),) * 2)
    finally:
        torch.set_autocast_enabled("cuda", before)
    assert captured.graph.outputs[0].type.dtype.value == "f32"  # layer norm of a narrow product


@pytest.mark.parametrize("overflow", [False, True])
def test_grad_scaler(overflow: bool) -> None:
    weights = []
    for use_fused in (False, True):
        module, x = net(), batch()
        call = megafuse.fuse(module, x, target="interpret") if use_fused else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40 if overflow else 2.0**8)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = call(x).float().sin().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        weights.append((scaler.get_scale(), module.w1.weight.detach().clone()))
    assert weights[0][0] == weights[1][0]
    close(weights[1][1], weights[0][1], loose=True)
    assert torch.equal(weights[1][1], net().w1.weight) is overflow


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_bf16_activations_with_fp32_norms() -> None:
    norm, x = nn.RMSNorm(6, dtype=torch.float32), batch(dtype=torch.bfloat16)
    fused = megafuse.fuse(norm, x, target="interpret")
    want, found = results(norm, norm, x), results(fused, norm, x)
    assert found[0].dtype is want[0].dtype
    close(found, want, loose=True)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(6),
    "group": lambda: nn.GroupNorm(2, 6),
    "batch": lambda: nn.BatchNorm1d(6),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_fp32_parameters_takes_narrow_values(norm: str, autocast: bool) -> None:
    """As the CPU kernels do; under autocast, what a linear layer gives it is narrow."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), NORMS[norm]()) if autocast else NORMS[norm]()
    x = torch.randn(30, 6, dtype=torch.float32 if autocast else torch.bfloat16, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert fused(x).dtype is module(x).dtype
        check_few(module, x, fused=fused)


def test_types_that_eager_refuses_are_refused() -> None:
    module, x = net(torch.bfloat16), batch()
    with pytest.raises(RuntimeError):
        module(x)
    with pytest.raises(megafuse.CaptureError, match="argument x is float32"):
        megafuse.fuse(module, x, target="interpret")
    fused = megafuse.fuse(module, batch(dtype=torch.bfloat16), target="interpret")
    with pytest.raises(megafuse.CaptureError, match="argument x is float32"):
        fused(x)
