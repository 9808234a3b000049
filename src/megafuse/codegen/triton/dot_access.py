"""How a dot kernel reads and writes matrices: through tensor descriptors, or through pointers with masks."""

from __future__ import annotations

from dataclasses import dataclass

from megafuse.codegen.affine import runs
from megafuse.codegen.dot_program import DotProgram, Matrices
from megafuse.codegen.names import Namer
from megafuse.codegen.program import Affine, Level, Load, Store
from megafuse.codegen.triton.frame import Definition, buffer_name, join_sum
from megafuse.codegen.triton.statements import Body
from megafuse.codegen.triton.values import convert
from megafuse.codegen.writer import Writer, join_tests
from megafuse.core.dtypes import DType

ALIGNED = 16  # bytes: addresses and strides of descriptors are multiples, and a block's contiguous side is no shorter


@dataclass(frozen=True)
class Place:
    """Variables that say where a tile lies: its problem, tile row and tile column, and the first k of a block.

    ``matrix``: the problem without the part of K.
    """

    problem: str
    matrix: str
    pid_m: str
    pid_n: str
    k: str


@dataclass(frozen=True)
class Operand:
    """Definitions before the loop over K and inside it, and the block's text in ``tl.dot``."""

    before: tuple[Definition, ...]
    inside: tuple[Definition, ...]
    value: str


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor: its variable, what blocks it moves, and whether its last two dims are columns, rows."""

    name: str
    blocks: tuple[int, int]
    problem: str  # text of its first index, empty where the matrices of all problems are one
    transposed: bool

    def at(self, start: tuple[str, str]) -> str:
        """The list of indices of the block that starts at this row and column."""
        first = [self.problem] if self.problem else []
        return f"[{', '.join([*first, *(start[::-1] if self.transposed else start)])}]"

    def load(self, start: tuple[str, str]) -> str:
        """The block as the descriptor's own dims have it (columns first where transposed)."""
        shape = self.blocks[::-1] if self.transposed else self.blocks
        return f"{self.name}.load({self.at(start)})" + f".reshape({shape[0]}, {shape[1]})" * bool(self.problem)

    def stored(self, text: str) -> str:
        """``text``, a block of rows and columns, as ``store`` takes it."""
        shape = self.blocks[::-1] if self.transposed else self.blocks
        text = f"{text}.T" if self.transposed else text
        return f"{text}.reshape(1, {shape[0]}, {shape[1]})" if self.problem else text


