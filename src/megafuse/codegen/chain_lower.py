"""Lower a chain's kernel schedule to a chain program; what was made in place is read by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megafuse.codegen.chain_program import ChainProgram, Product, RowSums, Stage
from megafuse.codegen.dot_program import DotProgram, Matrices
from megafuse.codegen.lower import PhaseLowering, lower_kernel, matrices_of, param_of
from megafuse.codegen.names import source_note
from megafuse.codegen.program import (
    Axis,
    Compute,
    Convert,
    Level,
    Load,
    Note,
    Pass,
    Phase,
    Statement,
    TileProgram,
)
from megafuse.core.dtypes import DType
from megafuse.ir.chain import Walk, block, made_step, row_step
from megafuse.ir.graph import Node
from megafuse.ir.index import axis_index
from megafuse.ir.trace import Inst
from megafuse.schedule.types import Buffer, ChainDot, ChainPart, KernelSchedule, PhaseSchedule

Buffers = Mapping[str, Buffer]
Names = Mapping[Node, str]


def lower_schedule(kernel: KernelSchedule, buffers: Buffers, names: Names) -> TileProgram | DotProgram | ChainProgram:
    """Lower one kernel of any kind; see ``lower_kernel``."""
    if kernel.chain is None:
        return lower_kernel(kernel, buffers, names)
    return _ChainLowering(kernel, kernel.chain, buffers, names).run()


@dataclass
class _Made:
    """Names of the values that stages have made so far, and how often each name was asked for."""

    walk: Walk
    values: dict[tuple[Node, int | None], str] = field(default_factory=dict)  # by how far apart rows lie, too
    taken: dict[str, int] = field(default_factory=dict)

    def name(self, base: str) -> str:
        """A new name."""
        number = self.taken.get(base, 0)
        self.taken[base] = number + 1
        return f"{base}{number}"


@dataclass
class _RowLowering(PhaseLowering):
    """A phase of a chain."""

    made: _Made = field(default_factory=lambda: _Made(Walk(1, 0)))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept = self.kept | set(self.trace.roots.values())
        self.taken = self.made.taken

    def _statement(self, inst: Inst) -> Statement | None:
        step = row_step(inst, self.trace.nest.space, self.made.walk) if inst.kind == "load" else None
        if step is None:
            return super()._statement(inst)
        if (inst.node, step) in self.made.values:
            self.values[inst] = self.made.values[inst.node, step]
            return None
        load = super()._statement(inst)
        if not inst.guards:
            self.made.values[inst.node, step] = self.values[inst]  # later stages find it in registers
        return load

    def result(self) -> str:
        """The name of the value that the phase is for."""
        (inst,) = self.trace.roots.values()
        return str(self.operand(inst))


class _ChainLowering:
    """Lowers the stages in order."""

    def __init__(self, kernel: KernelSchedule, chain: ChainPart, buffers: Buffers, names: Names) -> None:
        self.kernel, self.chain, self.buffers, self.names = kernel, chain, buffers, names
        self.made = _Made(chain.walk, taken=dict.fromkeys(buffers, 1))
        self.results: dict[int, str] = {}
        self.stages: list[Stage] = []

    def run(self) -> ChainProgram:
        """The whole program."""
        kernel, tile = self.kernel, self.chain.tile
        for stage in self.chain.stages:
            if isinstance(stage, int):
                self._phase(stage, kernel.phases[stage])
            elif stage.sums is None:
                self._product(stage)
            else:
                self._sums(stage)
        return ChainProgram(
            name=kernel.name,
            doc=kernel.doc,
            params=tuple(param_of(self.buffers[b], b in kernel.writes) for b in kernel.args),
            stages=tuple(self.stages),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            held=tile.held,
            turned=tile.turned,
            early=tile.early,
            first=tile.first,
            shares=tile.shares,
            last_first=kernel.last_first,
        )

    def _phase(self, at: int, schedule: PhaseSchedule) -> None:
        lowering = _RowLowering(schedule, self.buffers, self.names, made=self.made)
        phase = lowering.run(f"phase {at}")
        self.results[at] = lowering.result()
        (root,) = schedule.trace.nest.roots
        if not root.by_rows:
            step = made_step(schedule.trace.nest, self.chain.walk)
            self.made.values.setdefault((root.anchor.node, step), self.results[at])
        if phase.passes[0].body:
            self.stages.append(phase)

    def _product(self, dot: ChainDot) -> None:
        """The product, then a phase that adds the bias and rounds."""
        node = dot.node
        assert dot.matrix is not None
        _, inner, cols = dot.matrix.shape
        sums = self.made.name("acc")
        operand = self.results[dot.operands[0]]
        self.stages.append(Product(sums, operand, matrices_of(dot.matrix), inner, cols, node.args[0].dtype))
        level = Level.TILE if cols > 1 else Level.ROW
        body: list[Statement | Note] = [Note(source_note(node.origin))] if node.origin else []
        if dot.bias is not None:
            sums = self._biased(dot, cols, level, sums, body)
        if node.dtype is not DType.F32:
            rounded = self.made.name("y")
            body.append(Convert(rounded, sums, level, DType.F32, node.dtype))
            sums = rounded
        self.made.values[node, cols] = sums
        if any(not isinstance(item, Note) for item in body):
            self.stages.append(self._columns(cols, tuple(body)))

    def _biased(self, dot: ChainDot, cols: int, level: Level, sums: str, body: list[Statement | Note]) -> str:
        """Add statements that add the bias in fp32; the sum's name."""
        assert dot.bias is not None
        dtype, flat = self.buffers[dot.bias.buffer].dtype, Level.COL if cols > 1 else Level.SCALAR
        index = axis_index((Axis("c0", cols),)).scale(dot.bias.strides[0]).shift(dot.bias.offset)
        bias, biased = self.made.name("bias"), self.made.name("biased")
        body.append(Load(bias, dot.bias.buffer, index, flat, dtype))
        if dtype is not DType.F32:
            bias, narrow = self.made.name("wide_bias"), bias
            body.append(Convert(bias, narrow, flat, dtype, DType.F32))
        body.append(Compute(biased, "add", (sums, bias), level, DType.F32, DType.F32))
        return biased

    def _columns(self, cols: int, body: tuple[Statement | Note, ...]) -> Phase:
        tile, problems = self.chain.tile, self.chain.walk.problems
        return Phase(
            title="product",
            fixed=(Axis("p0", problems),) if problems > 1 else (),
            loop=(Axis("r0", self.chain.walk.rows),),
            cols=(Axis("c0", cols),) if cols > 1 else (),
            row_tile=tile.rows,
            rows_per_chunk=tile.rows_per_chunk,
            passes=(Pass(body),),
            pieces=(block(cols),),
        )

    def _sums(self, dot: ChainDot) -> None:
        assert dot.sums is not None
        _, rows, cols = dot.sums.shape
        left, right = (self.results[at] for at in dot.operands)
        target: Matrices = matrices_of(dot.sums)
        acc = self.made.name("sums")
        self.stages.append(RowSums(acc, left, right, rows, cols, target, dot.node.args[0].dtype))
