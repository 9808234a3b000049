"""Element types between PyTorch and the graph."""

from __future__ import annotations

from typing import Any

import torch

from megafuse.core.dtypes import DType
from megafuse.core.errors import CaptureError
from megafuse.ir.types import TensorType

FROM_TORCH: dict[torch.dtype, DType] = {
    torch.float64: DType.F64,
    torch.float32: DType.F32,
    torch.bfloat16: DType.BF16,
    torch.float16: DType.F16,
    torch.int64: DType.I64,
    torch.int32: DType.I32,
    torch.int16: DType.I16,
    torch.int8: DType.I8,
    torch.uint8: DType.U8,
    torch.bool: DType.BOOL,
}
TO_TORCH: dict[DType, torch.dtype] = {v: k for k, v in FROM_TORCH.items()}


def from_torch(dtype: torch.dtype) -> DType:
    """The graph's name of a PyTorch element type.

    Raises:
        CaptureError: the type (complex, fp8, ...) has none.
    """
    if dtype not in FROM_TORCH:
        raise CaptureError(f"element type {dtype} is not supported", hint="cast to a float, integer or bool type")
    return FROM_TORCH[dtype]


def type_name(dtype: DType) -> str:
    """PyTorch's name of an element type, without the ``torch.``."""
    return str(TO_TORCH[dtype]).removeprefix("torch.")


def tensor_type(value: Any) -> TensorType:
    """Type of a tensor or stand-in."""
    return TensorType(tuple(int(s) for s in value.shape), from_torch(value.dtype))
