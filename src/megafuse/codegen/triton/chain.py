"""A chain program as a Triton module: matrices and biases first, then a walk over row tiles, then sums over the rows.

Matrices are held where their contiguous side is the last, in blocks of powers of two whose rest is 0; a product with
the transpose reads the same block turned.
"""

from __future__ import annotations

from dataclasses import replace

from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.chain_loads import RowLoad, first_loads, next_rows
from megafuse.codegen.chain_program import ChainProgram, Product, RowSums, sum_type
from megafuse.codegen.names import Namer
from megafuse.codegen.program import ColReduce, Level, Load, Pass, Phase
from megafuse.codegen.source import kernel_source
from megafuse.codegen.triton.chain_blocks import Blocks, flipped
from megafuse.codegen.triton.frame import ZERO, Definition, Frame, RunNames, buffer_name, grid_names
from megafuse.codegen.triton.head import kernel_head
from megafuse.codegen.triton.helpers import imports_of, used_helpers
from megafuse.codegen.triton.loops import define_used, write_group
from megafuse.codegen.triton.narrow import narrow
from megafuse.codegen.triton.packed import pack
from megafuse.codegen.triton.reductions import Running
from megafuse.codegen.triton.statements import Body
from megafuse.codegen.triton.values import TYPES, Value, convert, in_halves
from megafuse.codegen.walk import Noted, affines, has_cols, noted, result_level, statements
from megafuse.codegen.writer import Writer, join_tests
from megafuse.core.dtypes import DType
from megafuse.core.sizes import divides
from megafuse.ir.chain import block

AHEAD = 128  # registers of a thread for matrices that wait for their product, half of it beside sums over rows

_Key = tuple[object, ...]


def print_chain(program: ChainProgram, *, assembly: bool = True) -> KernelSource:
    """``program`` as a Triton module with one kernel. ``assembly=False`` writes it for Triton's interpreter."""
    stages = tuple(_simplified(program, s) if isinstance(s, Phase) else s for s in program.stages)
    kernel = _Printer(replace(program, stages=stages)).run(waits=assembly)
    parts = [*used_helpers(kernel, assembly), kernel]
    return kernel_source(program, "triton", imports_of(parts), parts, waits=assembly)


def _simplified(program: ChainProgram, phase: Phase) -> Phase:
    others = program.read_beside(phase)
    return pack(narrow(phase, program.params, others), others)


class _Shared(Namer):
    """Names of one frame among several, which share the variables of the row where they walk the same rows."""

    def __init__(self, inner: Namer, shared: dict[str, str]) -> None:
        self.inner, self.shared = inner, shared

    def claim(self, wish: str, pieces: int = 1) -> tuple[str, ...]:
        """Claim a name, or take the one that all frames have."""
        if wish in self.shared:
            return (self.shared[wish],)
        return self.inner.claim(wish, pieces)


