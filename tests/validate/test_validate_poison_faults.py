"""Poisoned allocations, and the interface of planted faults."""

from __future__ import annotations

import pytest
import torch

from megafuse.validate import (
    REQUIRED_FAULTS,
    Fault,
    FaultNotPlanted,
    plant,
    poison_,
    poisoned_allocations,
    require_complete,
    text_fault,
)


def test_every_allocator_is_poisoned() -> None:
    x = torch.zeros(3, 4)
    with poisoned_allocations() as mode:
        made = [
            torch.empty(3, 4),
            torch.empty((3, 4), dtype=torch.bfloat16),
            torch.empty_like(x),
            torch.empty_strided((3, 4), (4, 1)),
            x.new_empty(3, 4),
            x.new_empty_strided((3, 4), (4, 1)),
            torch.empty_permuted((3, 4), (1, 0)),
        ]
        assert not torch.isnan(torch.zeros(3, 4) + 1).any()
    assert all(bool(torch.isnan(t).all()) for t in made)
    assert mode.allocations >= len(made)


def test_allocations_of_a_backward_are_poisoned() -> None:
    class Lazy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x * 1

        @staticmethod
        def backward(ctx, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.empty_like(g)

    x = torch.randn(4, requires_grad=True)
    with poisoned_allocations():
        (grad,) = torch.autograd.grad(Lazy.apply(x).sum(), x)
    assert torch.isnan(grad).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e5m2])
def test_integers_get_a_large_pattern(dtype: torch.dtype) -> None:
    out = poison_(torch.zeros(5, dtype=dtype))
    assert bool((out.view(torch.uint8) != 0).all())
    if dtype == torch.int32:
        assert out[0].item() == 0x7F7F7F7F


def test_text_faults_must_fit() -> None:
    fault = text_fault("wrong_eps", r"eps = 1e-05", "eps = 1e-03")
    assert plant(fault, "a\neps = 1e-05\n") == "a\neps = 1e-03\n"
    assert fault.description == REQUIRED_FAULTS["wrong_eps"]
    with pytest.raises(FaultNotPlanted, match="wrong_eps"):
        plant(fault, "no such line")


def test_the_required_set_is_named() -> None:
    faults = [Fault(name, text, lambda s: s + "!") for name, text in REQUIRED_FAULTS.items()]
    assert set(require_complete(faults)) == set(REQUIRED_FAULTS)
    with pytest.raises(ValueError, match="stale_workspace"):
        require_complete([f for f in faults if f.name != "stale_workspace"])
