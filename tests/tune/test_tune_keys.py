"""The key of a kernel: what it computes from memory of which layout, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafuse.compiler import compile_call
from megafuse.compiler.variants import subjects
from megafuse.core.device import device_spec


class First(nn.Module):
    def __init__(self, eps: float = 1e-3, shift: float = 2.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24, eps=eps)
        self.shift = shift

    def forward(self, x):
        return torch.tanh(self.norm(x)) + self.shift


class Second(nn.Module):
    """The same by other names, on other lines."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))
        self.offset = nn.Parameter(torch.zeros(24))

    def forward(self, data):
        normed = nn.functional.layer_norm(data, (24,), self.scale, self.offset, 1e-3)

        return normed.tanh() + 2.0


def keys(module, x, arch=90):
    return [s.key for s in subjects(compile_call(module, (x.requires_grad_(),), {}, device_spec(arch)).step)]


def x(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (10, 24)), dtype=dtype)


def test_names_and_lines_do_not_count():
    assert keys(First(), x()) == keys(Second(), x())


@pytest.mark.parametrize(
    "other",
    [
        lambda: keys(First(), x(11, 24)),
        lambda: keys(First(), x(2, 5, 24)),
        lambda: keys(First(eps=1e-5), x()),
        lambda: keys(First(shift=3.0), x()),
        lambda: keys(First().bfloat16(), x(dtype=torch.bfloat16)),
        lambda: keys(First(), x(24, 10).t().detach()),
        lambda: keys(First(), x(10, 48)[:, :24].detach()),
    ],
    ids=["rows", "dims", "constant", "other constant", "dtype", "transposed", "strides"],
)
def test_what_is_computed_and_the_layout_count(other):
    first, second = keys(First(), x()), other()
    assert first[0] != second[0], "forward"


def test_the_device_does_not_count():
    """It is part of the name under which results are kept, not of what the kernel computes."""
    assert keys(First(), x())[0] == keys(First(), x(), arch=100)[0]


def test_a_step_with_the_same_kernel_twice_has_it_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
            self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(3))

        def forward(self, x):
            for norm, layer in zip(self.norms, (self.first, self.second, nn.Identity()), strict=True):
                x = layer(norm(x))
            return x

    step = compile_call(Twice(), (x().requires_grad_(),), {}, device_spec(90)).step
    found = [k.key for k in step.kernels]
    assert len(set(found)) < len(found)
    assert [s.key for s in subjects(step)] == list(dict.fromkeys(found))
