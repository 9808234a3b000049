"""Matrices of a chain as blocks in Triton: where they are, their masks, and their loads."""

from __future__ import annotations

from megafuse.codegen.chain_program import ChainProgram, Product
from megafuse.codegen.dot_program import Matrices
from megafuse.codegen.names import Namer
from megafuse.codegen.triton.frame import GridNames, buffer_name, join_sum
from megafuse.codegen.writer import Writer, join_tests
from megafuse.ir.chain import Held, block


class Blocks:
    """The matrices of one kernel. ``edges``: the names of the numbers along the edge of a block, by its size."""

    def __init__(self, program: ChainProgram, namer: Namer, grid: GridNames) -> None:
        self.program, self.namer, self.grid = program, namer, grid
        self.loaded: dict[Held, str] = {}
        self.edges: dict[int, str] = {}

    def matrix(self, stage: Product, loads: Writer) -> str:
        """The block of a matrix; loaded where it was not yet."""
        matrix, (held, turned) = stage.matrix, stage.held
        if held not in self.loaded or not self.program.held:
            name = self.loaded[held] = self.namer.one(matrix.buffer)
            start = self.start_of(matrix, self.grid.fixed) if self.program.problems > 1 else ""
            pointer, mask = self.place(matrix, held.shape, held.steps, start)
            loads.call(f"{name} = tl.load(", [pointer, *([f"mask={mask}", "other=0.0"] if mask else [])])
        return flipped(self.loaded[held]) if turned else self.loaded[held]

    def start_of(self, matrices: Matrices, number: str) -> str:
        """Where the matrix of that number starts."""
        step, wide = matrices.strides[0], self.program.param(matrices.buffer).wide
        return f"{number}{'.to(tl.int64)' * wide} * {step}" if step else ""

    def place(self, matrix: Matrices, shape: tuple[int, int], steps: tuple[int, int], start: str) -> tuple[str, str]:
        """Addresses of a whole matrix, and the mask of what is inside."""
        at = [f"{self.edge(block(shape[0]))}[:, None]", f"{self.edge(block(shape[1]))}[None, :]"]
        terms = [start] * bool(start) + [
            text if step == 1 else f"{text} * {step}" for text, step in zip(at, steps, strict=True)
        ]
        terms += [str(matrix.offset)] * bool(matrix.offset)
        pointer = join_sum([buffer_name(matrix.buffer), *terms])
        mask = [f"{text} < {size}" for text, size in zip(at, shape, strict=True) if size != block(size)]
        return pointer, join_tests(mask)

    def edge(self, size: int) -> str:
        """The numbers along an edge of that size."""
        if size not in self.edges:
            self.edges[size] = self.namer.one(f"offs_{size}")
        return self.edges[size]


def flipped(matrix: str) -> str:
    """The other way round."""
    inner = matrix.removeprefix("tl.trans(")
    return f"tl.trans({matrix})" if inner == matrix else inner[:-1]
