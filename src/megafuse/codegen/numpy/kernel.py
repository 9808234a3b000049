"""The whole module: a function of flat arrays that runs every program of the grid, one after the other.

Row tiles of a chunk are worked in one step and columns are held whole. A kernel of one phase without column reductions
has no chunks to keep apart: its fixed and loop axes together are walked in large steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from megafuse.codegen.affine import runs
from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.names import Namer, identifier
from megafuse.codegen.numpy.helpers import imports_of, used_helpers
from megafuse.codegen.numpy.statements import Body
from megafuse.codegen.program import ColReduce, Param, Phase, TileProgram
from megafuse.codegen.source import kernel_source
from megafuse.codegen.walk import affines, noted, statements
from megafuse.codegen.writer import Writer
from megafuse.core.sizes import typical

STEP = 1 << 19  # elements of one vectorised step


def print_tiles(program: TileProgram) -> KernelSource:
    """``program`` as a NumPy module: ``entry`` takes one flat array per parameter, in order, and writes the outputs.

    Raises:
        ValueError: the program asks for something that has no NumPy form; the message names it.
    """
    kernel = _kernel_text(program)
    parts = [*used_helpers(kernel), kernel]
    return kernel_source(program, "numpy", imports_of(parts), parts, dims=tuple(dim.name for dim in program.dims))


def _kernel_text(program: TileProgram) -> str:
    namer = Namer()
    for name in (*(dim.name for dim in program.dims), "fixed", "chunk", "row", "col", "pid", "start"):
        namer.one(name)
    buffers = {param.name: namer.one(f"{param.name}_buf") for param in program.params}
    writer = Writer()
    writer.line('@np.errstate(all="ignore")')
    writer.line(f"def {identifier(program.name)}(")
    for param in program.params:
        out = "out " if param.written else ""
        writer.line(f"    {buffers[param.name]},  # {out}{param.dtype.value} {list(param.shape)}, flat")
    for dim in program.dims:
        writer.line(f"    {dim.name},  # a size from {dim.least} on")
    with writer.block("):"):
        writer.docstring(program.doc)
        for part in program.parts:
            if program.apart:
                writer.blank()
                writer.comment(part.phases[0].title)
            _part(writer, part, namer.copy(), buffers)
    return writer.text


def _part(writer: Writer, program: TileProgram, namer: Namer, buffers: dict[str, str]) -> None:
    """Every program of a kernel, or of a phase that stands apart."""
    if len(program.phases) == 1 and not _has_col_reduce(program.phases[0]):
        _merged(writer, program, namer, buffers)
    else:
        _programs(writer, program, namer, buffers)


def _has_col_reduce(phase: Phase) -> bool:
    return any(isinstance(node, ColReduce) for node in statements(phase))


def _merged(writer: Writer, program: TileProgram, namer: Namer, buffers: dict[str, str]) -> None:
    """All rows of all programs in large steps."""
    phase = program.phases[0]
    axes = (*phase.fixed, *phase.loop)
    total = math.prod(axis.size for axis in axes)
    step = max(1, STEP // typical(phase.num_cols))
    uses = (affine for node in statements(phase) for affine in affines(node))
    if not any(runs(affine, axes) for affine in uses):
        write_phase(writer, Body(writer.part(), phase, namer, (), axes), program.params, buffers)
        return
    body = Body(Writer(2), phase, namer, (), axes)
    _statements(body, program.params, buffers)
    if _uses(body.writer, "col"):
        writer.line(f"col = np.arange({phase.num_cols!r})[None, :]")
    with writer.block(f"for start in range(0, {total!r}, {step}):"):
        writer.line(f"row = np.arange(start, min(start + {step}, {total!r}))[:, None]")
        writer.add(body.writer)


def _programs(writer: Writer, program: TileProgram, namer: Namer, buffers: dict[str, str]) -> None:
    """One program of the grid after the other, phase by phase."""
    chunks, programs = program.phases[0].num_chunks, program.programs
    inner = Writer(2)
    for number, phase in enumerate(program.phases):
        if len(program.phases) > 1:
            if number:
                inner.blank()
            inner.comment(f"Phase {number + 1}: {phase.title}")
        body = Body(inner.part(), phase, namer, phase.fixed, phase.loop)
        write_phase(inner, body, program.params, buffers, chunks)
    if chunks in (1, programs):
        with writer.block(f"for {'fixed' if chunks == 1 else 'chunk'} in range({programs!r}):"):
            writer.add(inner)
        return
    with writer.block(f"for pid in range({programs!r}):"):
        for name, text in (("fixed", f"pid // {chunks}"), ("chunk", f"pid % {chunks}")):
            if _uses(inner, name):
                writer.line(f"{name} = {text}")
        writer.add(inner)


def write_phase(
    writer: Writer, body: Body, params: Sequence[Param], buffers: Mapping[str, str], chunks: int = 1
) -> None:
    """One phase of one program: its index arrays, then its statements."""
    phase = body.phase
    _statements(body, params, buffers)
    if _uses(body.writer, "col"):
        writer.line(f"col = np.arange({phase.num_cols!r})[None, :]")
    if _uses(body.writer, "row"):
        rows, size = phase.rows_per_chunk, phase.loop_size
        span = f"chunk * {rows}, min((chunk + 1) * {rows}, {size!r})" if chunks != 1 else repr(size)
        writer.line(f"row = np.arange({span})[:, None]")
    writer.add(body.writer)


def _uses(writer: Writer, name: str) -> bool:
    return re.search(rf"\b{name}\b", writer.text) is not None


def _statements(body: Body, params: Sequence[Param], buffers: Mapping[str, str]) -> None:
    body.buffers, body.dtypes = dict(buffers), {param.name: param.dtype for param in params}
    for one in body.phase.passes:
        group = 0
        for item in noted(one):
            if item.group != group:
                group = item.group
                for note in item.notes:
                    body.writer.comment(note)
            body.write(item.statement)
