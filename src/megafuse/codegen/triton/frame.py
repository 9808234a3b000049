"""Index variables and masks of one phase, and the text of the addresses made from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megafuse.codegen.affine import Run, needed, runs
from megafuse.codegen.names import Namer
from megafuse.codegen.program import Affine, Axis, ColReduce, Guard, Level, Phase, TileProgram
from megafuse.codegen.walk import affines, axis_sizes, has_cols, has_rows, join_levels, statements
from megafuse.codegen.writer import join_tests
from megafuse.core.sizes import divides, huge, is_open, may_exceed

# ptxas 12.8 and 12.9 (Triton 3.4 to 3.9) lose constants of packed 16-bit additions: triton-lang/triton#11581
ZERO = "tl.program_id(2) * 16384  # 0; not known to be, so indices are not narrowed to 16 bits (a ptxas fault)"
NARROW = 2**30  # a term below this stays in 32 bits even where the sum of a wide buffer's terms does not


@dataclass(frozen=True)
class Piece:
    """A power-of-two run of columns: its first column, its width, and whether it reaches past the last column."""

    start: int
    width: int
    padded: bool


@dataclass(frozen=True)
class Definition:
    """An index variable to define: ``name = text``."""

    name: str
    text: str


def pieces_of(phase: Phase) -> list[Piece]:
    """The pieces in which the tile holds its columns; one when they are walked or spread over the grid."""
    if phase.col_block or phase.col_grid:
        width = phase.col_block or phase.pieces[0]
        return [Piece(0, width, not divides(width, phase.num_cols))]
    found, start = [], 0
    for width in phase.pieces:
        found.append(Piece(start, width, start + width > phase.num_cols))
        start += width
    return found


def _cut(flat: str, run: Run, zero: str) -> str:
    """Text of a run's index from the flattened index, plus ``zero`` where there is one."""
    flat = f"({flat} + {zero})" if zero and not _is_mask(run) else flat
    text = f"{flat} // {run.below}" if run.below != 1 else flat
    return f"{text} % {run.size}" if run.first else text


def _is_mask(run: Run) -> bool:
    """True when the run is cut out by shifts and masks alone."""
    return all(not is_open(n) and n & (n - 1) == 0 for n in (run.below, run.size if run.first else 1))


class RunNames:
    """Variables for the runs of one flattened index (program id, rows or columns) that a program uses.

    ``zero`` names the hidden zero that indices which are cut need, or is empty.
    """

    def __init__(
        self, axes: Sequence[Axis], flat: tuple[str, ...], uses: Iterable[Affine], namer: Namer, zero: str = ""
    ) -> None:
        self.axes, self.flat, self.zero = tuple(axes), flat, zero
        self._names: dict[tuple[int, int], tuple[str, ...]] = {}
        self._runs: dict[tuple[int, int], Run] = {}
        for affine in uses:
            for run in runs(affine, axes):
                self._add(run, namer)

    def _add(self, run: Run, namer: Namer) -> None:
        key = (run.first, run.last)
        if key in self._names:
            return
        self._runs[key] = run
        whole = run.first == 0 and run.below == 1
        wish = "_".join(axis.name for axis in self.axes[run.first : run.last + 1] if axis.size != 1)
        self._names[key] = self.flat if whole else namer.claim(wish, len(self.flat))

    def definitions(self, copy: int = 0) -> list[Definition]:
        """Definitions of all run variables, for one copy of the flattened index."""
        order = sorted(self._names, key=lambda key: (key[0], -key[1]))
        flat = self.flat[copy]
        return [
            Definition(self._names[key][copy], _cut(flat, self._runs[key], self.zero))
            for key in order
            if self._names[key] is not self.flat
        ]

    def terms(self, affine: Affine, copy: int, wide: bool) -> list[str]:
        """The summands of ``affine`` over these axes."""
        found = []
        for run in runs(affine, self.axes):
            name = self._names[run.first, run.last][copy]
            big = wide and may_exceed(abs(run.stride) * run.size, NARROW - 1)
            name = f"{name}.to(tl.int64)" if big else name
            found.append(name if run.stride == 1 else f"{name} * {run.stride}")
        return found


@dataclass(frozen=True)
class GridNames:
    """Variables that program id 0 is cut into: flattened fixed axes and the chunk. ``column``: the column block."""

    fixed: str
    chunk: str
    column: str
    definitions: tuple[Definition, ...]


