"""The tile program: what every back end prints. Target-neutral, frozen, in static single assignment.

A kernel is one or more *phases* run one after another by each program, with a block-wide barrier between them. A phase
walks *rows* and holds *columns*:

* ``fixed`` row axes come from the program id; they are shared by all phases of a kernel;
* ``loop`` row axes are flattened (row-major, in the given order) and walked ``row_tile`` rows at a time. Program
  ``(fixed, chunk)`` walks loop rows ``chunk * rows_per_chunk .. (chunk + 1) * rows_per_chunk``;
* ``cols`` are flattened (row-major) and held whole in the tile (as power-of-two pieces), or walked ``col_block`` at a
  time once per pass when ``col_block`` is set, or spread over the second grid axis when ``col_grid`` is set.

Program id 0 is ``fixed_index * num_chunks + chunk`` (fixed axes row-major); program id 1 is the column block when
``col_grid`` is set. Where there may be more column blocks than the second grid axis takes, program id 0 counts both:
``(fixed_index * num_chunks + chunk) * col_blocks + column block``. Every value has a level that says which of the two
directions it varies in.

Where phases stand ``apart``, each has programs of its own instead, which follow those of the phases before it along
program id 0 (column blocks counted there too): small kernels that share a launch.

Sizes and strides may be open (``core.sizes``): the kernel then takes ``dims`` as integer arguments after its buffers.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError
from megafuse.core.sizes import Dim, ceil_div, divides, is_open, may_exceed, open_dims
from megafuse.ir.index import Affine, Axis, Guard


class Level(enum.Enum):
    """Which directions a value varies in: none, rows ``[R, 1]``, columns ``[1, C]`` or both ``[R, C]``."""

    SCALAR = "scalar"
    ROW = "row"
    COL = "col"
    TILE = "tile"


MOST_BLOCKS = 65535  # of the second grid axis

__all__ = ["Affine", "Axis", "Guard"]

Operand = str | float | int | bool  # the name of an earlier value of the phase, or a literal


@dataclass(frozen=True)
class Lookup:
    """What an integer adds to the address of a load: ``stride`` times the value ``row``, where ``within`` holds."""

    row: str
    within: str
    stride: int


@dataclass(frozen=True)
class Load:
    """``dst = buffer[index]`` where every guard (and the tile mask) holds, else ``other``.

    With ``lookups``, a load by index: ``buffer[index + sum(stride * row)]``. With several ``parts``, the sum of as many
    elements, each ``step`` behind the one before.
    """

    dst: str
    buffer: str
    index: Affine
    level: Level
    dtype: DType
    guards: tuple[Guard, ...] = ()
    other: float = 0.0
    reread: bool = False  # the same element is read again later (keep it in cache)
    passing: bool = False  # it is not, while others are (do not displace them)
    lookups: tuple[Lookup, ...] = ()
    parts: int = 1
    step: int = 0


@dataclass(frozen=True)
class Index:
    """``dst =`` the integer value of ``index`` (an iota)."""

    dst: str
    index: Affine
    level: Level
    dtype: DType


@dataclass(frozen=True)
class Inside:
    """``dst = `` a bool: every guard holds."""

    dst: str
    guards: tuple[Guard, ...]
    level: Level
    dtype: DType = DType.BOOL


@dataclass(frozen=True)
class Within:
    """``dst = `` a bool: ``src``, an integer, is in ``range(size)``."""

    dst: str
    src: Operand
    size: int
    level: Level
    src_dtype: DType
    dtype: DType = DType.BOOL


@dataclass(frozen=True)
class Compute:
    """``dst = fn(*args)`` with ``fn`` from ``ir.ops.MAP_FNS``; all arithmetic in ``dtype`` (of the arguments)."""

    dst: str
    fn: str
    args: tuple[Operand, ...]
    level: Level
    dtype: DType  # result type
    arg_dtype: DType  # type of the (value) arguments, which literals take too


@dataclass(frozen=True)
class Convert:
    """``dst = src`` rounded to nearest even (or converted) to ``dtype``.

    ``through``: rounded to that type on the way (``src_dtype`` and ``dtype`` are then fp32): a value as the reference's
    backend would have stored and loaded it.
    """

    dst: str
    src: Operand
    level: Level
    src_dtype: DType
    dtype: DType
    through: DType | None = None


@dataclass(frozen=True)
class RowReduce:
    """``dst[r] = fn over all columns of src[r, :]``. ``src`` may be of COL, ROW or SCALAR level (then it is broadcast).

    Columns outside the tile count as the neutral element. The result's level is ROW (SCALAR if ``src`` varies in
    neither rows: the printer may still hold it as ``[R, 1]``).
    """

    dst: str
    src: str
    src_level: Level
    fn: str  # sum max min prod
    dtype: DType


@dataclass(frozen=True)
class ColReduce:
    """``acc = fn(acc, src)`` over the phase's loop rows; after the loop ``acc`` is stored to ``buffer[index]``.

    ``src`` of level TILE gives a ``[1, C]`` result; of level ROW or SCALAR a scalar. ``index`` uses fixed axes, column
    axes and, when the loop is chunked, the axis named ``chunk``. Rows outside the loop count as the neutral element.
    """

    acc: str
    src: str
    src_level: Level
    fn: str
    dtype: DType
    buffer: str
    index: Affine
    store_dtype: DType


@dataclass(frozen=True)
class Store:
    """``buffer[index] = src`` (rounded to the buffer's dtype where that differs)."""

    buffer: str
    index: Affine
    src: Operand
    level: Level
    guards: tuple[Guard, ...] = ()
    passing: bool = False  # the cache is needed for what is read again


Statement = Load | Index | Inside | Within | Compute | Convert | RowReduce | ColReduce | Store


@dataclass(frozen=True)
class Note:
    """A comment above a group of statements: the user's source line, or a section head."""

    text: str


@dataclass(frozen=True)
class Pass:
    """Statements of one walk over the columns. With ``col_block`` unset there is one pass, and no column loop.

    In a looped pass, statements of level SCALAR and ROW that do not depend on column values stand before the loop.
    """

    body: tuple[Statement | Note, ...]


def can_stand_abreast(loop: tuple[Axis, ...], rows_per_chunk: int, rows: int) -> bool:
    """Whether ``rows`` rows, the first a multiple of it, are always neighbours along the fastest axis of a chunk."""
    fastest = next((axis.size for axis in reversed(loop) if axis.size != 1), 1)
    return divides(rows, rows_per_chunk) and divides(rows, fastest)


@dataclass(frozen=True)
class Phase:
    """One loop nest of a kernel; see the module's docstring."""

    title: str
    fixed: tuple[Axis, ...]
    loop: tuple[Axis, ...]
    cols: tuple[Axis, ...]
    row_tile: int
    rows_per_chunk: int
    passes: tuple[Pass, ...]
    pieces: tuple[int, ...]  # power-of-two widths whose sum covers the columns, in order; one entry when looped or grid
    col_block: int = 0
    col_grid: bool = False
    hoist: bool = True  # keep values without rows in registers over the row loop (else they are loaded again)
    abreast: int = 1  # single rows that an iteration of the row loop takes, each a tile of its own

    def __post_init__(self) -> None:
        odd = [n for n in (self.row_tile, *self.pieces, self.col_block or 1) if n & (n - 1) or n < 1]
        if odd:
            raise VerifyError(f"{self.title}: tile sizes {odd} are not powers of two")
        if self.rows_per_chunk % self.row_tile:
            raise VerifyError(f"{self.title}: chunks of {self.rows_per_chunk} rows cut tiles of {self.row_tile} rows")
        single = self.row_tile == 1 and not self.col_block
        if self.abreast != 1 and not (single and can_stand_abreast(self.loop, self.rows_per_chunk, self.abreast)):
            raise VerifyError(
                f"{self.title}: {self.abreast} rows abreast are not single, all in one chunk and along one axis"
            )

    @property
    def loop_size(self) -> int:
        """Number of loop rows."""
        return math.prod(a.size for a in self.loop)

    @property
    def num_cols(self) -> int:
        """Number of columns."""
        return math.prod(a.size for a in self.cols)

    @property
    def num_chunks(self) -> int:
        """Chunks into which the loop rows are cut."""
        rows = self.rows_per_chunk
        return ceil_div(self.loop_size, rows) if may_exceed(self.loop_size, rows) else 1

    @property
    def programs(self) -> int:
        """Programs that differ in their rows."""
        return math.prod(a.size for a in self.fixed) * self.num_chunks

    @property
    def col_blocks(self) -> int:
        """Programs over which the columns are spread."""
        return ceil_div(self.num_cols, self.pieces[0]) if self.col_grid else 1


@dataclass(frozen=True)
class Param:
    """A buffer argument of a kernel. ``shape``/``strides`` are its logical layout, for comments and checks.

    ``written`` is true for outputs. ``wide`` asks for 64-bit offsets (2**31 or more elements may be spanned).
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    written: bool
    wide: bool = False


@dataclass(frozen=True)
class TileProgram:
    """One kernel, ready to print.

    ``apart``: its phases have programs of their own; none reads another's results. ``last_first``: program 0 has the
    last rows.
    """

    name: str
    doc: tuple[str, ...]
    params: tuple[Param, ...]
    phases: tuple[Phase, ...]
    num_warps: int
    num_stages: int = 1
    apart: bool = False
    last_first: bool = False

    @property
    def programs(self) -> int:
        """Programs that differ in their rows."""
        return self.phases[0].programs

    @property
    def parts(self) -> tuple[TileProgram, ...]:
        """What the phases that stand apart are as kernels of their own; otherwise the program itself."""
        return tuple(replace(self, phases=(p,), apart=False) for p in self.phases) if self.apart else (self,)

    @property
    def one_grid_axis(self) -> bool:
        """The column blocks are counted by program id 0 too."""
        blocks = self.phases[0].col_blocks
        return is_open(blocks) or blocks > MOST_BLOCKS

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of programs along the two grid axes."""
        if self.apart:
            return (sum(p.programs * p.col_blocks for p in self.phases), 1)
        blocks = self.phases[0].col_blocks
        return (self.programs * blocks, 1) if self.one_grid_axis else (self.programs, blocks)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The open sizes, by name."""
        return open_dims((self.params, [(p.fixed, p.loop, p.cols, p.rows_per_chunk, p.passes) for p in self.phases]))
