"""What code generation hands to the runtime: text and launch data, nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from megafuse.core.dtypes import DType


@dataclass(frozen=True)
class KernelSource:
    """The text of one kernel for one back end.

    ``entry`` is the function's name in ``text``. ``params`` are the pointer arguments in call order: (name, dtype).
    ``text`` is a complete Python module: it needs triton (or numpy and ml_dtypes) and nothing of megafuse.
    """

    entry: str
    backend: str  # "triton" or "numpy"
    text: str
    params: tuple[tuple[str, DType], ...]
    grid: tuple[int, int]
    num_warps: int
    num_stages: int
    writes: tuple[int, ...] = ()  # positions in params of buffers that the kernel writes

    @property
    def digest(self) -> str:
        """Content hash: two equal texts with equal launch data are one kernel."""
        key = repr((self.text, self.grid, self.num_warps, self.num_stages))
        return hashlib.sha256(key.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class HostSource:
    """Launch code of one step: a Python module with ``forward(...)`` and, if there are gradients, ``backward(...)``.

    The runtime supplies the names in ``needs`` (kernel launchers, allocation, library calls) as module globals.
    ``forward(*inputs) -> (outputs, saved)`` and ``backward(saved, tangents) -> grads`` take and return lists; lists
    passed in are emptied as their tensors die.
    """

    text: str
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Artifact:
    """All sources of one step."""

    kernels: tuple[KernelSource, ...]
    host: HostSource
    notes: tuple[str, ...] = field(default=())