class _Printer:
    """Writes the kernel of one program."""

    def __init__(self, program: ChainProgram) -> None:
        self.program = program
        self.namer = Namer()
        for param in program.params:
            self.namer.one(buffer_name(param.name))
        self.grid = grid_names(program.shell, self.namer)
        self.zero, self.first = self.namer.one("zero"), self.namer.one("first_row")
        self.share = self.namer.one("share")
        fast = in_halves(program.params)
        self.bodies: dict[_Key, Body] = {}
        values: dict[str, Value] = {}
        self.early: dict[_Key, Body] = {}  # for the rows of the next tile, which may be beyond the last
        shared = {n: self.namer.one(n) for n in ("row", "row_mask")} | {"first_row": self.first}
        ahead = shared | {n: self.namer.one(f"next_{n}") for n in ("row", "row_mask")}
        for key, phase in self._spaces().items():
            frame = self._frame(phase, shared, not divides(phase.row_tile, phase.loop_size))
            cols = {"col": frame.cols[0], "col_mask": frame.col_masks[0]}
            for bodies, one in ((self.bodies, frame), (self.early, self._frame(phase, ahead | cols, True))):
                bodies[key] = Body(Writer(), one, self.namer, fast, pairs=True)
                bodies[key].values = values
        self.values, self.frame = values, next(iter(self.bodies.values())).frame
        self.blocks = Blocks(program, self.namer, self.grid)
        self.running: dict[str, Running] = {}
        self.sums: dict[str, str] = {}
        self.next = next_rows(program) if program.early and self.frame.looped else {}
        self.written: set[str] = set()  # loads that stand before their phase
        self.masked = {  # what is 0 beyond the last row as it was loaded
            s.dst
            for p in program.phases
            for s in statements(p)
            if isinstance(s, Load) and s.level is Level.TILE and not s.other
        }

    def run(self, *, waits: bool) -> str:
        """The kernel's text."""
        writer = Writer()
        with kernel_head(writer, self.program, self._config(), waits=waits):
            self._body(writer)
        return writer.text

    def _config(self) -> str:
        p, first = self.program, self.program.phases[0]
        widths = [f"{s.inner} -> {s.cols}" for s in p.stages if isinstance(s, Product)]
        sums = [f"{s.rows} x {s.cols}" for s in p.stages if isinstance(s, RowSums)]
        text = f"Rows times matrices: {', '.join(widths)}. " * bool(widths)
        text += f"Sums over all rows: {', '.join(sums)}. " * bool(sums)
        walk = f" ({first.rows_per_chunk} a program)" * (first.rows_per_chunk != first.row_tile)
        turned = ", columns first" * p.turned + ", the last rows first" * p.last_first
        shared = f" x {p.shares} programs, each of which stores some sums"
        text += f"{p.grid[0]}{' programs' if p.shares == 1 else shared}; "
        problems = f" of each of {p.problems} problems" * (p.problems > 1)
        text += f"tiles of {first.row_tile} of {first.loop_size} rows{problems}{walk}{turned}; "
        return f"{text}num_warps={p.num_warps}, num_stages={p.num_stages}."

    # --- frames -----------------------------------------------------------------------------------------------------

    def _frame(self, phase: Phase, shared: dict[str, str], ragged: bool) -> Frame:
        p, uses = self.program, [a for s in statements(phase) for a in affines(s)]
        fixed = RunNames(phase.fixed, (self.grid.fixed,), uses, self.namer, self.zero)
        namer = _Shared(self.namer, shared)
        frame = Frame(p.shell, phase, fixed, self.grid, self.zero, namer, turned=p.turned, ragged=ragged)
        frame.owner = self._owned(p.shares - 1)
        return frame

    def _spaces(self) -> dict[_Key, Phase]:
        """For each space of rows and columns one phase with the statements of all that walk it."""
        found: dict[_Key, Phase] = {}
        for phase in self.program.phases:
            key = self._key(phase)
            old = found.get(key)
            body = (*(old.passes[0].body if old else ()), *phase.passes[0].body)
            found[key] = replace(phase, passes=(Pass(body),))
        return found

    @staticmethod
    def _key(phase: Phase) -> _Key:
        return (phase.fixed, phase.loop, phase.cols, phase.pieces)

    # --- parts of the kernel ----------------------------------------------------------------------------------------

    def _body(self, writer: Writer) -> None:
        """What is loaded once, the walk, what is stored once."""
        before, inside, after = writer.part(), Writer(2 if self.frame.looped else 1), writer.part()
        if self.frame.looped:
            self._start(before)
        loads = before if self.program.held and self.frame.looped else inside
        self._load_first(inside)
        sums = products = 0
        for at, stage in enumerate(self.program.stages):
            if isinstance(stage, Phase):
                self._phase(stage, before, inside)
                continue
            self._load_following(products, inside)
            products += 1
            if isinstance(stage, Product):
                self._load_ahead(at, loads)
                self._product(stage, loads, inside)
            else:
                self._step(stage, inside)
                if not self.frame.looped:
                    self._store(stage, inside, self._owned(sums))  # at once, so that few sums are held at a time
                sums += 1
        self._load_following(products, inside)
        self._finish(after)
        texts = before.text + inside.text + after.text
        both = (*self.bodies.values(), *self.early.values())
        columns = list(dict.fromkeys(d for b in both for d in b.frame.col_definitions("")))
        columns += [Definition(name, f"tl.arange(0, {width})") for width, name in self.blocks.edges.items()]
        rows = self._rows(self.bodies, self.first * self.frame.looped)
        start, following = self._rows(self.early, ""), self._rows(self.early, f"{self.first} + {self.program.row_tile}")
        step = self.namer.one("step") if self.program.last_first else self.first
        if self.program.last_first:
            rows = [Definition(self.first, f"{self._end(self.program.row_tile)} - {step}"), *rows]
        head = f"for {step} in {self._range()}:"
        texts += head + str(rows) + str(following)
        own = [Definition(self.zero, ZERO), Definition(self.share, "tl.program_id(1)")]
        own += dict.fromkeys(d for b in both for d in b.frame.fixed.definitions())
        define_used(writer, [*self.grid.definitions, *own, *columns], texts)
        define_used(writer, start, before.text)
        writer.add(before)
        if not self.frame.looped:
            define_used(writer, rows, inside.text)
            writer.add(inside)
        else:
            with writer.block(head):
                define_used(writer, rows + following, inside.text)
                writer.add(inside)
        writer.add(after)

    def _owned(self, number: int) -> str:
        """The test for the program that stores the sums of that number, of those that share a tile.

        A mask, for a condition around products and exchanges between threads gave wrong sums (Triton 3.6, sm_90).
        """
        return f"{self.share} == {number % self.program.shares}" if self.program.shares > 1 else ""

    @staticmethod
    def _rows(bodies: dict[_Key, Body], first: str) -> list[Definition]:
        """The row indices of the tile that starts at row ``first`` of the chunk."""
        return list(dict.fromkeys(d for b in bodies.values() for d in b.frame.row_definitions(first)))

    def _range(self) -> str:
        """The walk."""
        step, stages = f"0, {self._end()}, {self.program.row_tile}", self.program.num_stages
        return f"tl.range({step}, num_stages={stages})" if stages > 1 else f"range({step})"

    def _end(self, less: int = 0) -> str:
        """Rows that the walk takes, ``less`` some; where tiles divide the rows it ends at the last, without masks."""
        frame, phase = self.frame, self.frame.phase
        rows = frame.chunk_rows
        if not frame.ragged and frame.chunks * rows > phase.loop_size:
            return f"min({rows - less}, {phase.loop_size - less} - {frame.chunk} * {rows})"
        return str(rows - less)

    def _start(self, before: Writer) -> None:
        """Sums of nothing, before the walk."""
        for phase in self.program.phases:
            body = self.bodies[self._key(phase)]
            body.writer = before
            for item in noted(phase.passes[0]):
                if isinstance(item.statement, ColReduce):
                    running = self.running[item.statement.acc] = Running(body, item.statement, at_once=True)
                    running.start()
        for stage in self.program.stages:
            if isinstance(stage, RowSums):
                name = self.sums[stage.acc] = self.namer.one(stage.acc)
                shape = f"({block(stage.rows)}, {block(stage.cols)})"
                before.assign(name, f"tl.zeros({shape}, {TYPES[sum_type(stage.dtype)]})")

    def _phase(self, phase: Phase, before: Writer, inside: Writer) -> None:
        body = self.bodies[self._key(phase)]
        items = noted(phase.passes[0])
        once = [item for item in items if self.program.held and self.frame.looped and _rowless(item)]
        body.writer = before
        write_group(body, once, {})
        body.writer = inside
        for item in items:
            load = item.statement
            if isinstance(load, Load) and load.dst in self.next:
                self._take_over(self.next[load.dst], before, inside)
            if isinstance(load, Load) and load.dst in self.written:
                once.append(item)
        write_group(body, [item for item in items if item not in once], self.running)

    # --- rows loaded ahead ------------------------------------------------------------------------------------------

    def _take_over(self, row: RowLoad, before: Writer, inside: Writer) -> None:
        """Load the first tile before the walk, and take in it what was loaded in the step before."""
        self._load_next(row, before)
        names = self.bodies[self._key(row.phase)].define(row.load.dst, row.load.level, row.load.dtype).names
        for name, loaded in zip(names, self.values[f"{row.load.dst}_ahead"].names, strict=True):
            inside.assign(name, loaded)
        self.written.add(row.load.dst)

    def _load_next(self, row: RowLoad, writer: Writer) -> None:
        """Load rows of the next tile."""
        body = self.early[self._key(row.phase)]
        body.writer = writer
        body.write(replace(row.load, dst=f"{row.load.dst}_ahead"))

    def _load_following(self, products: int, inside: Writer) -> None:
        """The loads for the next tile that stand after so many products."""
        for row in self.next.values():
            if row.at == products:
                self._load_next(row, inside)

    def _load_first(self, inside: Writer) -> None:
        """Load what a program of one tile loads before it works."""
        rows, products = ([], []) if self.frame.looped else first_loads(self.program)
        for row in rows:
            body = self.bodies[self._key(row.phase)]
            body.writer = inside
            body.write(row.load)
            self.written.add(row.load.dst)
        for product in products:
            self.blocks.matrix(product, inside)

    def _finish(self, after: Writer) -> None:
        """Store the sums over the rows."""
        for running in self.running.values():
            running.body.writer = after
            running.finish()
        for stage in self.program.stages:
            if isinstance(stage, RowSums) and self.frame.looped:
                self._store(stage, after)

    # --- products ---------------------------------------------------------------------------------------------------

    def _load_ahead(self, at: int, loads: Writer) -> None:
        """Load matrices of the product in position ``at`` and of later ones while registers hold what waits for use."""
        products = [s for s in self.program.stages[at:] if isinstance(s, Product)]
        room = AHEAD // (1 + any(isinstance(s, RowSums) for s in self.program.stages))
        for stage in products * self.program.held:
            size = block(stage.inner) * block(stage.cols) * stage.dtype.size
            room -= size // (4 * 32 * self.program.num_warps)
            if room < 0:
                break
            self.blocks.matrix(stage, loads)

    def _product(self, stage: Product, loads: Writer, inside: Writer) -> None:
        matrix = self.blocks.matrix(stage, loads)
        a, flat = self._operand(stage.a, stage.inner, stage.dtype), self.frame.flat
        dtype = sum_type(stage.dtype)
        if flat:
            text = f"tl.sum({convert(a, stage.dtype, dtype)}[:, None] * {convert(matrix, stage.dtype, dtype)}, 0)"
        else:
            pair = f"{flipped(matrix)}, {a}" if self.program.turned else f"{a}, {matrix}"
            text = f"tl.dot({pair}{self._precision(stage.dtype)})"
            text = f"_apart({text})" if stage.dtype is DType.F32 else text
        level = Level.TILE if stage.cols > 1 else Level.ROW
        if level is Level.ROW:
            text = f"tl.sum({text})" if flat else f"tl.sum({text}, {self.frame.col_axis}, keep_dims=True)"
        name = self.namer.one(stage.dst)
        self.values[stage.dst] = Value((name,), level, dtype)
        inside.assign(name, text)

    def _precision(self, dtype: DType) -> str:
        return f', input_precision="{"tf32" if self.program.tf32 else "ieee"}"' * (dtype is DType.F32)

    def _operand(self, name: str, width: int, dtype: DType, cleared: bool = True) -> str:
        """A row value as an operand: all columns of its block, those beyond its width 0 (if ``cleared``)."""
        value, size = self.values[name], block(width)
        text = convert(value.names[0], value.dtype, dtype)
        if not has_cols(value.level):
            text = f"tl.broadcast_to({text}, {self.frame.block(self.program.row_tile, size)})"
        elif value.pad == 0.0:
            return text
        if width == size or not cleared:
            return text
        edge = f"{self.blocks.edge(size)}{self.frame.along(self.frame.col_axis)}"
        return f"tl.where({edge} < {width}, {text}, 0.0)"

    # --- sums over the rows -----------------------------------------------------------------------------------------

    def _step(self, stage: RowSums, inside: Writer) -> None:
        left, right = (
            self._summed(name, stage, w) for name, w in ((stage.left, stage.rows), (stage.right, stage.cols))
        )
        started = stage.acc in self.sums
        name = self.sums[stage.acc] if started else self.namer.one(stage.acc)
        self.sums[stage.acc] = name
        if self.frame.flat:
            dtype = sum_type(stage.dtype)
            product = f"{convert(left, stage.dtype, dtype)}[:, None] * {convert(right, stage.dtype, dtype)}[None, :]"
            inside.line(f"{name} += {product}" if started else f"{name} = {product}")
            return
        acc = f", {name}" * started
        pair = f"{left}, tl.trans({right})" if self.program.turned else f"tl.trans({left}), {right}"
        inside.assign(name, f"tl.dot({pair}{acc}{self._precision(stage.dtype)})")

    def _summed(self, name: str, stage: RowSums, width: int) -> str:
        """A row value as an operand of a sum over rows: rows beyond the last are 0; columns beyond are not stored."""
        text = self._operand(name, width, stage.dtype, cleared=False)
        if not self.frame.ragged or name in self.masked:
            return text
        return f"tl.where({self.frame.row_mask}, {text}, 0.0)"

    def _store(self, stage: RowSums, after: Writer, owned: str = "") -> None:
        target, (_, *steps) = stage.target, stage.target.strides
        chunks, problems = self.program.chunks, self.program.problems
        part = self.grid.chunk if chunks > 1 else self.grid.fixed
        if chunks > 1 and problems > 1:
            part = f"({self.grid.chunk} * {problems} + {self.grid.fixed})"
        start = self.blocks.start_of(target, part) if chunks * problems > 1 else ""
        pointer, mask = self.blocks.place(target, (stage.rows, stage.cols), (steps[0], steps[1]), start)
        value = convert(self.sums[stage.acc], sum_type(stage.dtype), self.program.param(target.buffer).dtype)
        mask = join_tests([mask] * bool(mask) + [owned] * bool(owned))
        after.call("tl.store(", [pointer, value, *([f"mask={mask}"] if mask else [])])


def _rowless(item: Noted) -> bool:
    """Whether a statement's result is the same in all row tiles."""
    return not isinstance(item.statement, ColReduce) and result_level(item.statement) in (Level.SCALAR, Level.COL)
