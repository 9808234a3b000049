"""A dot program as a Triton module: a persistent walk over output tiles, a loop over K, and the epilogue's statements.

Operands and simple accesses of the epilogue go through tensor descriptors (the tensor copy engine, from Triton 3.4 and
sm_90 on) where these can describe them: one stride is 1, the others and the offset are multiples of 16 bytes. All else
is read and written through pointers with masks. Descriptors fill what lies outside with zeros, and write nothing there.
"""

from __future__ import annotations

from dataclasses import replace

from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.dot_program import PRODUCT, DotProgram
from megafuse.codegen.names import Namer
from megafuse.codegen.program import ColReduce, Level, Load, Store, TileProgram
from megafuse.codegen.source import kernel_source
from megafuse.codegen.triton.dot_access import Accesses, Place
from megafuse.codegen.triton.frame import ZERO, Definition, Frame, GridNames, RunNames, buffer_name
from megafuse.codegen.triton.head import kernel_head
from megafuse.codegen.triton.helpers import imports_of, used_helpers
from megafuse.codegen.triton.loops import define_used
from megafuse.codegen.triton.narrow import narrow
from megafuse.codegen.triton.packed import pack
from megafuse.codegen.triton.reductions import col_reduce
from megafuse.codegen.triton.statements import Body
from megafuse.codegen.triton.values import Value, in_halves
from megafuse.codegen.walk import affines, guards, noted, statements
from megafuse.codegen.writer import Writer
from megafuse.core.dtypes import DType


def print_dot(program: DotProgram, *, assembly: bool = True) -> KernelSource:
    """``program`` as a Triton module with one kernel.

    ``assembly=False`` writes it for Triton's interpreter. Where descriptors are used, ``fallback`` is the same kernel
    with pointers alone, for older Tritons and for tensors that are not aligned.
    """
    program = replace(
        program,
        epilogue=pack(narrow(program.epilogue, program.params)),
        descriptors=program.descriptors and assembly,
    )
    printer = _Printer(program)
    kernel = printer.run(waits=assembly)
    aligned = tuple(n for n, p in enumerate(program.params) if p.name in printer.accesses.described)
    parts = [*used_helpers(kernel, assembly), kernel]
    return kernel_source(
        program,
        "triton",
        imports_of(parts),
        parts,
        aligned=aligned,
        fallback=print_dot(replace(program, descriptors=False)) if aligned else None,
        waits=assembly,
    )


