"""The whole module: imports, helpers, the kernel's signature and docstring, its phases."""

from __future__ import annotations

from dataclasses import replace

from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.names import Namer
from megafuse.codegen.program import Load, Phase, TileProgram
from megafuse.codegen.source import kernel_source
from megafuse.codegen.triton.abreast import write_out
from megafuse.codegen.triton.frame import ZERO, Definition, Frame, RunNames, buffer_name, grid_names
from megafuse.codegen.triton.head import kernel_head
from megafuse.codegen.triton.helpers import imports_of, used_helpers
from megafuse.codegen.triton.loops import define_used, write_phase
from megafuse.codegen.triton.narrow import narrow
from megafuse.codegen.triton.packed import pack
from megafuse.codegen.triton.statements import Body
from megafuse.codegen.triton.values import in_halves
from megafuse.codegen.walk import affines, statements
from megafuse.codegen.writer import Writer
from megafuse.core.sizes import may_exceed


def print_tiles(program: TileProgram, *, assembly: bool = True) -> KernelSource:
    """``program`` as a Triton module with one kernel (and the small device functions it calls).

    ``assembly=False`` writes exponentials in plain Triton, for its interpreter.

    The kernel takes one pointer per parameter, in order, then the program's open sizes as integers. Triton compiles it
    once for sizes that 16 divides, and once for others.

    Raises:
        ValueError: the program asks for something that has no Triton form; the message names it.
    """
    program = replace(program, phases=tuple(write_out(pack(narrow(p, program.params))) for p in program.phases))
    kernel = _kernel_text(program, assembly)
    parts = [*used_helpers(kernel, assembly), kernel]
    dims = tuple(dim.name for dim in program.dims)
    return kernel_source(program, "triton", imports_of(parts), parts, dims=dims, waits=assembly)


def _kernel_text(program: TileProgram, waits: bool) -> str:
    writer = Writer()
    with kernel_head(writer, program, _config(program), waits=waits, dims=program.dims):
        _body(writer, program)
    return writer.text


def _body(writer: Writer, program: TileProgram) -> None:
    """The phases with barriers between them or, where they stand apart, each for the programs that are its own."""
    namer = Namer()
    for dim in program.dims:
        namer.one(dim.name)
        if dim.wide:
            writer.line(f"{dim.name} = {dim.name}.to(tl.int64)")
    for param in program.params:
        namer.one(buffer_name(param.name))
    if not program.apart:
        _phases(writer, program, namer)
        return
    pid = namer.one("pid")
    writer.assign(pid, "tl.program_id(0)")
    first = 0
    for part in program.parts:
        (phase,) = part.phases
        beyond = first + phase.programs * phase.col_blocks
        writer.blank()
        writer.comment(f"{_numbers(first, beyond)}: {phase.title}")
        with writer.block(f"if {_among(pid, first, beyond)}:"):
            _phases(writer, part, namer.copy(), f"{pid} - {first}" if first else pid)
        first = beyond


def _numbers(first: int, beyond: int) -> str:
    return f"Program {first}" if beyond == first + 1 else f"Programs {first} to {beyond - 1}"


def _among(pid: str, first: int, beyond: int) -> str:
    """The test for the programs from ``first`` to before ``beyond``."""
    if beyond == first + 1:
        return f"{pid} == {first}"
    return f"({pid} >= {first}) & ({pid} < {beyond})" if first else f"{pid} < {beyond}"


def _phases(writer: Writer, program: TileProgram, namer: Namer, own: str = "") -> None:
    """Program-id variables, then the phases with barriers between them. ``own``: see ``grid_names``."""
    _check(program)
    grid = grid_names(program, namer, own)
    uses = [index for phase in program.phases for node in statements(phase) for index in affines(node)]
    fixed = RunNames(program.phases[0].fixed, (grid.fixed,), uses, namer)
    zero = namer.one("zero")
    fast = in_halves(program.params)
    inner = writer.part()
    for number, phase in enumerate(program.phases):
        frame = Frame(program, phase, fixed, grid, zero, namer)
        _phase(inner, program, phase, number, Body(inner, frame, namer, fast))
    define_used(writer, [*grid.definitions, *fixed.definitions(), Definition(zero, ZERO)], inner.text)
    writer.add(inner)


def _phase(writer: Writer, program: TileProgram, phase: Phase, number: int, body: Body) -> None:
    if number:
        writer.line("tl.debug_barrier()  # what one thread stored, all threads may now load")
    if len(program.phases) > 1:
        if number:
            writer.blank()
        writer.comment(f"Phase {number + 1}: {phase.title}")
    write_phase(body, program.num_stages)


def _check(program: TileProgram) -> None:
    first = program.phases[0]
    for phase in program.phases:
        if phase.fixed != first.fixed or may_exceed(phase.num_chunks, first.num_chunks):
            raise ValueError(f"{program.name}: phase {phase.title!r} does not share the grid of the first phase")
        if phase.col_grid != first.col_grid:
            raise ValueError(f"{program.name}: phases differ in the use of the second grid axis")


def _config(program: TileProgram) -> str:
    """One sentence about the launch and the tiles."""
    grid = " x ".join(map(repr, program.grid))
    launch = f"num_warps={program.num_warps}, num_stages={program.num_stages}."
    if program.apart:
        tiles = "; ".join(dict.fromkeys(map(_tile, program.phases)))
        return f"Grid {grid}, in {len(program.phases)} parts; tiles {tiles}; {launch}"
    first = program.phases[0]
    names = [f"{axis.name}={axis.size!r}" for axis in first.fixed]
    names += [f"chunks={first.num_chunks!r}"] * (first.num_chunks != 1)
    cut = f" ({', '.join(names)})" if names else ""
    tiles = "; then ".join(_tile(phase) for phase in program.phases)
    order = ", the last rows first" * program.last_first  # the L2 holds the end of what the kernel before left
    return f"Grid {grid}{cut}{order}; tile {tiles}; {launch}"


def _tile(phase: Phase) -> str:
    at_once = f"{phase.abreast} abreast" if phase.abreast > 1 else f"{phase.row_tile}"
    rows = f"{at_once} of {phase.loop_size!r} rows"
    if phase.num_chunks != 1 and phase.rows_per_chunk > phase.row_tile * phase.abreast:
        rows += f" ({phase.rows_per_chunk} a program)"
    sums = max((s.parts for s in statements(phase) if isinstance(s, Load)), default=1)
    if sums > 1:
        rows += f", loaded as sums of {sums},"
    if phase.col_block:
        return f"{rows} x {phase.num_cols!r} columns in blocks of {phase.col_block}"
    if phase.col_grid:
        return f"{rows} x {phase.pieces[0]} of {phase.num_cols!r} columns"
    return f"{rows} x {phase.num_cols!r} columns as {' + '.join(map(str, phase.pieces))}"
