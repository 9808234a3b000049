"""Poisoned memory: every uninitialised allocation comes back full of NaN, so an element left unwritten shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATORS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_permuted.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
_POISON_BYTE = 0x7F  # repeated: NaN in fp8, and a large number in every integer type


class PoisonMode(TorchDispatchMode):
    """Fills what ``torch.empty`` and its relatives return, in any thread that runs autograd of this one.

    ``allocations`` counts the tensors filled. Allocations made inside ATen's own kernels are not touched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocations = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATORS:
            poison_(out)
            self.allocations += 1
        return out


def poisoned_allocations() -> PoisonMode:
    """Context manager: ``with poisoned_allocations() as mode: step(x)``; ``mode.allocations`` counts what it filled."""
    return PoisonMode()


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill ``tensor`` in place: NaN for floats and complex, True for bools, bytes 0x7f for integers and fp8."""
    with torch.no_grad():
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() > 1):
            return tensor.fill_(float("nan"))
        if tensor.is_floating_point():
            tensor.view(torch.uint8).fill_(_POISON_BYTE)
            return tensor
        pattern = int.from_bytes(bytes([_POISON_BYTE]) * tensor.element_size(), "little")
        return tensor.fill_(pattern)
