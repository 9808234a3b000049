"""Small kernels that share a launch, on a GPU: right in every type, one launch for all of them, in CUDA graphs too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import megafuse
from megafuse.explanation.records import KernelInfo
from megafuse.nn import MLP
from megafuse.validate import CheckOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
QUICK = CheckOptions(seeds=2, small_seeds=0, repeats=2)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def shared(fused: nn.Module) -> list[int]:
    """How many small kernels each shared launch does."""
    plan = next(iter(megafuse.explain(fused)))
    return [len(k.phases) for k in plan.kernels if isinstance(k, KernelInfo) and k.apart]


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [[40, 128, 96, 17], [64] * 31])
def test_weight_norms(widths: list[int], dtype: torch.dtype, cuda_graph: bool) -> None:
    torch.manual_seed(0)
    model = MLP(widths, "tanh", weight_norm=True, device="cuda", dtype=dtype, strict=True, cuda_graph=cuda_graph)
    x = torch.randn(300, widths[0], device="cuda", dtype=dtype, requires_grad=True)
    report = megafuse.check(model, x, options=QUICK)
    assert report.ok, str(report)
    print(shared(model))
    assert min(len(widths) - 1, 16) in shared(model)


class Norms(nn.Module):
    """Independent layer norms of different sizes, and what is to be learnt of each."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths)

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(norm(x).tanh() for norm, x in zip(self.norms, xs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_independent_norms_and_their_column_sums(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    sizes = ((700, 40), (33, 1280), (1, 7), (512, 128), (2048, 96))
    model = Norms(tuple(width for _, width in sizes)).to("cuda", dtype)
    xs = [torch.randn(*size, device="cuda", dtype=dtype, requires_grad=True) for size in sizes]
    fused = megafuse.fuse(model, *xs, strict=True, tune=False)
    report = megafuse.check(model, *xs, fused=fused, options=QUICK)
    assert report.ok, str(report)
    assert max(shared(fused)) >= 4
