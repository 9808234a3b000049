"""The schedule of one step: buffers, kernels and the order of calls, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megafuse.core.dtypes import DType
from megafuse.core.sizes import divides, may_exceed
from megafuse.ir.chain import Walk
from megafuse.ir.graph import Node
from megafuse.ir.index import Affine, Axis
from megafuse.ir.nest import Root
from megafuse.ir.trace import Trace
from megafuse.schedule.chain_tile import MOST_PER_THREAD, MOST_STAGES, MOST_WARPS, ChainRules, ChainTile


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
    abreast: int = 1
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
class KernelTiles:
    """The tiles of all phases of a kernel, and its warps, as something other than the heuristic chose them.

    Of a chain, whose phases share one tile, ``chain`` alone.
    """

    tiles: tuple[Tile, ...]
    num_warps: int
    chain: ChainTile | None = None


MOST_ABREAST = 4


@dataclass(frozen=True)
class TileRules:
    """What makes a tile legal for a phase. ``rows`` and ``cols`` are loop rows and columns, and may be open.

    ``over_cols``: it reduces over its columns. ``walked``: a program walks several row tiles, and all of them under
    ``whole_loop``. ``blocked``: columns are walked in blocks. ``split``: several programs share the loop rows, so that
    they leave partial sums. ``wide``: one piece never holds all columns. ``longest_sum``: most row tiles of a chunk (0:
    any number). ``run``: rows that are neighbours along one axis. ``parts``: of its longest sum that is made while
    loading.
    """

    rows: int
    cols: int
    over_cols: bool
    walked: bool
    whole_loop: bool
    blocked: bool
    split: bool
    wide: bool
    longest_sum: int = 0
    run: int = 1
    parts: int = 1

    def problem(self, tile: Tile) -> str:
        """Why ``tile`` is not legal here; empty where it is."""
        return self._sizes(tile) or self._columns(tile) or self._chunk(tile) or self._walk(tile)

    def _sizes(self, tile: Tile) -> str:
        sizes = (tile.row_tile, tile.abreast, *tile.pieces, tile.col_block or 1, tile.num_warps)
        odd = [n for n in sizes if n < 1 or n & (n - 1)]
        if odd or not tile.pieces:
            return f"sizes {odd} are no powers of two"
        if tile.num_warps > MOST_WARPS:
            return f"more than {MOST_WARPS} warps"
        if tile.row_tile * sum(tile.pieces) * self.parts > MOST_PER_THREAD * 32 * tile.num_warps:
            return f"more than {MOST_PER_THREAD} elements a thread"
        return ""

    def _columns(self, tile: Tile) -> str:
        if tile.col_block and tile.pieces != (tile.col_block,):
            return "blocks of columns are one piece"
        if self.over_cols:
            if tile.col_grid or bool(tile.col_block) != self.blocked:
                return "its reductions need all columns in one program"
            covers = self.blocked or (
                not may_exceed(self.cols, sum(tile.pieces)) and may_exceed(self.cols, sum(tile.pieces[:-1]))
            )
            return "" if covers else "its pieces do not cover the columns, or some are empty"
        wide = self.wide or may_exceed(self.cols, tile.pieces[0])
        fits = tile.col_grid == (wide and not self.whole_loop) and bool(tile.col_block) == (wide and self.whole_loop)
        return "" if fits and len(tile.pieces) == 1 else "its columns are one piece, or spread in equal ones"

    def _chunk(self, tile: Tile) -> str:
        rows = tile.rows_per_chunk
        if self.whole_loop:
            return ""  # one program walks all rows
        if not self.walked:
            return "" if rows == tile.row_tile else "nothing is gained by walking several row tiles"
        if rows < 1 or rows % tile.row_tile:
            return f"chunks of {rows} rows cut tiles of {tile.row_tile}"
        if self.longest_sum and rows > self.longest_sum * tile.row_tile:
            return f"running sums over more than {self.longest_sum} row tiles lose bits"
        return "" if may_exceed(self.rows, rows) == self.split else "partial sums would come or go"

    def _walk(self, tile: Tile) -> str:
        if tile.abreast > 1 and (problem := self._abreast(tile)):
            return problem
        if not 1 <= tile.num_stages <= MOST_STAGES:
            return f"a pipeline has 1 to {MOST_STAGES} stages"
        if tile.num_stages > 1 and (self.whole_loop or tile.col_block or not self.walked):
            return "there is no row loop to pipeline"
        if tile.num_stages > 1 and not (tile.hoist and tile.rows_per_chunk > tile.row_tile * tile.abreast):
            return "there is no row loop to pipeline"
        return "" if tile.hoist or self.walked else "without a row loop everything is loaded once"

    def _abreast(self, tile: Tile) -> str:
        if tile.abreast > MOST_ABREAST:
            return f"more than {MOST_ABREAST} rows abreast"
        if tile.row_tile > 1 or tile.col_block or self.whole_loop or not self.walked:
            return "rows stand abreast in loops over single rows that are held whole"
        whole = divides(tile.abreast, tile.rows_per_chunk) and divides(tile.abreast, self.run)
        return "" if whole else f"{tile.abreast} rows abreast are not all in one chunk, or along one axis"


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
    rules: TileRules | None = None


@dataclass(frozen=True)
class DotPart:
    """The product of a kernel: ``node`` is ``a @ b (+ bias)`` on views ``[P, M, K]`` and ``[P, K, N]``.

    The kernel's one phase is the epilogue: its fixed axes are P, its loop axes M, its columns N. ``descriptors``: the
    target has a tensor copy engine. ``splits``: parts of K, each of which has sums of its own; the slowest of the fixed
    axes is the part.
    """

    node: Node
    a: View
    b: View
    bias: View | None
    tile: DotTile
    descriptors: bool = False
    splits: int = 1


@dataclass(frozen=True)
class ChainDot:
    """A dot of a chain. ``operands``: positions of the phases that read its rows, one, or two for a sum over the rows.

    ``matrix`` and ``bias``: the other operand ``[P, K, N]`` and what is added. ``sums``: where a program stores its sum
    ``[chunks * P, K, N]``.
    """

    node: Node
    operands: tuple[int, ...]
    matrix: View | None = None
    bias: View | None = None
    sums: View | None = None


@dataclass(frozen=True)
class ChainPart:
    """What a chain's kernel does for each row tile, in order: phases (by position) and dots."""

    walk: Walk
    stages: tuple[int | ChainDot, ...]
    tile: ChainTile
    rules: ChainRules