def grid_names(program: TileProgram, namer: Namer, own: str = "") -> GridNames:
    """How the program ids are used. Those that make indices of 2**31 and more are 64-bit numbers.

    ``own``: what numbers the programs, column blocks included, where program id 0 does not.
    """
    first = program.phases[0]
    rows = ".to(tl.int64)" * any(huge(phase.loop_size) for phase in program.phases)
    cols = ".to(tl.int64)" * any(huge(phase.num_cols) for phase in program.phases)
    pid, chunk = namer.one("pid"), namer.one("chunk")
    real = [axis.name for axis in first.fixed if axis.size != 1]
    fixed = namer.one(real[0] if len(real) == 1 else "fixed")
    if program.last_first:
        own = "tl.num_programs(0) - 1 - tl.program_id(0)"
    whole = own if own.isidentifier() else f"({own})" if own else "tl.program_id(0)"
    source, column = f"{whole}{rows}" if rows else own or whole, f"tl.program_id(1){cols}"
    if program.one_grid_axis or (own and first.col_grid):
        source, column = f"{whole} // {first.col_blocks}", f"({whole} % {first.col_blocks}){cols}"
        source = f"({source}){rows}" if rows else source
    if (chunks := first.num_chunks) == 1:
        return GridNames(fixed, chunk, column, (Definition(fixed, source),))
    if not real:
        return GridNames(fixed, chunk, column, (Definition(chunk, source),))
    cut = (Definition(chunk, f"{pid} % {chunks}"), Definition(fixed, f"{pid} // {chunks}"))
    return GridNames(fixed, chunk, column, (Definition(pid, source), *cut))


