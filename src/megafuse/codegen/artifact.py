"""What code generation hands to the runtime: text and launch data, nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megafuse.core.dtypes import DType
from megafuse.core.sizes import settle

EARLY = "early"  # the parameter that makes a kernel wait for the one before it; see ``KernelSource.waits``


@dataclass(frozen=True)
class KernelSource:
    """The text of one kernel for one back end.

    ``entry`` is the function's name in ``text``. ``params`` are the pointer arguments in call order: (name, dtype).
    ``text`` is a complete Python module: it needs triton (or numpy and ml_dtypes) and nothing of megafuse.
    ``dims`` are the open sizes, integer arguments behind the pointers, and ``grid`` may depend on them; ``sizes`` are
    their values once these are known (``at``).

    ``aligned``: positions in params of tensors that must start at a multiple of 16 bytes, since tensor descriptors are
    made of them; ``fallback`` then serves other tensors, and versions of Triton without descriptors.

    ``contracts``: the compiler may contract a product and the sum after it, which rounds once instead of twice.

    ``waits``: the kernel has a last parameter ``early``, False unless given. Where it is true, each program waits for
    the end of the kernel before it ahead of its first access of memory, so that it may be launched before that end.
    """

    entry: str
    backend: str  # "triton" or "numpy"
    text: str
    params: tuple[tuple[str, DType], ...]
    grid: tuple[int, int]
    num_warps: int
    num_stages: int
    writes: tuple[int, ...] = ()  # positions in params of buffers that the kernel writes
    dims: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    aligned: tuple[int, ...] = ()
    fallback: KernelSource | None = None
    contracts: bool = True
    waits: bool = False

    def uncontracted(self) -> KernelSource:
        """The kernel with every operation rounded by itself."""
        return replace(self, contracts=False, fallback=self.fallback and self.fallback.uncontracted())

    @property
    def options(self) -> dict[str, int | bool]:
        """What Triton's compiler is told."""
        told = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return told if self.contracts else {**told, "enable_fp_fusion": False}

    def at(self, values: Mapping[str, int]) -> KernelSource:
        """The kernel for given values of the open sizes."""
        if not self.dims:
            return self
        return replace(self, grid=settle(self.grid, values), sizes=tuple(values[d] for d in self.dims))

    @property
    def digest(self) -> str:
        """Content hash: two equal texts with equal launch data are one kernel."""
        key = repr((self.text, self.grid, *self.options.values()))
        return hashlib.sha256(key.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class HostSource:
    """Launch code of one step: a Python module with ``forward(...)`` and, if there are gradients, ``backward(...)``.

    The runtime supplies the names in ``needs`` (kernel launchers, allocation, library calls) as module globals.
    ``forward(*inputs) -> (outputs, saved)`` and ``backward(saved, tangents) -> grads`` take and return lists; lists
    passed in are emptied as their tensors die. ``dims`` are the open sizes, whose values are module globals too.
    """

    text: str
    needs: tuple[str, ...]
    dims: tuple[str, ...] = ()


@dataclass(frozen=True)
class Artifact:
    """All sources of one step."""

    kernels: tuple[KernelSource, ...]
    host: HostSource
    notes: tuple[str, ...] = field(default=())

    def at(self, values: Mapping[str, int]) -> Artifact:
        """The sources for given values of the open sizes."""
        return replace(self, kernels=tuple(k.at(values) for k in self.kernels)) if values else self