class Accesses:
    """Makes the accesses of one kernel. ``head`` holds the descriptors, ``described`` the buffers that they touch."""

    def __init__(self, program: DotProgram, place: Place, zero: str, namer: Namer) -> None:
        self.zero = zero  # hides small ranges of indices that are compared
        self.program, self.phase, self.place, self.namer = program, program.epilogue, place, namer
        self.head = Writer(1)
        self.described: set[str] = set()
        self._known: dict[tuple[object, ...], Descriptor] = {}

    def operand(self, operand: Matrices, rows: bool) -> Operand:
        """How the loop over K gets its block of ``[block_m, block_k]`` (``rows``), or of ``[block_k, block_n]``."""
        p, place = self.program, self.place
        size, block = (self.phase.loop_size, p.block_m) if rows else (self.phase.num_cols, p.block_n)
        first = f"{place.pid_m if rows else place.pid_n} * {block}"
        shape, blocks, start = (size, p.inner), (block, p.block_k), (first, place.k)
        if not rows:
            shape, blocks, start = shape[::-1], blocks[::-1], start[::-1]
        letter = "a" if rows else "b"
        name = self.namer.one(letter)
        found = self._descriptor(f"{letter}_desc", operand, shape, blocks, (place.matrix, p.matrices))
        if found is None:
            return self._pointed(operand, name, first, rows)
        return Operand((), (Definition(name, found.load(start)),), f"{name}.T" if found.transposed else name)

    def _pointed(self, operand: Matrices, name: str, first: str, rows: bool) -> Operand:
        """An operand's block through pointers; what lies outside counts as 0."""
        p = self.program
        wide = ".to(tl.int64)" * p.param(operand.buffer).wide
        size, block = (self.phase.loop_size, p.block_m) if rows else (self.phase.num_cols, p.block_n)
        outer, depth = self.namer.one("offs_m" if rows else "offs_n"), self.namer.one(f"offs_k_{name}")
        spread = ("[:, None]", "[None, :]") if rows else ("[None, :]", "[:, None]")
        steps = operand.strides[1:] if rows else operand.strides[:0:-1]
        terms = [_times(f"{self.place.matrix}{wide}", operand.strides[0])] if p.matrices != 1 else []
        terms += [_times(f"{outer}{wide}", steps[0]), _times(f"{depth}{wide}", steps[1]), str(operand.offset or "")]
        pointer = join_sum([buffer_name(operand.buffer), *filter(None, terms)])
        if 0 in steps:
            pointer = f"tl.broadcast_to({pointer}, [{block if rows else p.block_k}, {p.block_k if rows else block}])"
        tail = bool(p.inner % p.block_k) or p.span * p.splits != p.inner
        masks = [f"{outer} < {size!r}"] * bool(size % block) + [f"{depth} < {p.inner!r}"] * tail
        hidden = f"{self.zero} + " * tail
        masked = f", mask={join_tests(masks)}, other=0.0" if masks else ""
        return Operand(
            (Definition(outer, f"({first} + tl.arange(0, {block})){spread[0]}"),),
            (
                Definition(depth, f"({self.place.k} + {hidden}tl.arange(0, {p.block_k})){spread[1]}"),
                Definition(name, f"tl.load({pointer}{masked})"),
            ),
            name,
        )

    def access(self, body: Body, node: Load | Store, part: int) -> bool:
        """Write an access of a whole tile of the epilogue through a descriptor; false where there is none for it."""
        phase, strides = self.phase, self._strides(node.index)
        dtype = self.program.param(node.buffer).dtype
        literal = isinstance(node, Store) and not isinstance(node.src, str)
        by_index = isinstance(node, Load) and node.lookups
        if by_index or node.level is not Level.TILE or node.guards or strides is None or literal or dtype is DType.BOOL:
            return False
        shape, blocks = (phase.loop_size, phase.num_cols), (phase.row_tile, phase.pieces[0])
        matrices = Matrices(node.buffer, strides, node.index.const)
        found = self._descriptor(
            f"{node.buffer}_desc", matrices, shape, blocks, (self.place.problem, self.program.problems)
        )
        if found is None:
            return False
        start = (f"{self.place.pid_m} * {phase.row_tile}", self.first_column(part))
        if isinstance(node, Load):
            turn = ".T" * found.transposed
            body.writer.assign(body.define(node.dst, Level.TILE, node.dtype).names[0], f"{found.load(start)}{turn}")
            return True
        value = body.values[str(node.src)]
        text = convert(value.names[0], value.dtype, dtype)
        text = text if value.level is Level.TILE else f"tl.broadcast_to({text}, [{blocks[0]}, {blocks[1]}])"
        body.writer.call(f"{found.name}.store(", [found.at(start), found.stored(text)])
        return True

    def first_column(self, part: int) -> str:
        """The first column of a piece of the tile."""
        start = part * self.phase.pieces[0]
        return join_sum([f"{self.place.pid_n} * {self.program.block_n}", *([str(start)] * bool(start))])

    def _descriptor(
        self, wish: str, matrices: Matrices, shape: tuple[int, int], blocks: tuple[int, int], problems: tuple[str, int]
    ) -> Descriptor | None:
        """The descriptor of ``[P, *shape]`` matrices, made before the walk; None where there can be none.

        ``problems``: the variable that numbers the matrices, and how many there are.
        """
        problem, row, col = matrices.strides
        transposed = col != 1
        inner, outer = (row, col) if transposed else (col, row)
        size = self.program.param(matrices.buffer).dtype.size
        batched = problem != 0 and problems[1] != 1
        steps = (outer, matrices.offset, problem * batched)
        run = blocks[0 if transposed else 1] * size
        bad = inner != 1 or outer <= 0 or any(s < 0 or s * size % ALIGNED for s in steps) or run < ALIGNED
        if bad or not self.program.descriptors:
            return None
        key = (matrices, blocks, problems)
        if key not in self._known:
            index = problems[0] if batched else ""
            found = self._known[key] = Descriptor(self.namer.one(wish), blocks, index, transposed)
            self.described.add(matrices.buffer)
            lead = ((problems[1], problem, 1),) if batched else ()
            sides = [(shape[0], row, blocks[0]), (shape[1], col, blocks[1])]
            self._make(found.name, matrices, [*lead, *(sides[::-1] if transposed else sides)])
        return self._known[key]

    def _make(self, name: str, matrices: Matrices, dims: list[tuple[int, int, int]]) -> None:
        """Write a descriptor: sizes, strides and block of each dim."""
        base = join_sum([buffer_name(matrices.buffer), *([str(matrices.offset)] * bool(matrices.offset))])
        sizes, strides, block = ([dim[n] for dim in dims] for n in range(3))
        args = [base, f"shape={sizes}", f"strides={strides}", f"block_shape={block}"]
        self.head.call(f"{name} = tl.make_tensor_descriptor(", args)

    def _strides(self, index: Affine) -> tuple[int, int, int] | None:
        """Strides of problem, row and column where one stride walks each of them."""
        found = []
        for axes, needed in ((self.phase.fixed, False), (self.phase.loop, True), (self.phase.cols, True)):
            parts = runs(index, axes)
            if len(parts) != (1 if parts or needed else 0) or any(r.first or r.below != 1 for r in parts):
                return None
            found.append(parts[0].stride if parts else 0)
        return found[0], found[1], found[2]


def _times(text: str, factor: int) -> str:
    return "" if factor == 0 else text if factor == 1 else f"{text} * {factor}"
