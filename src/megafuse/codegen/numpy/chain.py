"""A chain program as a NumPy module: one chunk of rows after the other, its row tiles in one step."""

from __future__ import annotations

from collections.abc import Mapping

from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.chain_program import ChainProgram, Product, RowSums, sum_type
from megafuse.codegen.names import Namer, identifier
from megafuse.codegen.numpy.helpers import imports_of, used_helpers
from megafuse.codegen.numpy.kernel import write_phase
from megafuse.codegen.numpy.statements import Body, Value, convert
from megafuse.codegen.source import kernel_source
from megafuse.codegen.writer import Writer
from megafuse.core.dtypes import DType


def print_chain(program: ChainProgram) -> KernelSource:
    """``program`` as a NumPy module: ``entry`` takes one flat array per parameter, in order, and writes the outputs."""
    kernel = _Printer(program).run()
    parts = [*used_helpers(kernel), kernel]
    return kernel_source(program, "numpy", imports_of(parts), parts)


class _Printer:
    """Writes the kernel of one program."""

    def __init__(self, program: ChainProgram) -> None:
        self.program, self.namer = program, Namer()
        for name in ("chunk", "row", "col", *(("fixed", "pid") if program.problems > 1 else ())):
            self.namer.one(name)
        self.buffers: Mapping[str, str] = {p.name: self.namer.one(f"{p.name}_buf") for p in program.params}
        self.values: dict[str, Value] = {}

    def run(self) -> str:
        """The kernel's text."""
        program, writer = self.program, Writer()
        writer.line('@np.errstate(all="ignore")')
        writer.line(f"def {identifier(program.name)}(")
        for param in program.params:
            out = "out " * param.written
            writer.line(f"    {self.buffers[param.name]},  # {out}{param.dtype.value} {list(param.shape)}, flat")
        with writer.block("):"):
            writer.docstring(program.doc)
            with writer.block(f"for {self._counter()} in range({program.grid[0]}):"):
                if self._counter() == "pid":
                    writer.line(f"fixed, chunk = divmod(pid, {program.chunks})")
                for stage in program.stages:
                    if isinstance(stage, Product):
                        self._product(writer, stage)
                    elif isinstance(stage, RowSums):
                        self._sums(writer, stage)
                    else:
                        body = Body(writer.part(), stage, self.namer, stage.fixed, stage.loop)
                        body.values = self.values
                        write_phase(writer, body, program.params, self.buffers, program.chunks)
        return writer.text

    def _counter(self) -> str:
        """What counts the programs."""
        if self.program.problems == 1:
            return "chunk"
        return "fixed" if self.program.chunks == 1 else "pid"

    def _rows(self, name: str, dtype: DType, width: int) -> str:
        """A row value of ``width`` columns, an operand of ``dtype``, widened to the type of its products."""
        value = self.values[name]
        text = convert(value.name, value.dtype, sum_type(dtype))
        if value.rows and (value.cols or width == 1):
            return text
        first = self.program.phases[0]
        start, end = f"chunk * {first.rows_per_chunk}", f"(chunk + 1) * {first.rows_per_chunk}"
        if self._counter() == "fixed":
            return f"np.broadcast_to({text}, ({first.loop_size}, {width}))"
        return f"np.broadcast_to({text}, (min({end}, {first.loop_size}) - {start}, {width}))"

    def _product(self, writer: Writer, stage: Product) -> None:
        operand, (problem, *steps) = stage.matrix, stage.matrix.strides
        shape = (stage.inner, stage.cols)
        start = str(operand.offset)
        if problem and self.program.problems > 1:
            start = f"fixed * {problem}" + f" + {operand.offset}" * bool(operand.offset)
        matrix = f"_matrix({self.buffers[operand.buffer]}, {start}, {shape}, {tuple(steps)})"
        name = self.namer.one(stage.dst)
        self.values[stage.dst] = Value(name, sum_type(stage.dtype), rows=True, cols=stage.cols > 1)
        writer.call(f"{name} = np.matmul(", [self._rows(stage.a, stage.dtype, stage.inner), matrix])

    def _sums(self, writer: Writer, stage: RowSums) -> None:
        target, (step, *steps) = stage.target, stage.target.strides
        name = self.namer.one(stage.acc)
        left = self._rows(stage.left, stage.dtype, stage.rows)
        right = self._rows(stage.right, stage.dtype, stage.cols)
        writer.call(f"{name} = np.matmul(", [f"{left}.T", right])
        problems = self.program.problems
        part = {"chunk": "chunk", "fixed": "fixed", "pid": f"(chunk * {problems} + fixed)"}[self._counter()]
        at = [f"{part} * {step}"] * bool(step) + [str(target.offset)] * bool(target.offset)
        indices = (f"np.arange({stage.rows})[:, None]", f"np.arange({stage.cols})")
        at += [i if step == 1 else f"{i} * {step}" for i, step in zip(indices, steps, strict=True)]
        value = convert(name, sum_type(stage.dtype), self.program.param(target.buffer).dtype)
        writer.line(f"{self.buffers[target.buffer]}[{' + '.join(at)}] = {value}")
