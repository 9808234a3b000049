"""A dot program as a NumPy module: one problem after the other, multiplied in fp32, then the epilogue's statements."""

from __future__ import annotations

from dataclasses import replace

from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.dot_program import PRODUCT, DotProgram, Matrices
from megafuse.codegen.names import Namer, identifier
from megafuse.codegen.numpy.helpers import imports_of, used_helpers
from megafuse.codegen.numpy.kernel import write_phase
from megafuse.codegen.numpy.statements import Body, Value
from megafuse.codegen.program import ColReduce
from megafuse.codegen.source import kernel_source
from megafuse.codegen.walk import statements
from megafuse.codegen.writer import Writer
from megafuse.core.dtypes import DType


def print_dot(program: DotProgram) -> KernelSource:
    """``program`` as a NumPy module: ``entry`` takes one flat array per parameter, in order, and writes the outputs."""
    kernel = _kernel_text(program)
    parts = [*used_helpers(kernel), kernel]
    return kernel_source(program, "numpy", imports_of(parts), parts)


def _kernel_text(program: DotProgram) -> str:
    namer = Namer()
    for name in ("fixed", "chunk", "row", "col", PRODUCT):
        namer.one(name)
    buffers = {param.name: namer.one(f"{param.name}_buf") for param in program.params}
    writer = Writer()
    writer.line('@np.errstate(all="ignore")')
    writer.line(f"def {identifier(program.name)}(")
    for param in program.params:
        out = "out " * param.written
        writer.line(f"    {buffers[param.name]},  # {out}{param.dtype.value} {list(param.shape)}, flat")
    phase = program.epilogue
    cut = phase.num_chunks > 1 and any(isinstance(node, ColReduce) for node in statements(phase))
    if not cut:
        rows = 1 << max(phase.loop_size - 1, 0).bit_length()  # all of them at once
        phase = replace(phase, row_tile=rows, rows_per_chunk=rows)
    with writer.block("):"):
        writer.docstring(program.doc)
        body = Body(Writer(3 if cut else 2), phase, namer, phase.fixed, phase.loop)
        body.values[PRODUCT] = Value(PRODUCT, DType.F32, rows=True, cols=True)
        with writer.block(f"for fixed in range({program.problems}):"):
            problem, first, inner = _part(writer, program, namer)
            a = _matrix(program.a, buffers[program.a.buffer], f"({phase.loop_size}, {inner})", problem, first, 2)
            b = _matrix(program.b, buffers[program.b.buffer], f"({inner}, {phase.num_cols})", problem, first, 1)
            if not cut:
                writer.call(f"{PRODUCT} = np.matmul(", [a, b])
                write_phase(writer, body, program.params, buffers)
                return writer.text
            whole, size = namer.one("whole"), phase.row_tile
            writer.call(f"{whole} = np.matmul(", [a, b])
            with writer.block(f"for chunk in range({phase.num_chunks}):"):
                writer.line(f"{PRODUCT} = {whole}[chunk * {size} : (chunk + 1) * {size}]")
                write_phase(writer, body, program.params, buffers, phase.num_chunks)
    return writer.text


def _part(writer: Writer, program: DotProgram, namer: Namer) -> tuple[str, str, str]:
    """The problem's number among the matrices, and the first element and the length of its part of K."""
    if program.splits == 1:
        return "fixed", "", repr(program.inner)
    matrix, first, size = namer.one("matrix"), namer.one("first_k"), namer.one("size_k")
    writer.line(f"{matrix} = fixed % {program.matrices}")
    writer.line(f"{first} = fixed // {program.matrices} * {program.span}")
    writer.line(f"{size} = min({program.span}, {program.inner} - {first})")
    return matrix, first, size


def _matrix(operand: Matrices, buffer: str, shape: str, problem: str, first: str, along: int) -> str:
    """One problem's matrix, from element ``first`` of K (dim ``along``) on."""
    step, skip = operand.strides[0], operand.strides[along]
    terms = [f"{problem} * {step}"] * bool(step) + [f"{first} * {skip}"] * bool(first)
    start = " + ".join([*terms, *([str(operand.offset)] * bool(operand.offset))]) or "0"
    return f"_matrix({buffer}, {start}, {shape}, {operand.strides[1:]})"
