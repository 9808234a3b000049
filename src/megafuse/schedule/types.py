"""The schedule of one step: buffers, kernels and the order of calls, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megafuse.core.dtypes import DType
from megafuse.ir.graph import Node
from megafuse.ir.index import Affine, Axis
from megafuse.ir.nest import Root
from megafuse.ir.trace import Trace


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


@dataclass(frozen=True)
class Tile:
    """Sizes of a phase: see ``codegen.program``. ``why`` says how they were chosen."""

    row_tile: int
    rows_per_chunk: int
    pieces: tuple[int, ...]
    col_block: int = 0
    col_grid: bool = False
    num_warps: int = 4
    num_stages: int = 1
    hoist: bool = True
    why: str = ""


@dataclass(frozen=True)
class DotTile:
    """Sizes of a generated dot: see ``codegen.dot_program``. ``why`` says how they were chosen."""

    rows: int
    cols: int
    depth: int
    parts: int
    programs: int
    num_warps: int
    num_stages: int
    group: int = 8
    why: str = ""


@dataclass(frozen=True)
class Target:
    """Where a root goes: element offset in a buffer, affine in the nest's axes (and ``chunk`` for partials)."""

    buffer: str
    index: Affine
    dtype: DType


@dataclass(frozen=True)
class PhaseSchedule:
    """One nest with its tile: ``fixed`` and ``loop`` are its row axes."""

    trace: Trace
    fixed: tuple[Axis, ...]
    loop: tuple[Axis, ...]
    tile: Tile
    targets: tuple[tuple[Root, Target], ...]


@dataclass(frozen=True)
class DotPart:
    """The product of a kernel: ``node`` is ``a @ b (+ bias)`` on views ``[P, M, K]`` and ``[P, K, N]``.

    The kernel's one phase is the epilogue: its fixed axes are P, its loop axes M, its columns N. ``descriptors``: the
    target has a tensor copy engine.
    """

    node: Node
    a: View
    b: View
    bias: View | None
    tile: DotTile
    tf32: bool = False
    descriptors: bool = False


@dataclass(frozen=True)
class KernelSchedule:
    """One kernel: its phases and the buffers it reads and writes, in parameter order. ``dot``: what it multiplies."""

    name: str
    phases: tuple[PhaseSchedule, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    num_warps: int
    num_stages: int
    dram_bytes: int
    doc: tuple[str, ...] = field(default=())
    dot: DotPart | None = None

    @property
    def args(self) -> tuple[str, ...]:
        """Buffers in parameter order."""
        return (*self.reads, *self.writes)


Call = Alloc | Free | Launch | DotCall | OpaqueCall


@dataclass(frozen=True)
class Step:
    """One captured step, fully ordered.

    ``forward`` and ``backward`` are calls in order. ``outputs[i]`` is the view returned for forward output ``i`` (it
    may be a view of an input); ``grads[i]`` for gradient ``i``; None where there is none. ``saved`` names the buffers
    that forward hands to backward, graph inputs included. ``names``: the buffer of each graph value with memory.
    """

    buffers: tuple[Buffer, ...]
    kernels: tuple[KernelSchedule, ...]
    forward: tuple[Call, ...]
    backward: tuple[Call, ...]
    outputs: tuple[View | None, ...]
    grads: tuple[View | None, ...]
    saved: tuple[str, ...]
    names: Mapping[Node, str] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=())

    def buffer(self, name: str) -> Buffer:
        """The buffer called ``name``."""
        return next(b for b in self.buffers if b.name == name)
