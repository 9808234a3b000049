"""Tensors of a GPU beside those of the CPU, and tensors whose indices need 64 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafuse
from megafuse.api import engine_of

pytestmark = pytest.mark.gpu


def test_mixed_devices_are_named_at_the_first_call_and_later() -> None:
    module, x = nn.LayerNorm(6), torch.randn(5, 6)
    with pytest.raises(megafuse.InputError, match=r"argument input is on cuda:0, but parameter weight is on cpu"):
        megafuse.fuse(module, x.cuda(), target="cuda")
    fused = megafuse.fuse(module.cuda(), x.cuda(), target="cuda")
    with pytest.raises(megafuse.InputError, match=r"argument input is on cpu, but parameter weight is on cuda:0"):
        fused(x)
    assert fused(x.cuda()).is_cuda


ELSEWHERE: dict[str, Callable[..., Any]] = {
    "moved to the CPU": lambda x: torch.tanh(x.cpu()) * 2,
    "made on the CPU": lambda x: (torch.tanh(x), torch.zeros(3)),
    "to and fro": lambda x: torch.tanh(x.cpu().to(x.device)),
}


@pytest.mark.parametrize("which", ELSEWHERE)
def test_results_are_where_eager_mode_has_them(which: str) -> None:
    fn, x = ELSEWHERE[which], torch.randn(5, 6, device="cuda")
    with pytest.warns(megafuse.NotFusedWarning, match="cpu"):
        fused = megafuse.fuse(fn, x, target="cuda")
    for a, b in zip(_list(fused(x)), _list(fn(x)), strict=True):
        assert a.device == b.device
        torch.testing.assert_close(a, b)


def _list(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def test_what_stays_on_the_device_is_fused() -> None:
    def fn(x: Tensor) -> Tensor:
        table = torch.arange(x.shape[-1], device=x.device) + torch.ones(x.shape[-1]).cuda()
        return torch.tanh(x.cuda()) * table if x.is_cuda and x.device.type == "cuda" else x

    x = torch.randn(5, 6, device="cuda")
    fused = megafuse.fuse(fn, x, target="cuda")
    assert engine_of(fused).bindings[0].spec is not None
    torch.testing.assert_close(fused(x), fn(x))


def test_a_number_on_the_cpu_beside_tensors_of_the_gpu() -> None:
    def fn(x: Tensor, s: Tensor) -> Tensor:
        return torch.tanh(x) * s

    x, s = torch.randn(5, 6, device="cuda"), torch.tensor(2.0)
    with pytest.warns(megafuse.NotFusedWarning, match="argument s is a number on the CPU"):
        fused = megafuse.fuse(fn, x, s, target="cuda")
    torch.testing.assert_close(fused(x, s), fn(x, s))
    torch.testing.assert_close(fused(x, s.cuda()), fn(x, s))


# --- more than 2**31 elements -----------------------------------------------------------------------------------------

WIDE = 2**31
ROW = 4096
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pointwise": lambda x, w: F.silu(x) * w,
    "row reduction": lambda x, w: F.layer_norm(x, (ROW,), w),
}


def needs_memory(gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free / 2**30:.0f} are free")


@pytest.mark.parametrize("shared", [False, True], ids=["own program", "shared program"])
@pytest.mark.parametrize("which", CALLS)
def test_indices_past_32_bits(which: str, shared: bool) -> None:
    """Forward and backward of 2**31 and some elements; the first and last rows are held against eager ones."""
    needs_memory(40)
    fn, rows = CALLS[which], WIDE // ROW + 3
    w = torch.rand(ROW, device="cuda", dtype=torch.bfloat16) + 0.5
    w.requires_grad_(False)
    x = torch.empty(rows, ROW, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    fused = megafuse.fuse(fn, x[:9].detach().requires_grad_() if shared else x, w, target="cuda")
    if shared:
        fused(x[:13].detach().requires_grad_(), w)
    out = fused(x, w)
    (grad,) = torch.autograd.grad(out, x, out.detach())
    assert engine_of(fused).bindings[-1].spec is not None
    for part in (slice(0, 5), slice(rows // 2 - 2, rows // 2 + 3), slice(rows - 5, rows)):
        given = x[part].detach().requires_grad_()
        wanted = fn(given, w)
        torch.testing.assert_close(out[part], wanted, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(
            grad[part], torch.autograd.grad(wanted, given, wanted.detach())[0], rtol=2e-2, atol=2e-2
        )


def test_a_sum_over_more_rows_than_32_bits_reach() -> None:
    """Column sums of a gradient: partials of programs whose first element lies past 2**31."""
    needs_memory(40)
    rows = WIDE // ROW + 3
    x = torch.zeros(rows, ROW, device="cuda", dtype=torch.bfloat16)
    x[0], x[-1] = 1.0, 3.0
    w = torch.ones(ROW, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    out = megafuse.fuse(fn, x, w, target="cuda")(x, w)
    (grad,) = torch.autograd.grad(out, w, torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(out))
    assert torch.equal(grad, torch.full_like(grad, 4.0))
