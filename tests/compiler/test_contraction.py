"""Where fp32 values are compared for equality, kernels round every operation by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megafuse.compiler import compile_call
from megafuse.compiler.variants import make_variants, subjects, tiles_of_kernel
from megafuse.core.device import device_spec

FP32, BF16 = torch.float32, torch.bfloat16
Case = tuple[Callable[..., Tensor], torch.dtype, bool]
CASES: dict[str, Case] = {
    "amax": (lambda x, y: (x * y + x.sin()).amax(-1), FP32, False),
    "amin": (lambda x, y: (x * y + 1).amin(0), FP32, False),
    "equal": (lambda x, y: torch.where(x * y + x == y * y, x, y), FP32, False),
    "amax of rounded values": (lambda x, y: (x * y + x.sin()).amax(-1), BF16, True),
    "no comparison": (lambda x, y: (x * y + x.sin()).sum(-1), FP32, True),
    "a constant": (lambda x, y: torch.where(x == 0, y, x * y + x), FP32, True),
    "order": (lambda x, y: torch.where(x > y, y, x * y + x), FP32, True),
}


@pytest.mark.parametrize("name", CASES)
def test_equality_of_wide_values_turns_contraction_off_in_all_kernels(name: str) -> None:
    """Gradients of extremes look for the extreme among values that another kernel has computed."""
    fn, dtype, contracts = CASES[name]
    x, y = (torch.empty(60, 70, device="meta", dtype=dtype, requires_grad=True) for _ in range(2))
    made = compile_call(fn, (x, y), {}, device_spec(90))
    kernels = made.artifact("triton").kernels
    assert kernels
    for kernel in kernels:
        assert kernel.contracts is contracts
        assert kernel.options.get("enable_fp_fusion", True) is contracts
        assert (kernel.uncontracted().digest == kernel.digest) is not contracts
    wanted = {s.key: tiles_of_kernel(k) for s in subjects(made.step) for k in made.step.kernels if k.key == s.key}
    for variant in make_variants(made, wanted, wanted, "triton").values():
        assert all(source.contracts is contracts for source in variant.sources)
