"""Backward walks with rows abreast and folded tails, at even and odd numbers of rows and columns, by the rule.

Results repeat bit by bit: which rows a sum takes, and in which order, is printed in the kernel.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import megafuse
from megafuse.api import engine_of
from megafuse.validate import CheckOptions, check

pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
OPTIONS = CheckOptions(seeds=2, small_seeds=1, repeats=3)


class Gate(nn.Module):
    """``norm(u + b) * silu(norm(g + c))`` of rows ``[u, g]``, with biases for each position."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(positions, 1, 2 * width) * 0.1)
        self.norm_u, self.norm_g = nn.LayerNorm(width), nn.LayerNorm(width)
        for norm in (self.norm_u, self.norm_g):
            nn.init.normal_(norm.weight, 1.0, 0.1)
            nn.init.normal_(norm.bias, 0.0, 0.1)

    def forward(self, z: Tensor) -> Tensor:
        u, g = (z + self.bias).chunk(2, -1)
        return self.norm_u(u) * functional.silu(self.norm_g(g))


def abreast(fused: object) -> set[int]:
    """How many rows the kernels of the one binding take abreast."""
    (bound,) = engine_of(fused).bindings
    assert bound.compiled is not None
    return {phase.tile.abreast for kernel in bound.compiled.step.kernels for phase in kernel.phases}


def assert_right(module: nn.Module, x: Tensor) -> object:
    fused = megafuse.fuse(module, x, target="cuda")
    report = check(module, x, fused=fused, options=OPTIONS)
    assert not report.determinism, report.determinism
    report.raise_if_failed()
    return fused


def gate_of(rows: int, width: int, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(rows + width)
    x = torch.randn(8, rows, 2 * width, device="cuda", dtype=dtype, requires_grad=True)
    return Gate(8, width).to("cuda", dtype), x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [77, 81, 1197, 1280, 2560])
@pytest.mark.parametrize("rows", [254, 255])
def test_two_norms_and_a_gate(rows: int, width: int, dtype: str) -> None:
    module, x = gate_of(rows, width, DTYPES[dtype])
    fused = assert_right(module, x)
    assert (2 in abreast(fused)) == (width > 1000 and rows == 254 and dtype != "fp32")


@pytest.mark.parametrize("width", [1197, 1280, 2560, 4096, 5120])
@pytest.mark.parametrize("rows", [4094, 4095])
def test_one_norm(rows: int, width: int) -> None:
    torch.manual_seed(rows + width)
    module = nn.LayerNorm(width, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert_right(module, x)


def test_gradients_repeat_bit_by_bit_while_other_work_runs() -> None:
    """Beside copies on another stream, programs finish in other orders."""
    module, x = gate_of(512, 2560, torch.bfloat16)
    fused, tangent = megafuse.fuse(module, x, target="cuda"), torch.randn(8, 512, 2560, device="cuda").bfloat16()
    noise, other = torch.empty(2**26, device="cuda"), torch.cuda.Stream()

    def gradients() -> list[Tensor]:
        leaves = [x, *module.parameters()]
        with torch.cuda.stream(other):
            for _ in range(4):
                noise.copy_(noise.flip(0))
        return list(torch.autograd.grad(fused(x), leaves, tangent))

    first = gradients()
    assert 2 in abreast(fused)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))
    torch.cuda.synchronize()
