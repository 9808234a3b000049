"""Outputs that share values, memory or layouts: each is what the original returns, and all come from the kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import megafuse
from pipeline_helpers import check_few

Outputs = tuple[Tensor, ...]


def same_twice(x: Tensor) -> Outputs:
    y = torch.tanh(x)
    return y, y


def value_and_its_view(x: Tensor) -> Outputs:
    y = torch.tanh(x)[:1]
    return y, y.view_as(y), y * 2


def part_and_a_copy_of_it(x: Tensor) -> Outputs:
    """The flip is of an axis of one: equal values, but memory of their own."""
    y = torch.tanh(x)[:1]
    return y, y.flip(1)


def part_of_input_and_a_copy(x: Tensor) -> Outputs:
    return x[:1].flip(1), x[:1]


def three_layouts(x: Tensor) -> Outputs:
    y = torch.tanh(x).transpose(0, 2)
    return y, y.flip(1), y.clone()


def part_of_a_concat(x: Tensor) -> Tensor:
    return torch.cat([x, torch.sin(x)], -1).select(2, 4)


def part_of_a_padded_value(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(torch.sin(x), (1, 2))[..., 1:3]


FUNCTIONS = (
    same_twice, value_and_its_view, part_and_a_copy_of_it, part_of_input_and_a_copy, three_layouts, part_of_a_concat,
    part_of_a_padded_value,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=[f.__name__ for f in FUNCTIONS])
def test_outputs(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    x = torch.randn(2, 1, 3, dtype=dtype, requires_grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*the original ops run")
        check_few(fn, x, fused=megafuse.fuse(fn, x, target="interpret"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_products_of_an_expanded_value_follow_the_other_operand(dtype: torch.dtype) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x).unsqueeze(0).expand(4, 7) * w

    torch.manual_seed(0)
    x = torch.randn(7, dtype=dtype, requires_grad=True)
    w = torch.randn(7, 4, dtype=dtype).t().requires_grad_()
    assert fn(x, w).stride() == (1, 4)
    check_few(fn, x, w, fused=megafuse.fuse(fn, x, w, target="interpret"))


def test_parts_that_no_output_needs() -> None:
    """The gradient of a bias whose other columns go unused is a sum of zeros there."""
    linear = torch.nn.Linear(5, 12)

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).split(3, 1)[0] * 2

    module, x = Module(), torch.randn(4, 5, requires_grad=True)
    check_few(module, x, fused=megafuse.fuse(module, x, target="interpret"))


FILLED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum of zeros": lambda x: torch.cat([x, torch.zeros(3, 4)], 1).sum(0),
    "sum of halves": lambda x: torch.cat([x, torch.full((3, 4), 0.5)], 1).sum(0),
    "largest": lambda x: torch.cat([x, torch.full((3, 4), 0.1)], 1).amax(0),
    "product": lambda x: torch.cat([x, torch.full((3, 4), 1.5)], 1).prod(0),
    "sum of all": lambda x: x * torch.ones(3, 4).sum(),
}


@pytest.mark.parametrize("name", FILLED)
def test_reductions_of_filled_tensors(name: str) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    check_few(FILLED[name], x, fused=megafuse.fuse(FILLED[name], x, target="interpret"))
