"""Lower a kernel schedule to a tile program: instances of the trace become statements, in passes over the columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megafuse.codegen.dot_program import PRODUCT, DotProgram, Matrices
from megafuse.codegen.names import source_note
from megafuse.codegen.program import (
    ColReduce,
    Compute,
    Convert,
    Index,
    Inside,
    Level,
    Load,
    Lookup,
    Note,
    Operand,
    Param,
    Pass,
    Phase,
    RowReduce,
    Statement,
    Store,
    TileProgram,
    Within,
)
from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError
from megafuse.core.sizes import huge, typical
from megafuse.ir.graph import Node
from megafuse.ir.index import Affine, axis_index, combine
from megafuse.ir.nest import Root
from megafuse.ir.trace import Inst
from megafuse.ir.types import Reduce
from megafuse.schedule.types import Buffer, DotPart, KernelSchedule, PhaseSchedule, Target, View

BIASED = "biased"  # the product and its bias, in fp32


def lower_kernel(
    kernel: KernelSchedule, buffers: Mapping[str, Buffer], names: Mapping[Node, str]
) -> TileProgram | DotProgram:
    """Lower one kernel.

    ``buffers`` by name give layouts; ``names`` gives the buffer of each node that the kernel loads.
    """
    params = tuple(param_of(buffers[b], b in kernel.writes) for b in kernel.args)
    if kernel.dot is not None:
        return _lower_dot(kernel, kernel.dot, params, buffers, names)
    phases = tuple(
        PhaseLowering(p, buffers, names).run(_written(p) if kernel.apart else f"phase {n}")
        for n, p in enumerate(kernel.phases)
    )
    return TileProgram(
        kernel.name,
        kernel.doc,
        params,
        phases,
        kernel.num_warps,
        kernel.num_stages,
        apart=kernel.apart,
        last_first=kernel.last_first,
    )


def _written(phase: PhaseSchedule) -> str:
    """The buffers that a phase writes."""
    return ", ".join(dict.fromkeys(target.buffer for _, target in phase.targets))


def _lower_dot(
    kernel: KernelSchedule,
    dot: DotPart,
    params: tuple[Param, ...],
    buffers: Mapping[str, Buffer],
    names: Mapping[Node, str],
) -> DotProgram:
    """A product with its epilogue: where a nest would load the product, the tile of sums is rounded instead."""
    lowering = PhaseLowering(kernel.phases[0], buffers, names, dot)
    return DotProgram(
        name=kernel.name,
        doc=kernel.doc,
        params=params,
        a=matrices_of(dot.a),
        b=matrices_of(dot.b),
        inner=dot.a.shape[2],
        block_k=dot.tile.depth,
        parts=dot.tile.parts,
        epilogue=lowering.run("epilogue"),
        programs=dot.tile.programs,
        num_warps=kernel.num_warps,
        num_stages=kernel.num_stages,
        group=dot.tile.group,
        descriptors=dot.descriptors,
        splits=dot.splits,
    )


def matrices_of(view: View) -> Matrices:
    """A view of problems, rows and columns as an operand."""
    problem, row, col = view.strides
    return Matrices(view.buffer, (problem, row, col), view.offset)


def param_of(buffer: Buffer, written: bool) -> Param:
    """The kernel argument that is a buffer."""
    span = 1 + sum((n - 1) * abs(s) for n, s in zip(buffer.shape, buffer.strides, strict=True))
    return Param(buffer.name, buffer.dtype, buffer.shape, buffer.strides, written, huge(span))


@dataclass
class PhaseLowering:
    """The lowering of one phase."""

    phase: PhaseSchedule
    buffers: Mapping[str, Buffer]
    names: Mapping[Node, str]
    dot: DotPart | None = None
    values: dict[Inst, str] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trace = self.phase.trace
        self.rows = {a.name for a in self.phase.loop}
        self.cols = self.trace.nest.space.col_names
        self.targets = dict(self.phase.targets)
        self.depth = self._depths()
        stored = {self.trace.roots[root] for root in self.targets}
        used = {a for i in self.trace.insts for a in i.args if not (i.kind == "cast" and i.dtype is DType.F32)}
        self.kept = stored | used  # 16-bit values that are more than a rounding on the way
        self.taken = dict.fromkeys((*self.buffers, PRODUCT, BIASED, "bias", "wide_bias"), 1)
        self.reread = self._reread()
        self.sums = any(load.parts > 1 for load in self.trace.loads())

    def run(self, title: str) -> Phase:
        """The phase, ready to print."""
        tile = self.phase.tile
        passes = self._looped_passes() if tile.col_block else (self._one_pass(),)
        return Phase(
            title=title,
            fixed=self.phase.fixed,
            loop=self.phase.loop,
            cols=self.trace.nest.space.cols,
            row_tile=tile.row_tile,
            rows_per_chunk=tile.rows_per_chunk,
            passes=passes,
            pieces=tile.pieces,
            col_block=tile.col_block,
            col_grid=tile.col_grid,
            hoist=tile.hoist,
            abreast=tile.abreast,
        )

    def _one_pass(self) -> Pass:
        return Pass((*self._biased(), *self._body(self.trace.insts)))

    # --- products ---------------------------------------------------------------------------------------------------

    def _sums(self) -> str:
        """The product before its rounding."""
        return BIASED if self.dot is not None and self.dot.bias is not None else PRODUCT

    def _biased(self) -> list[Statement]:
        """The bias that is added before the rounding."""
        if self.dot is None or self.dot.bias is None:
            return []
        view, dtype = self.dot.bias, self.buffers[self.dot.bias.buffer].dtype
        index = axis_index(self.trace.nest.space.cols).scale(view.strides[0]).shift(view.offset)
        return [
            Load("bias", view.buffer, index, Level.COL, dtype),
            Convert("wide_bias", "bias", Level.COL, dtype, DType.F32),
            Compute(BIASED, "add", (PRODUCT, "wide_bias"), Level.TILE, DType.F32, DType.F32),
        ]

    # --- statements -------------------------------------------------------------------------------------------------

    def _body(self, insts: Iterable[Inst], roots: Iterable[Root] | None = None) -> list[Statement | Note]:
        """Statements of ``insts``, each store right after its value; a note where the source line changes.

        Reductions stand together behind all that does not depend on them, so that printers can do several at once.
        """
        after: dict[Inst, list[Root]] = {}
        for root in self.trace.roots if roots is None else roots:
            if root in self.targets:
                after.setdefault(self.trace.roots[root], []).append(root)
        out: list[Statement | Note] = []
        line = ""
        waiting: list[Statement] = []  # stores of reductions: after the last of those that stand together
        for inst in sorted(insts, key=self._stage):
            if inst.kind != "reduce":
                out.extend(waiting)
                waiting.clear()
            made = self._statement(inst)
            here = self._source(inst)
            if made is not None and here and here != line:
                line = here
                out.append(Note(line))
            out.extend([made] if made is not None else [])
            stores = [self.store(root, inst) for root in after.get(inst, ())]
            (waiting if inst.kind == "reduce" else out).extend(stores)
        return [*out, *waiting]

    def _source(self, inst: Inst) -> str:
        return source_note(inst.node.origin) if inst.computes else ""

    def _statement(self, inst: Inst) -> Statement | None:
        level = self.level(inst)
        if inst.kind == "const":
            return None
        if inst.kind == "load" and self.dot is not None and inst.node is self.dot.node:
            return Convert(self._name(inst, "product"), self._sums(), level, DType.F32, inst.dtype)
        if inst.kind == "load":
            return self._load(inst, level)
        if inst.kind == "within":
            (src,) = inst.args
            return Within(self._name(inst, "within"), self.operand(src), inst.size, level, src.dtype)
        if inst.kind == "iota":
            return Index(self._name(inst, "index"), inst.index[0], level, inst.dtype)
        if inst.kind == "inside":
            return Inside(self._name(inst, "inside"), inst.guards, level)
        if inst.kind == "cast":
            return self._convert(inst, level)
        if inst.kind == "reduce":
            arg = inst.args[0]
            return RowReduce(self._name(inst, inst.fn), str(self.operand(arg)), self.level(arg), inst.fn, inst.dtype)
        value = inst.args[1] if inst.fn == "where" else inst.args[0]
        args = tuple(self.operand(a) for a in inst.args)
        return Compute(self._name(inst, inst.fn), inst.fn, args, level, inst.dtype, value.dtype)

    def _load(self, inst: Inst, level: Level) -> Load:
        buffer = self.buffers[self.names[inst.node]]
        dst = self._name(inst, buffer.name)
        offset = combine(inst.index, buffer.strides)
        if not offset.axes <= inst.axes:
            raise VerifyError(f"{dst} is loaded along {sorted(offset.axes - inst.axes)}, along which it is the same")
        reread = inst in self.reread
        # What tests other axes than the address has cannot lead it outside: who selects the value tests them too.
        guards = tuple(g for g in inst.guards if not {a for a, _ in g.index.terms}.isdisjoint(inst.axes))
        passing = not reread and not inst.lookups and self._passes(inst.axes)
        lookups = tuple(
            Lookup(self.values[row], self.values[within], found.step * buffer.strides[found.dim])
            for found, row, within in zip(inst.lookups, inst.args[::2], inst.args[1::2], strict=True)
        )
        step = math.prod(buffer.shape) // inst.parts if inst.parts > 1 else 0
        return Load(
            dst, buffer.name, offset, level, buffer.dtype, guards, 0.0, reread, passing, lookups, inst.parts, step
        )

    def _convert(self, inst: Inst, level: Level) -> Statement | None:
        """A cast; to 16 bits and back is a single rounding, and the 16-bit value exists only if something stores it."""
        arg = inst.args[0]
        if _narrows(inst) and inst not in self.kept:
            return None
        name = self._name(inst, _SHORT.get(inst.dtype.value, "v"))
        if inst.dtype is DType.F32 and _narrows(arg):
            return Convert(name, self.operand(arg.args[0]), level, DType.F32, DType.F32, arg.dtype)
        return Convert(name, self.operand(arg), level, arg.dtype, inst.dtype)

    def level(self, inst: Inst) -> Level:
        """Which of rows and columns a value varies in; fixed axes do not count."""
        by_row, by_col = bool(inst.axes & self.rows), bool(inst.axes & self.cols)
        if by_row:
            return Level.TILE if by_col else Level.ROW
        return Level.COL if by_col else Level.SCALAR

    def operand(self, inst: Inst) -> Operand:
        """A value's name, or a constant."""
        return inst.value if inst.kind == "const" else self.values[inst]

    def _name(self, inst: Inst, base: str) -> str:
        if inst not in self.values:
            number = self.taken.get(base, 0)
            self.taken[base] = number + 1
            self.values[inst] = f"{base}_v{number}" if base in self.buffers else f"{base}{number}"
        return self.values[inst]

    # --- stores -----------------------------------------------------------------------------------------------------

    def store(self, root: Root, inst: Inst) -> Statement:
        """The store of one root."""
        target: Target = self.targets[root]
        if root.by_rows:
            node = root.anchor.node
            assert isinstance(node.attrs, Reduce)
            acc = f"acc_{target.buffer}"
            return ColReduce(
                acc,
                str(self.operand(inst)),
                self.level(inst),
                node.attrs.fn,
                node.dtype,
                target.buffer,
                target.index,
                target.dtype,
            )
        passing = self._passes(target.index.axes)
        return Store(target.buffer, target.index, self.operand(inst), self.level(inst), passing=passing)

    def _reread(self) -> set[Inst]:
        """Loads of values of which other loads of the walk touch the same elements."""
        found: set[Inst] = set()
        loads = self.trace.loads()
        for number, first in enumerate(loads):
            for second in loads[:number]:
                if first.node is second.node and not self._disjoint(first.index, second.index):
                    found |= {first, second}
        return found

    def _disjoint(self, first: tuple[Affine, ...], second: tuple[Affine, ...]) -> bool:
        """True for two windows that lie side by side along some dimension (the halves of a tensor)."""
        sizes = self.trace.nest.space.sizes
        for a, b in zip(first, second, strict=True):
            extent = sum(abs(step) * (typical(sizes[name]) - 1) for name, step in a.terms)
            if a.terms == b.terms and abs(a.const - b.const) > extent:
                return True
        return False

    def _passes(self, axes: frozenset[str]) -> bool:
        """True for values as large as a walk that needs the cache for others, which it reads more than once."""
        return self._large(axes) and any(self._large(load.axes) for load in self.reread)

    def _large(self, axes: frozenset[str]) -> bool:
        space = self.trace.nest.space
        covered = math.prod(typical(space.sizes[a]) for a in axes)
        return bool(2 * covered >= typical(space.num_rows * space.num_cols))

    # --- columns walked in blocks -----------------------------------------------------------------------------------

    def _looped_passes(self) -> tuple[Pass, ...]:
        """One walk over the columns per level of dependent reductions, then one for what is stored per column.

        A pass holds what its reductions (or stores) need; column values are evaluated again in each pass, values
        without columns once.
        """
        depth = self.depth
        roots = {r: i for r, i in self.trace.roots.items() if r in self.targets}
        last = max(depth.values(), default=0)
        count = last + 1 if last == 0 or any(self._wide(i) for i in roots.values()) else last
        done: set[Inst] = set()
        passes = []
        for level in range(count):
            reduces = [i for i in self.trace.insts if i.kind == "reduce" and depth[i] == level + 1]
            here = [r for r, i in roots.items() if level == (count - 1 if self._wide(i) else max(depth[i] - 1, 0))]
            needed = self._needed([*reduces, *(roots[r] for r in here)], done)
            passes.append(Pass(tuple(self._body([i for i in self.trace.insts if i in needed], here))))
            done |= {i for i in needed if not self._wide(i)}
        return tuple(passes)

    def _wide(self, inst: Inst) -> bool:
        return bool(inst.axes & self.cols)

    def _stage(self, inst: Inst) -> tuple[int, bool]:
        """How many dependent reductions come before an instance; reductions go last among their equals.

        Before sums that are made while they are loaded, all else is loaded: compilers move no load across the exchange
        between threads that they end with.
        """
        if self.sums and inst.kind == "load" and inst.parts == 1 and not inst.lookups:
            return -1, False
        is_reduce = inst.kind == "reduce"
        return self.depth[inst] - is_reduce, is_reduce

    def _depths(self) -> dict[Inst, int]:
        depth: dict[Inst, int] = {}
        for inst in self.trace.insts:
            depth[inst] = max((depth[a] for a in inst.args), default=0) + (inst.kind == "reduce")
        return depth

    def _needed(self, wanted: Iterable[Inst], done: set[Inst]) -> set[Inst]:
        """``wanted`` and all they stand on, but for row values that an earlier pass left behind."""
        found: set[Inst] = set()
        stack = list(wanted)
        while stack:
            inst = stack.pop()
            if inst not in found and inst not in done:
                found.add(inst)
                stack.extend(inst.args)
        return found


def _narrows(inst: Inst) -> bool:
    """A rounding of an fp32 value to 16 bits."""
    return inst.kind == "cast" and inst.dtype in (DType.BF16, DType.F16) and inst.args[0].dtype is DType.F32


_SHORT = {"f32": "x", "f64": "x", "bf16": "h", "f16": "h"}
