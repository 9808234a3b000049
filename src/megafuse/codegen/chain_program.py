"""The chain program: dots that share one row axis, and the phases between them, for one tile of rows after the other.

Each program walks ``rows_per_chunk`` rows, ``row_tile`` at a time. For each row tile the *stages* run in order:

* a ``Phase`` computes values of the tile from memory and from what earlier stages made (names are those of the whole
  program); all phases have the same loop rows;
* a ``Product`` multiplies a value ``[rows, K]`` by a matrix ``[K, N]`` that is the same for all rows of a problem;
* a ``RowSums`` adds ``left^T @ right`` (``[K, rows] x [rows, N]``) to fp32 sums, which each program stores when it has
  walked its rows: one part per chunk.

Where the phases have fixed axes, the same ones in number, these are the *problems*: each has the loop rows and a matrix
of its own, and its chunks are programs of their own.

Columns beyond a value's width may hold anything: printers clear them where a product would read them. So do rows beyond
the last, where they are summed over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megafuse.codegen.dot_program import Matrices
from megafuse.codegen.program import Param, Phase, TileProgram
from megafuse.codegen.walk import reads, statements
from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError
from megafuse.core.sizes import Dim, open_dims
from megafuse.ir.chain import Held, held_block

FLAT_WARPS = 16  # whose registers hold most of a matrix


@dataclass(frozen=True)
class Product:
    """``dst = a @ matrix`` in fp32 (fp64 of fp64), not rounded. ``matrix`` holds ``[problems, inner, cols]``.

    ``dtype``: of both operands.

    With one column, ``dst`` is a value of each row.
    """

    dst: str
    a: str
    matrix: Matrices
    inner: int
    cols: int
    dtype: DType

    @property
    def held(self) -> tuple[Held, bool]:
        """The block of the matrix, and whether it is the other way round."""
        return held_block(self.matrix.buffer, self.matrix.offset, (self.inner, self.cols), self.matrix.strides)


@dataclass(frozen=True)
class RowSums:
    """``acc += left^T @ right``; in the end ``acc`` is stored to ``target``: ``[chunks * problems, rows, cols]``.

    In fp32, or fp64 of fp64.
    """

    acc: str
    left: str
    right: str
    rows: int
    cols: int
    target: Matrices
    dtype: DType


Stage = Phase | Product | RowSums


@dataclass(frozen=True)
class ChainProgram:
    """One kernel, ready to print. ``held``: matrices are loaded before the walk over the rows, else in each step of it.

    ``turned``: printers that hold tiles as blocks make them ``[columns, rows]``. ``early``: they load the rows of the
    next tile while they work on the present one. ``first``: matrices that programs of one tile load, with the rows up
    to their products, before they work. ``shares``: programs that run the stages of the same chunk, which is one row
    tile; each stores some of the ``RowSums``, in order, and the last stores what phases store. ``tf32``: fp32 operands
    are rounded to TF32; else they are multiplied as they are. ``last_first``: programs walk from the last
    of their rows to the first.
    """

    name: str
    doc: tuple[str, ...]
    params: tuple[Param, ...]
    stages: tuple[Stage, ...]
    num_warps: int
    num_stages: int = 1
    held: bool = True
    turned: bool = False
    early: bool = False
    first: int = 0
    shares: int = 1
    tf32: bool = False
    last_first: bool = False

    def __post_init__(self) -> None:
        first = self.phases[0]
        for phase in self.phases:
            if _walked(phase) != _walked(first):
                raise VerifyError(f"{self.name}: phase {phase.title!r} does not walk the rows of the first phase")
            if phase.col_block or phase.col_grid or len(phase.passes) != 1 or len(phase.pieces) != 1:
                raise VerifyError(f"{self.name}: phase {phase.title!r} does not hold its columns in one piece")
        if self.shares > 1 and first.rows_per_chunk != first.row_tile:
            raise VerifyError(f"{self.name}: programs that walk several row tiles share none")
        if self.last_first and self.early:
            raise VerifyError(f"{self.name}: rows are loaded ahead of a walk from the first row to the last")
        self._check_names()

    def _check_names(self) -> None:
        """Every value is made once, before it is read."""
        made: set[str] = set()

        def use(*names: str) -> None:
            missing = [n for n in names if n not in made]
            if missing:
                raise VerifyError(f"{self.name}: {missing} are read before they are made")

        def make(name: str) -> None:
            if name in made:
                raise VerifyError(f"{self.name}: {name!r} is made twice")
            made.add(name)

        for stage in self.stages:
            if isinstance(stage, Product):
                use(stage.a)
                make(stage.dst)
            elif isinstance(stage, RowSums):
                use(stage.left, stage.right)
                make(stage.acc)
            else:
                for statement in statements(stage):
                    use(*reads(statement))
                    dst = getattr(statement, "dst", None) or getattr(statement, "acc", None)
                    if dst is not None:
                        make(dst)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases among the stages."""
        return tuple(s for s in self.stages if isinstance(s, Phase))

    @property
    def row_tile(self) -> int:
        """Rows of a tile."""
        return self.phases[0].row_tile

    @property
    def chunks(self) -> int:
        """Programs of each problem."""
        return self.phases[0].num_chunks

    @property
    def problems(self) -> int:
        """How many there are."""
        return math.prod(axis.size for axis in self.phases[0].fixed)

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of programs along the two grid axes."""
        return (self.problems * self.chunks, self.shares)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The open sizes."""
        return open_dims((self.params, [(p.fixed, p.loop, p.cols, p.rows_per_chunk, p.passes) for p in self.phases]))

    @property
    def inner(self) -> dict[str, int]:
        """Over how many numbers each matrix is summed, by buffer."""
        return {s.matrix.buffer: s.inner for s in self.stages if isinstance(s, Product)}

    @property
    def shell(self) -> TileProgram:
        """The phases as a tile program, for what depends on rows and parameters alone."""
        return TileProgram(self.name, self.doc, self.params, self.phases, self.num_warps, self.num_stages)

    def read_beside(self, phase: Phase) -> set[str]:
        """Values that stages other than ``phase`` read."""
        found: set[str] = set()
        for stage in self.stages:
            if isinstance(stage, Product):
                found.add(stage.a)
            elif isinstance(stage, RowSums):
                found |= {stage.left, stage.right}
            elif stage is not phase:
                found.update(name for statement in statements(stage) for name in reads(statement))
        return found

    def param(self, buffer: str) -> Param:
        """The parameter of that name."""
        return next(p for p in self.params if p.name == buffer)


def _walked(phase: Phase) -> tuple[int, ...]:
    """What all phases have in common."""
    return (math.prod(axis.size for axis in phase.fixed), phase.loop_size, phase.row_tile, phase.rows_per_chunk)


def flat_chain(program: ChainProgram) -> ChainProgram:
    """The same chunks walked row by row, for types that matrix units do not take; slow."""
    stages = tuple(replace(s, row_tile=1) if isinstance(s, Phase) else s for s in program.stages)
    return replace(
        program,
        stages=stages,
        num_warps=FLAT_WARPS,
        num_stages=1,
        held=False,
        turned=False,
        early=False,
        first=0,
        shares=1,
        tf32=False,
        last_first=False,
    )


def sum_type(dtype: DType) -> DType:
    """In which products of ``dtype`` are added up."""
    return DType.F64 if dtype is DType.F64 else DType.F32
