"""The schedule stage: cover -> step. Kernels with tiles, buffers with layouts, calls in order, early frees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from megafuse.core.device import DeviceSpec
from megafuse.fusion.plan import Cover
from megafuse.ir.graph import Graph, Node
from megafuse.ir.types import Input, Opaque, Pick
from megafuse.ir.views import is_dense, memory_of, strided_view
from megafuse.schedule.choice import Known, nothing_known
from megafuse.schedule.direction import last_rows_first
from megafuse.schedule.kernel_plan import ChainDotPlan, ChainPlan, DotPlan, KernelPlan
from megafuse.schedule.kernels import KernelMaker
from megafuse.schedule.launches import share_launches
from megafuse.schedule.naming import Names
from megafuse.schedule.order import Work, collect_work, is_given, order_work
from megafuse.schedule.pools import with_pools
from megafuse.schedule.types import (
    Alloc,
    Buffer,
    Call,
    ChainDot,
    ChainPart,
    DotCall,
    DotPart,
    Free,
    KernelSchedule,
    Launch,
    OpaqueCall,
    PhaseSchedule,
    Step,
    Target,
    View,
)

TENSOR_COPIES_SINCE = 90  # compute capability, times ten, from which there is an engine for them


def build_step(
    cover: Cover, device: DeviceSpec, known: Known = nothing_known, *, finishers_alone: bool = False
) -> Step:
    """Schedule a cover. ``known(key)``: tiles to take for a kernel in place of the heuristic's, or None.

    ``finishers_alone``: see ``share_launches``.
    """
    return with_pools(_StepBuilder(cover, device, known, finishers_alone).run())


class _StepBuilder:
    def __init__(self, cover: Cover, device: DeviceSpec, known: Known, finishers_alone: bool) -> None:
        self.cover, self.graph, self.device = cover, cover.graph, device
        self.finishers_alone = finishers_alone
        self.maker = KernelMaker(cover, device, known)
        self.kernels = self.maker.run()
        self.names: dict[Node, str] = {}
        self.buffers: dict[Node, Buffer] = {}

    def run(self) -> Step:
        works = collect_work(self.graph, self.kernels, self.cover.materialised)
        kept = frozenset(memory_of(n, self.cover.materialised) for n in self.graph.outputs if n is not None)
        sizes = {n: n.type.nbytes for w in works for n in (*w.reads, *w.writes)}
        order = order_work(works, kept, sizes)
        shared = share_launches(order, self.device, self.finishers_alone)
        order = order if len(shared) == len(order) else order_work(shared, kept, sizes)
        self._name_values(order)
        saved = self._saved(order)
        self._make_buffers(order, saved)
        numbers = {id(w): n for n, w in enumerate(w for w in order if w.kernel is not None)}
        turned = last_rows_first(order, self.device)
        kernels = [(w.kernel, at in turned) for at, w in enumerate(order) if w.kernel is not None]
        schedules = tuple(self._kernel(kernel, n, last) for n, (kernel, last) in enumerate(kernels))
        forward = self._calls([w for w in order if w.forward], numbers, self._outputs_of(True) | set(saved))
        backward = self._calls([w for w in order if not w.forward], numbers, self._outputs_of(False), saved)
        return Step(
            buffers=tuple(self.buffers.values()),
            kernels=schedules,
            forward=forward,
            backward=backward,
            outputs=tuple(self._result(n) for n in self.graph.forward_outputs),
            grads=tuple(self._result(n) for n in self.graph.gradients),
            saved=tuple(self.names[n] for n in saved),
            names=dict(self.names),
            notes=tuple(self._notes(schedules)),
            refused=frozenset(key for key, _ in self.maker.problems),
        )

    def _notes(self, kernels: Sequence[KernelSchedule]) -> Iterator[str]:
        """What was known of kernels and not taken."""
        names = {k.key: k.name for k in kernels}
        for key, problem in dict.fromkeys(self.maker.problems):
            yield f"the tiles kept for {names.get(key, 'a kernel')} were not taken: {problem}"

    def _outputs_of(self, forward: bool) -> set[Node]:
        nodes = self.graph.forward_outputs if forward else self.graph.gradients
        return {memory_of(n, self.cover.materialised) for n in nodes if n is not None}

    def _name_values(self, order: Sequence[Work]) -> None:
        names = Names(self.graph.forward_nodes())
        for node in self.graph.inputs:
            self.names[node] = names.name(node)
        for work in order:
            for node in work.writes:
                if node not in self.names:
                    self.names[node] = names.name(node)

    def _saved(self, order: Sequence[Work]) -> list[Node]:
        """Values of forward (inputs included) that backward reads, in order of first use."""
        made_back = {n for w in order if not w.forward for n in w.writes}
        wanted = [n for w in order if not w.forward for n in w.reads if n not in made_back]
        wanted += [memory_of(n, self.cover.materialised) for n in self.graph.gradients if n is not None]
        tangents = {n for n in self.graph.inputs if isinstance(n.attrs, Input) and n.attrs.role == "tangent"}
        return [n for n in dict.fromkeys(wanted) if n not in tangents and n not in made_back]

    def _make_buffers(self, order: Sequence[Work], saved: Sequence[Node]) -> None:
        outputs, grads = self._outputs_of(True), self._outputs_of(False)
        for node in self.graph.inputs:
            attrs = node.attrs
            assert isinstance(attrs, Input)
            kind = "tangent" if attrs.role == "tangent" else "input"
            self._buffer(node, attrs.strides, kind, attrs.position)
        for work in order:
            for node in work.writes:
                kind = (
                    "output" if node in outputs else "grad" if node in grads else "saved" if node in saved else "temp"
                )
                self._buffer(node, self.maker.strides(node), kind)

    def _buffer(self, node: Node, strides: tuple[int, ...], kind: str, position: int = -1) -> None:
        self.buffers[node] = Buffer(self.names[node], node.shape, strides, node.dtype, kind, position)

    def _kernel(self, plan: KernelPlan, number: int, last_first: bool) -> KernelSchedule:
        phases = tuple(
            PhaseSchedule(
                p.trace,
                p.fixed,
                p.loop,
                p.tile,
                tuple((r, Target(self.names[n], at, n.dtype)) for r, n, at in p.stores),
                p.rules,
            )
            for p in plan.phases
        )
        made = "_".join(self.names[n] for n in plan.writes[:2])
        traffic = plan.read_bytes + sum(n.type.nbytes for n in plan.writes)
        name = f"k{number}_{made}"
        reads = tuple(self.names[n] for n in plan.reads)
        writes = tuple(self.names[n] for n in plan.writes)
        return KernelSchedule(
            name,
            phases,
            reads,
            writes,
            plan.num_warps,
            plan.num_stages,
            traffic,
            key=plan.key,
            finishes=plan.finishes,
            dot=None if plan.dot is None else self._dot(plan.dot),
            chain=None if plan.chain is None else self._chain(plan.chain),
            apart=plan.apart,
            last_first=last_first,
        )

    def _dot(self, plan: DotPlan) -> DotPart:
        a, b, *bias = map(self._view, plan.node.args)
        copies = self.device.arch >= TENSOR_COPIES_SINCE
        return DotPart(plan.node, a, b, bias[0] if bias else None, plan.tile, copies, plan.splits)

    def _chain(self, plan: ChainPlan) -> ChainPart:
        stages = tuple(s if isinstance(s, int) else self._chain_dot(s) for s in plan.stages)
        return ChainPart(plan.walk, stages, plan.tile, plan.rules)

    def _chain_dot(self, plan: ChainDotPlan) -> ChainDot:
        if plan.sums is None:
            matrix, *bias = map(self._view, plan.node.args[1:])
            return ChainDot(plan.node, plan.operands, matrix, bias[0] if bias else None)
        buffer = self.buffers[plan.sums]
        *parts, rows, cols = buffer.shape
        step = buffer.strides[-3] if math.prod(parts) > 1 else 0
        view = View(buffer.name, (math.prod(parts), rows, cols), (step, *buffer.strides[-2:]))
        return ChainDot(plan.node, plan.operands, sums=view)

    def _calls(
        self, works: Sequence[Work], numbers: Mapping[int, int], kept: set[Node], given: Sequence[Node] = ()
    ) -> tuple[Call, ...]:
        """Calls with allocations before and frees after; ``given`` values die with their last reader too."""
        last: dict[Node, int] = {}
        for n, work in enumerate(works):
            for node in (*work.reads, *work.writes):
                last[node] = n
        dying: dict[int, list[Node]] = {}
        for node, n in last.items():
            if node not in kept and (node in given or not is_given(node)):
                dying.setdefault(n, []).append(node)
        calls: list[Call] = []
        allocated: set[Node] = set()
        for n, work in enumerate(works):
            if work.node is None or not isinstance(work.node.attrs, Opaque):
                calls.extend(Alloc(self.names[w]) for w in work.writes if w not in allocated)
                allocated.update(work.writes)
            calls.append(self._call(work, numbers))
            calls.extend(Free(self.names[node]) for node in dying.get(n, ()))
        return tuple(calls)

    def _call(self, work: Work, numbers: Mapping[int, int]) -> Call:
        if work.kernel is not None:
            names = (*(self.names[n] for n in work.kernel.reads), *(self.names[n] for n in work.kernel.writes))
            return Launch(numbers[id(work)], names)
        node = work.node
        assert node is not None
        args = [self._view(a) for a in node.args]
        if isinstance(node.attrs, Opaque):
            return OpaqueCall(node.attrs.call, tuple(args), self._results(node, work), node.attrs.reason)
        return DotCall(self._view(node), args[0], args[1], args[2] if len(args) > 2 else None)

    def _results(self, node: Node, work: Work) -> tuple[str | None, ...]:
        attrs = node.attrs
        assert isinstance(attrs, Opaque)
        out: list[str | None] = [None] * len(attrs.results)
        first = next(i for i, r in enumerate(attrs.results) if r is not None)
        out[first] = self.names[node]
        for made in work.writes[1:]:
            assert isinstance(made.attrs, Pick)
            out[made.attrs.index] = self.names[made]
        return tuple(out)

    def _view(self, node: Node) -> View:
        """A strided view of the buffer that holds ``node``."""
        base = memory_of(node, self.cover.materialised)
        strides = self.buffers[base].strides
        if base is node:
            return View(self.names[base], node.shape, strides)
        view = strided_view(node, strides, base)
        assert view is not None, f"{node!r} is no view of {base!r}"
        return View(self.names[base], view.shape, view.strides, view.offset)

    def _result(self, node: Node | None) -> View | None:
        return None if node is None else self._view(node)


def wanted_strides(graph: Graph, out_strides: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Strides that outputs must have: the reference's for the module's, the input's (where dense) for gradients."""
    wanted = dict(enumerate(out_strides))
    for k, position in enumerate(graph.grad_of):
        node = graph.inputs[position]
        assert isinstance(node.attrs, Input)
        if is_dense(node.shape, node.attrs.strides):
            wanted[graph.num_forward + k] = node.attrs.strides
    return wanted
