"""Strides that results would have on a real device, where PyTorch's meta device gives others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_strides
from torch.utils._python_dispatch import TorchDispatchMode

_SUBSCRIPTS = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)


class RealStrides(TorchDispatchMode):
    """Results on meta tensors get the strides that PyTorch's kernels give them on ``device``.

    Pointwise ops: on the meta device 16-bit operands are cast to fp32 first. That copies an expanded operand out, and
    the result then follows the copy's order of axes instead of the other operand's. Subscripts: the meta device does
    not follow the order of axes of the indices.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op."""
        result = func(*args, **(kwargs or {}))
        if func in _SUBSCRIPTS:
            strides = _strides_of_subscript(result, args[0], args[1], self.device)
            return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
        operands = [a for a in args if isinstance(a, torch.Tensor)]
        if len(operands) < 2 or torch.Tag.pointwise not in func.tags or not any(map(_is_expanded, operands)):
            return result  # a copy of one operand has the memory format that it was asked for
        if not isinstance(result, torch.Tensor) or any(result is a for a in operands):
            return result
        strides = compute_elementwise_output_strides(*(a.expand(result.shape) for a in operands))
        return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _strides_of_subscript(
    result: torch.Tensor, x: torch.Tensor, indices: Sequence[torch.Tensor | None], device: torch.device
) -> tuple[int, ...]:
    """Those of a pointwise op on ``x``, held still in the indexed dims, and the indices, held still in all others.

    After ``AdvancedIndex`` of ATen's TensorAdvancedIndexing.cpp; CUDA copies several indices that lie differently.
    """
    dims = [d for d, i in enumerate(indices) if i is not None]
    if not dims or not result.numel():
        return result.stride()
    places = torch.broadcast_tensors(*(i for i in indices if i is not None))
    if device.type == "cuda" and len({i.stride() for i in places}) > 1:
        places = [i.contiguous() for i in places]
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    steps = [step for d, step in enumerate(x.stride()) if d not in dims]
    behind = len(steps) - first
    still = [*steps[:first], *(0 for _ in places[0].shape), *steps[first:]]
    moved = [i.reshape(*i.shape, *(1 for _ in range(behind))).expand(result.shape) for i in places]
    return tuple(compute_elementwise_output_strides(torch.empty_strided(result.shape, still, device="meta"), *moved))
