"""The schedule of one step: buffers, kernels and the order of calls, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megafuse.core.dtypes import DType


@dataclass(frozen=True)
class Buffer:
    """A tensor in device memory. Strides in elements.

    ``kind``: input, tangent (given by the caller); output, grad (returned); saved (made by forward, read by backward);
    temp (dies inside one call). ``position`` is the graph-input position of inputs and tangents.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    kind: str
    position: int = -1


@dataclass(frozen=True)
class View:
    """A strided view of a buffer: shape and strides in elements, ``offset`` from the buffer's first element."""

    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Alloc:
    """Allocate a buffer (uninitialised)."""

    buffer: str


@dataclass(frozen=True)
class Free:
    """Drop the last reference to a buffer."""

    buffer: str


@dataclass(frozen=True)
class Launch:
    """Launch kernel ``kernel`` (index into the schedule's kernels) on buffers, in the kernel's parameter order."""

    kernel: int
    args: tuple[str, ...]


@dataclass(frozen=True)
class DotCall:
    """``out = a @ b (+ bias)``, by the library. All views are 3-D ``[P, M, K]`` etc. but the 1-D bias."""

    out: View
    a: View
    b: View
    bias: View | None = None


@dataclass(frozen=True)
class OpaqueCall:
    """ATen call ``call`` (index into the capture's calls); results become the named buffers (None: not used)."""

    call: int
    args: tuple[View, ...]
    results: tuple[str | None, ...]
    reason: str = ""


Call = Alloc | Free | Launch | DotCall | OpaqueCall


@dataclass(frozen=True)
class Step:
    """One captured step, fully ordered.

    ``forward`` and ``backward`` are calls in order. ``outputs[i]`` is the view returned for forward output ``i`` (it
    may be a view of an input); ``grads[i]`` for gradient ``i``; None where there is none. ``saved`` names the buffers
    that forward hands to backward, graph inputs included.
    """

    buffers: tuple[Buffer, ...]
    kernels: tuple[Any, ...]
    forward: tuple[Call, ...]
    backward: tuple[Call, ...]
    outputs: tuple[View | None, ...]
    grads: tuple[View | None, ...]
    saved: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())

    def buffer(self, name: str) -> Buffer:
        """The buffer called ``name``."""
        return next(b for b in self.buffers if b.name == name)
