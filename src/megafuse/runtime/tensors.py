"""Tensor helpers of launch code: allocation, views, layouts, and element types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megafuse.core.dtypes import DType
from megafuse.core.errors import LaunchError

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.F64: torch.float64, DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16,
    DType.I64: torch.int64, DType.I32: torch.int32, DType.I16: torch.int16, DType.I8: torch.int8,
    DType.U8: torch.uint8, DType.BOOL: torch.bool,
}  # fmt: skip
DTYPE_TOKENS: dict[str, torch.dtype] = {
    "bool_" if d is DType.BOOL else d.value: t for d, t in TORCH_DTYPES.items()
}  # names of element types in launch code
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
LEAST_FINITE = 0.5  # of the elements of each result, for a comparison to say anything


def view(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """Strided view of ``tensor``; ``offset`` in elements from the tensor's own first element, not its storage's."""
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def detached(tensor: Tensor) -> Tensor:
    """The same memory (and version counter) as a tensor that autograd does not see as a view."""
    return tensor.detach()


def fresh(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, with the same strides where those are dense."""
    return tensor.clone()


def allocator(device: torch.device, *, poison: bool = False) -> Empty:
    """``empty(shape, strides, dtype)`` for launch code on ``device``, by PyTorch's allocator.

    With ``poison``, all memory is filled with NaN (integers: bytes 0x7f), so that an element left unwritten shows.
    """

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return (lambda shape, strides, dtype: poison_(empty(shape, strides, dtype))) if poison else empty


def short_cuts(device: torch.device) -> dict[str, Callable[..., Any]]:
    """``empty`` on the current CUDA device and ``part``, past PyTorch's dispatcher (a third of the time).

    They are right only where no dispatch mode is active. Empty where this PyTorch lacks one.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    names = {"empty": f"_empty_strided_{device.type}", "part": "_reinterpret_tensor"}
    found = {name: getattr(guards, own, None) for name, own in names.items()}
    return {name: fn for name, fn in found.items() if fn is not None}


def poison_(tensor: Tensor) -> Tensor:
    """Fill in place with NaN; bool with True, integers with bytes 0x7f."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(int.from_bytes(b"\x7f" * tensor.element_size(), "little"))


def same_layout(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """True when ``tensor`` has ``strides``; those of dims of size 1, and of empty tensors, do not count."""
    found = tensor.stride()
    if found == strides or tensor.numel() == 0:
        return True
    return all(n == 1 or f == s for n, f, s in zip(tensor.shape, found, strides, strict=True))


def restore(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``tensor`` with ``strides`` again, after a saved-tensor hook gave it back in another layout.

    Along dims of stride 0 all elements are taken to be equal, as they were in the expanded tensor that was saved.
    """
    if same_layout(tensor, strides):
        return tensor
    first = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)
    out = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    out[first].copy_(tensor[first])
    return out


def arranger(empty: Empty) -> Callable[..., Tensor]:
    """``arrange(tensor, shape, strides, dtype)`` for launch code, which allocates by ``empty``."""

    def arrange(tensor: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if tensor is None:
            return empty(shape, strides, dtype).zero_()
        if tensor.shape != shape:
            raise LaunchError(f"a tensor of shape {shape} is expected here, not {tuple(tensor.shape)}")
        if tensor.dtype is dtype and (tensor.stride() == strides or same_layout(tensor, strides)):
            return tensor
        return empty(shape, strides, dtype).copy_(tensor)

    return arrange


def draw_away_from_zero(memory: Tensor, generator: torch.Generator, *, signed: bool) -> None:
    """Fill ``memory`` (floats) with numbers of a size between 1/2 and 3/2: positive ones, or of both signs.

    None is near 0, where a quotient or a root would put one result far above all others and hide their errors.
    """
    memory.uniform_(-1.0, 1.0, generator=generator)
    memory.add_(torch.sign(memory).add_(0.5).sign_(), alpha=0.5) if signed else memory.mul_(0.5).add_(1.0)


def finite_share(results: Mapping[str, Tensor]) -> float:
    """The least share of finite elements among the results."""
    floats = [t for t in results.values() if t.is_floating_point() and t.numel()]
    return min((float(torch.isfinite(t).float().mean()) for t in floats), default=1.0)
