"""Strides that results would have on a real device, where PyTorch's meta device gives others."""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_strides
from torch.utils._python_dispatch import TorchDispatchMode


class RealStrides(TorchDispatchMode):
    """Results of pointwise ops on meta tensors get the strides that PyTorch's kernels give them.

    On the meta device 16-bit operands are cast to fp32 first. That copies an expanded operand out, and the result then
    follows the copy's order of axes instead of the other operand's.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op."""
        result = func(*args, **(kwargs or {}))
        operands = [a for a in args if isinstance(a, torch.Tensor)]
        if len(operands) < 2 or torch.Tag.pointwise not in func.tags or not any(map(_is_expanded, operands)):
            return result  # a copy of one operand has the memory format that it was asked for
        if not isinstance(result, torch.Tensor) or any(result is a for a in operands):
            return result
        strides = compute_elementwise_output_strides(*(a.expand(result.shape) for a in operands))
        return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
