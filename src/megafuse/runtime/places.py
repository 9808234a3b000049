"""Addresses of CPU memory as launch code counts with them: a tensor's first element, or bytes behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """``offset`` bytes behind the first element of ``memory``."""

    memory: Tensor
    offset: int = 0

    def __add__(self, nbytes: int) -> Place:
        return Place(self.memory, self.offset + nbytes)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """What lies here as elements of ``dtype``: the tensor itself, or the rest of a pool of bytes."""
        if self.memory.dtype is dtype and not self.offset:
            return self.memory
        return self.memory[self.offset :].view(dtype)
