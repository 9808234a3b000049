"""The dot tile program: ``[P, M, K] x [P, K, N] -> [P, M, N]``, and what is done with each tile of the product.

The programs of the grid are *persistent*: program ``i`` works on output tiles ``i``, ``i + programs``, ... Tiles of one
problem are ordered in groups of ``group`` tile rows, column by column within a group, so that programs that run at the
same time read the same rows and columns of the operands from cache.

The *epilogue* is an ordinary phase: its fixed axes make up P, its loop axes M (``row_tile`` rows are a tile) and its
columns N (``pieces[0]`` columns at a time; the tile has ``parts`` such pieces, each of which is finished before the
next, so that few registers are needed). Its statements find the product under the name ``acc``, in fp32, not rounded.

With ``splits`` above 1 K is cut into that many parts, which are problems of their own: the slowest of the fixed axes is
the part, and the epilogue stores sums over one part each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megafuse.codegen.program import Param, Phase
from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError
from megafuse.core.sizes import Dim, ceil_div, open_dims

PRODUCT = "acc"  # the product's name in the epilogue


@dataclass(frozen=True)
class Matrices:
    """An operand as it lies in memory: element ``[p, i, j]`` is at ``offset + p * s0 + i * s1 + j * s2``."""

    buffer: str
    strides: tuple[int, int, int]
    offset: int = 0


@dataclass(frozen=True)
class DotProgram:
    """One kernel that multiplies, ready to print.

    ``a`` holds ``[P, M, K]``, ``b`` ``[P, K, N]``; ``inner`` is K, walked ``block_k`` at a time. ``tf32``: fp32
    operands are rounded to TF32. ``descriptors``: the target has a tensor copy engine; printers use it for what lies as
    that engine needs it.
    """

    name: str
    doc: tuple[str, ...]
    params: tuple[Param, ...]
    a: Matrices
    b: Matrices
    inner: int
    block_k: int
    parts: int
    epilogue: Phase
    programs: int
    num_warps: int
    num_stages: int
    group: int = 8
    tf32: bool = False
    descriptors: bool = False
    splits: int = 1

    def __post_init__(self) -> None:
        phase = self.epilogue
        if not phase.col_grid or len(phase.passes) != 1 or phase.rows_per_chunk != phase.row_tile:
            raise VerifyError(f"{self.name}: the epilogue of a dot holds one tile of rows and of columns")
        sizes = (phase.row_tile, self.block_n, self.block_k, self.parts)
        if any(n & (n - 1) for n in sizes) or min(sizes[:3]) < 16:
            raise VerifyError(f"{self.name}: tile {sizes} is not of powers of two from 16 on")
        if len({self.operand_dtype, self.param(self.b.buffer).dtype}) != 1:
            raise VerifyError(f"{self.name}: the operands of a dot differ in type")
        if self.problems % self.splits or (self.splits - 1) * self.span >= self.inner:
            raise VerifyError(f"{self.name}: {self.splits} parts of K={self.inner} are not parts of its problems")

    def param(self, buffer: str) -> Param:
        """The parameter of that name."""
        return next(p for p in self.params if p.name == buffer)

    @property
    def operand_dtype(self) -> DType:
        """Element type of both operands."""
        return self.param(self.a.buffer).dtype

    @property
    def problems(self) -> int:
        """P, times the parts of K."""
        return math.prod(axis.size for axis in self.epilogue.fixed)

    @property
    def matrices(self) -> int:
        """P."""
        return self.problems // self.splits

    @property
    def span(self) -> int:
        """Length of a part of K, in whole blocks; the last one may reach past the end."""
        return ceil_div(ceil_div(self.inner, self.splits), self.block_k) * self.block_k

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return self.epilogue.row_tile

    @property
    def block_n(self) -> int:
        """Columns of a tile."""
        return self.epilogue.pieces[0] * self.parts

    @property
    def tile_rows(self) -> int:
        """Tiles along M."""
        return ceil_div(self.epilogue.loop_size, self.block_m)

    @property
    def tile_cols(self) -> int:
        """Tiles along N."""
        return ceil_div(self.epilogue.num_cols, self.block_n)

    @property
    def tiles(self) -> int:
        """All output tiles."""
        return self.problems * self.tile_rows * self.tile_cols

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of programs along the two grid axes."""
        return (min(self.programs, self.tiles), 1)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The open sizes: none, since tiles are chosen for the exact shape."""
        return open_dims((self.params, self.inner, self.epilogue.fixed, self.epilogue.loop, self.epilogue.cols))