class Frame:
    """Everything that turns an ``Affine`` of a phase into text.

    Tiles are blocks ``[rows, columns]``, or ``[columns, rows]`` where they are ``turned``. Those of a single row are
    ``flat``: blocks ``[columns]``, whose row values are scalars. Triton then gives all loads of a row one layout, where
    it would exchange ``[1, columns]`` between threads.
    """

    def __init__(
        self,
        program: TileProgram,
        phase: Phase,
        fixed: RunNames,
        grid: GridNames,
        zero: str,
        namer: Namer,
        turned: bool = False,
        ragged: bool | None = None,
    ) -> None:
        """``turned``: tiles are columns by rows. ``ragged``: their rows may be beyond the last; None: as walked."""
        self.phase, self.fixed, self.chunk, self.col_program = phase, fixed, grid.chunk, grid.column
        self.chunks = program.phases[0].num_chunks
        self.chunk_rows = phase.rows_per_chunk if self.chunks != 1 else phase.loop_size
        self.params = {param.name: param for param in program.params}
        self.pieces = pieces_of(phase)
        self.flat = phase.row_tile == 1
        self.threads = 32 * program.num_warps
        self.row_axis, self.col_axis = (1, 0) if turned else (0, 1)
        self.sizes = axis_sizes(phase)
        whole_tiles = divides(phase.row_tile, self.chunk_rows)
        beyond = not whole_tiles or self.chunks * self.chunk_rows != phase.loop_size
        self.ragged = beyond if ragged is None else ragged
        sums = any(isinstance(s, ColReduce) for s in statements(phase))
        self.looped = may_exceed(self.chunk_rows, phase.row_tile * (1 if sums else phase.abreast))
        self.row, self.row_mask = namer.one("row"), namer.one("row_mask")
        self.first_row, self.first_col = namer.one("first_row"), namer.one("first_col")
        self.cols = namer.claim("col", len(self.pieces))
        self.col_masks = namer.claim("col_mask", len(self.pieces))
        uses = [affine for statement in statements(phase) for affine in affines(statement)]
        self.owner = ""  # the test for the program that stores what several make
        self.row_runs = RunNames(phase.loop, (self.row,), uses, namer, zero)
        self.col_runs = RunNames(phase.cols, self.cols, uses, namer, zero)

    def row_definitions(self, first: str) -> list[Definition]:
        """The row index of a tile that starts at row ``first`` of the chunk, its mask and its axes."""
        phase, rows = self.phase, self.chunk_rows
        start = [f"{self.chunk} * {rows}" if rows > 1 else self.chunk] if self.chunks != 1 else []
        own_rows = [] if self.flat else [f"tl.arange(0, {phase.row_tile}){self.along(self.row_axis)}"]
        index = join_sum([*start, *([first] if first else []), *own_rows]) or "0"
        own = [Definition(self.row, index), Definition(self.row_mask, f"{self.row} < {phase.loop_size!r}")]
        return own + self.row_runs.definitions()

    def col_definitions(self, first: str) -> list[Definition]:
        """The column indices of each piece (which start at column ``first``), their masks and their axes."""
        found = []
        for at, piece in enumerate(self.pieces):
            start = [first] if first else [str(piece.start)] if piece.start else []
            index = join_sum([*start, f"tl.arange(0, {piece.width}){self.along(self.col_axis)}"])
            found.append(Definition(self.cols[at], index))
            found.append(Definition(self.col_masks[at], f"{self.cols[at]} < {self.phase.num_cols!r}"))
            found += self.col_runs.definitions(at)
        return found

    def along(self, axis: int) -> str:
        """What makes a vector vary along ``axis`` of a tile."""
        return "" if self.flat else ("[:, None]", "[None, :]")[axis]

    def block(self, rows: int, cols: int) -> str:
        """The shape of a tile of ``rows`` by ``cols``."""
        if self.flat:
            return f"[{cols}]"
        return f"[{cols}, {rows}]" if self.row_axis else f"[{rows}, {cols}]"

    def shape(self, level: Level, piece: int) -> str:
        """The block shape of a value of ``level`` in column piece ``piece``."""
        if level is Level.SCALAR or (self.flat and level is Level.ROW):
            return "()"
        rows = self.phase.row_tile if has_rows(level) else 1
        return self.block(rows, self.pieces[piece].width if self.flat or has_cols(level) else 1)

    def terms(self, affine: Affine, piece: int, wide: bool = False) -> list[str]:
        """The summands of ``affine``, the slowest-varying first; constants come last."""
        found = self.fixed.terms(affine, 0, wide)
        chunk = sum(stride for name, stride in affine.terms if name == "chunk") if self.chunks != 1 else 0
        if chunk:
            big = wide and may_exceed(chunk * self.chunks, NARROW - 1)
            found.append(f"{self.chunk}{'.to(tl.int64)' if big else ''}" + (f" * {chunk}" if chunk != 1 else ""))
        found += self.row_runs.terms(affine, 0, wide) + self.col_runs.terms(affine, piece, wide)
        return found + ([str(affine.const)] if affine.const else [])

    def covers(self, affine: Affine, level: Level, piece: int = 0) -> bool:
        """Whether ``affine`` has the block shape of ``level``; directions of one element are never missing."""
        rows, cols = bool(runs(affine, self.phase.loop)), bool(runs(affine, self.phase.cols))
        narrow = self.pieces[piece].width == 1
        tall = rows or not has_rows(level) or self.flat
        broad = cols or not has_cols(level) or (rows and narrow and not self.flat)
        return level is Level.SCALAR or (tall and broad)

    def reach(self, affine: Affine, level: Level) -> Level:
        """``level``, widened by the directions that ``affine`` varies in."""
        return join_levels(level, bool(runs(affine, self.phase.loop)), bool(runs(affine, self.phase.cols)))

    def fit(self, text: str, covered: bool, level: Level, piece: int) -> str:
        """``text`` broadcast to the block shape of ``level`` unless it has that shape."""
        shape = self.shape(level, piece)
        return text if covered or shape == "()" else f"tl.broadcast_to({text}, {shape})"

    def pointer(self, buffer: str, affine: Affine, level: Level, piece: int) -> str:
        """The address (block) of ``buffer[affine]``."""
        terms = self.terms(affine, piece, self.params[buffer].wide)
        return self.fit(join_sum([f"{buffer_name(buffer)}", *terms]), self.covers(affine, level, piece), level, piece)

    def guard_tests(self, guards: Sequence[Guard], piece: int) -> list[str]:
        """The comparisons of ``guards`` that can fail."""
        found = []
        for guard in guards:
            low, high = needed(guard, self.sizes)
            const = guard.index.const
            index = join_sum(self.terms(Affine(guard.index.terms), piece)) or "0"
            found += [f"{index} >= {guard.lo - const}"] * low + [f"{index} < {guard.hi - const}"] * high
        return found

    def mask(self, level: Level, guards: Sequence[Guard], piece: int, tests: Sequence[str] = ()) -> str:
        """The mask of an access: rows, columns and guards that can fail, and more tests; empty where none can."""
        parts = [self.row_mask] * (has_rows(level) and self.ragged)
        parts += [self.col_masks[piece]] * (has_cols(level) and self.pieces[piece].padded)
        return join_tests([*parts, *self.guard_tests(guards, piece), *tests])


def buffer_name(param: str) -> str:
    """The pointer argument of a buffer."""
    return f"{param}_ptr"


def join_sum(terms: Sequence[str]) -> str:
    """``a + b - c``: terms joined by their signs."""
    text = "".join(f" - {term[1:]}" if term.startswith("-") else f" + {term}" for term in terms)
    return text[3:] if text.startswith(" + ") else f"-{text[3:]}" if text else ""