@dataclass(frozen=True)
class KernelSchedule:
    """One kernel: its phases and the buffers it reads and writes, in parameter order.

    ``key`` names what it computes, whatever its tiles (``schedule.identity``); ``finishes`` is the key of the kernel
    whose partial sums it adds up, or empty. ``dot``: what it multiplies. ``chain``: the dots between its phases.
    ``apart``: its phases are small kernels that share a launch, each with programs of its own. ``last_first``: its
    programs start with the last rows (``schedule.direction``).
    """

    name: str
    phases: tuple[PhaseSchedule, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    num_warps: int
    num_stages: int
    dram_bytes: int
    doc: tuple[str, ...] = field(default=())
    dot: DotPart | None = None
    chain: ChainPart | None = None
    key: str = ""
    finishes: str = ""
    apart: bool = False
    last_first: bool = False

    @property
    def args(self) -> tuple[str, ...]:
        """Buffers in parameter order."""
        return (*self.reads, *self.writes)


Call = Alloc | Free | Launch | DotCall | OpaqueCall


@dataclass(frozen=True)
class Pool:
    """Small buffers that share one allocation of ``nbytes``; ``places``: bytes from its start, by buffer.

    ``kind``: forward, backward (they die inside that call) or saved.
    """

    kind: str
    nbytes: int
    places: Mapping[str, int]


@dataclass(frozen=True)
class Step:
    """One captured step, fully ordered.

    ``forward`` and ``backward`` are calls in order. ``outputs[i]`` is the view returned for forward output ``i`` (it
    may be a view of an input); ``grads[i]`` for gradient ``i``; None where there is none. ``saved`` names the buffers
    that forward hands to backward, graph inputs included. ``names``: the buffer of each graph value with memory.
    ``pools``: buffers that are not allocated one by one. ``refused``: keys of kernels whose known tiles are not legal.
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
    pools: tuple[Pool, ...] = ()
    refused: frozenset[str] = frozenset()

    def buffer(self, name: str) -> Buffer:
        """The buffer called ``name``."""
        return next(b for b in self.buffers if b.name == name)