class _Printer:
    """Writes the kernel of one program."""

    def __init__(self, program: DotProgram) -> None:
        self.program, self.phase = program, program.epilogue
        self.namer = namer = Namer()
        for param in program.params:
            namer.one(buffer_name(param.name))
        real = [axis.name for axis in self.phase.fixed if axis.size != 1]
        problem = namer.one(real[0] if len(real) == 1 else "problem")
        matrix = namer.one("matrix") if program.splits > 1 else problem
        self.place = Place(problem, matrix, namer.one("pid_m"), namer.one("pid_n"), namer.one("k"))
        self.start, self.step = namer.one("first_k"), namer.one("step")
        self.tile, self.zero, self.acc = namer.one("tile"), namer.one("zero"), namer.one(PRODUCT)
        self.accesses = Accesses(program, self.place, self.zero, namer)

    def run(self, *, waits: bool) -> str:
        """The kernel's text."""
        program = self.program
        writer = Writer()
        with kernel_head(writer, program, self._config(), waits=waits):
            body = Writer(2)
            self._tile(body)
            define_used(writer, [Definition(self.zero, ZERO)], body.text)
            writer.add(self.accesses.head)
            flat = ", flatten=True" * bool(self.accesses.described)
            walk = f"tl.range(tl.program_id(0), {program.tiles}, {program.grid[0]}{flat})"
            with writer.block(f"for {self.tile} in {walk}:"):
                writer.add(body)
        return writer.text

    def _config(self) -> str:
        p, phase = self.program, self.phase
        problems = f"{p.matrices} of " * (p.matrices != 1)
        product = f"Product: {problems}[{phase.loop_size}, {p.inner}] x [{p.inner}, {phase.num_cols}]"
        product += f", each in {p.splits} sums over {p.span} products" * (p.splits != 1)
        tiles = f"{p.grid[0]} programs walk {p.tiles} tiles of {p.block_m} x {p.block_n}, {p.block_k} deep"
        return f"{product}. {tiles}; num_warps={p.num_warps}, num_stages={p.num_stages}."

    def _tile(self, writer: Writer) -> None:
        """One output tile: where it lies, the loop over K, the epilogue."""
        p, k = self.program, self.place.k
        self._position(writer)
        operands = self.accesses.operand(p.a, rows=True), self.accesses.operand(p.b, rows=False)
        for definition in (*operands[0].before, *operands[1].before):
            writer.assign(definition.name, definition.text)
        writer.assign(self.acc, f"tl.zeros(({p.block_m}, {p.block_n}), tl.float32)")
        with writer.block(self._loop(writer)):
            if p.splits > 1:
                writer.assign(k, f"{self.start} + {self.step}")
            for definition in (*operands[0].inside, *operands[1].inside):
                writer.assign(definition.name, definition.text)
            precision = f', input_precision="{"tf32" if p.tf32 else "ieee"}"' * (p.operand_dtype is DType.F32)
            writer.line(f"{self.acc} = tl.dot({operands[0].value}, {operands[1].value}, {self.acc}{precision})")
        self._epilogue(writer)

    def _loop(self, writer: Writer) -> str:
        """The head of the loop over K, or over one part of it, which has as many blocks as any other."""
        p, place = self.program, self.place
        if p.splits == 1:
            return f"for {place.k} in range(0, {p.inner!r}, {p.block_k}):"
        if p.matrices != 1:
            writer.assign(place.matrix, f"{place.problem} % {p.matrices}")
        writer.assign(self.start, f"{place.problem}{f' // {p.matrices}' * (p.matrices != 1)} * {p.span}")
        return f"for {self.step} in range(0, {p.span}, {p.block_k}):"

    def _position(self, writer: Writer) -> None:
        """The problem, tile row and tile column of a tile; see the order in ``dot_program``.

        The hidden zero keeps these divisions from being narrowed to packed 16-bit arithmetic; see ``frame.ZERO``.
        """
        p, place = self.program, self.place
        rows, cols, group = p.tile_rows, p.tile_cols, min(p.group, p.tile_rows)
        rest, hidden = f"({self.tile} + {self.zero})", f" + {self.zero}" * self._is_tested()
        if p.problems != 1:
            writer.assign(place.problem, f"{rest} // {rows * cols}")
            rest = f"{rest} % {rows * cols}"
        at, first, high = (self.namer.one(name) for name in ("at", "first_m", "group_rows"))
        writer.assign(at, f"{rest} + {self.zero}" if p.problems != 1 else rest[1:-1])
        start, within, size = f"{first} + ", at, str(group)
        if rows == group:
            start = ""
        else:
            writer.assign(first, f"{at} // {group * cols} * {group}")
        if rows % group:
            writer.assign(high, f"min({rows} - {first}, {group})")
            within, size = f"{at} % {group * cols}", high
        writer.assign(place.pid_m, f"{start}{within} % {size}{hidden}")
        turn = f" % {cols}" * (rows != group and not rows % group)
        writer.assign(place.pid_n, f"{within} // {size}{turn}{hidden}")

    def _is_tested(self) -> bool:
        """Whether masks compare rows or columns, whose small range would be known from the division of ``tile``."""
        p, phase = self.program, self.phase
        cut = phase.loop_size % p.block_m or phase.num_cols % p.block_n
        return bool(cut) or any(guards(node) for node in statements(phase))

    def _epilogue(self, writer: Writer) -> None:
        """The epilogue's statements, once per piece of columns; a name means the same in every piece."""
        p, phase = self.program, self.phase
        shell = TileProgram(p.name, p.doc, p.params, (phase,), p.num_warps)
        uses = [index for node in statements(phase) for index in affines(node)]
        fixed = RunNames(phase.fixed, (self.place.problem,), uses, self.namer)
        grid = GridNames(self.place.problem, self.place.pid_m, self.place.pid_n, ())
        frame = Frame(shell, phase, fixed, grid, self.zero, self.namer)
        body = Body(writer, frame, self.namer, in_halves(p.params))
        names = self._parts(writer)
        inner = writer.part()
        for part, name in enumerate(names):
            body.values[PRODUCT] = Value((name,), Level.TILE, DType.F32)
            piece = body.writer = inner.part()
            self._statements(body, part)
            define_used(inner, frame.col_definitions(self.accesses.first_column(part)), piece.text)
            inner.add(piece)
        define_used(writer, [*fixed.definitions(), *frame.row_definitions("")], inner.text)
        writer.add(inner)

    def _parts(self, writer: Writer) -> list[str]:
        """The product cut into pieces of columns, in order."""
        names, width = [self.acc], self.program.block_n
        while len(names) < self.program.parts:
            width //= 2
            halves: list[str] = []
            for name in names:
                both = self.namer.claim(self.acc, 2)
                cut = f"{name}.reshape({self.program.block_m}, 2, {width}).permute(0, 2, 1).split()"
                writer.line(f"{', '.join(both)} = {cut}")
                halves += both
            names = halves
        return names

    def _statements(self, body: Body, part: int) -> None:
        group = 0
        for item in noted(self.phase.passes[0]):
            if item.group != group:
                group = item.group
                for note in item.notes:
                    body.writer.comment(note)
            node = item.statement
            if isinstance(node, ColReduce):
                col_reduce(body, node)
            elif not (isinstance(node, Load | Store) and self.accesses.access(body, node, part)):
                body.write(node)
