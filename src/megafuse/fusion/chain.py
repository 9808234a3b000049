"""Chains: dots that share a row axis M and what is computed between them, row by row, in one kernel.

A *row value* has M rows: its leading dims hold M elements, the others are its columns, at most ``MOST_WIDTH``. Row
values are made by nests (maps, reductions over a row), by dots with a matrix that does not depend on the rows, and are
contracted by sums over the rows (gradients of weights and of biases). What is made in a chain is read there *in place*:
element (row, column) by the program that made it. All other reads make two chains, with memory between them.

Where dots have P problems, each with a matrix of its own, row values have M rows of each: ``[P, M, ...]`` or
``[M, P, ...]``, whichever lies as the dots read and make it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megafuse.core.dependencies import members
from megafuse.core.dtypes import DType
from megafuse.core.sizes import is_open
from megafuse.fusion.anchors import Anchors
from megafuse.fusion.units import number_units
from megafuse.ir.chain import Chain, RowDot, RowNest, Stage, SumDot, Walk, block, made_step, operand_load, row_step
from megafuse.ir.graph import Graph, Node, contiguous_strides
from megafuse.ir.index import Affine, Axis, Index, combine
from megafuse.ir.nest import Anchor, Nest, Root, Space
from megafuse.ir.trace import Inst, NestError, Trace, trace_nest
from megafuse.ir.types import Concat, Dot, Permute, Reduce, TensorType
from megafuse.ir.views import memory_of

MOST_WIDTH = 256
MOST_MATRIX = 128 * 1024  # bytes of one matrix in its block, which shared memory must hold beside row tiles
MOST_PLAIN = 64 * 64  # elements of it where fp32 products do without matrix units and tiles have several rows
LEAST_DOTS = 2
FLOATS = (DType.BF16, DType.F16, DType.F32)


@dataclass(frozen=True, eq=False)
class Member:
    """A stage that a chain may have. ``node`` is what it makes; ``sums``: it is complete only after the walk.

    ``in_place`` and ``apart`` are the values that it reads row by row, and those it reads otherwise.
    """

    node: Node
    stage: Stage
    sums: bool
    in_place: frozenset[Node]
    apart: frozenset[Node]


def chain_walks(graph: Graph) -> list[Walk]:
    """What chains may walk, the most frequent among the dots first."""
    counts: dict[Walk, int] = {}
    for node in graph.nodes:
        if not node.is_a(Dot) or any(is_open(n) for n in (*node.shape, node.args[0].shape[2])):
            continue
        problems, rows, cols = node.shape
        if rows > 1 and max(cols, node.args[0].shape[2]) <= MOST_WIDTH:
            walk = Walk(problems, rows)
            counts[walk] = counts.get(walk, 0) + 1
    return sorted((w for w, n in counts.items() if n > 1), key=lambda w: (-counts[w], -w.total, w))


class Finder:
    """The stages that chains of one ``walk`` can have in one graph, and the chains that these make."""

    def __init__(self, graph: Graph, anchors: Anchors, walk: Walk, plain: bool = False) -> None:
        """``plain``: fp32 products do without matrix units, on tiles of several rows."""
        self.graph, self.walk, self.memory, self.plain = graph, walk, anchors.materialised, plain
        self.forward = graph.forward_nodes()
        self.units = number_units(graph, anchors)
        self.ambiguous = walk.rows <= MOST_WIDTH
        self.steps: dict[Node, int | None] = {}  # between rows of what has them, as it is made
        self.wanted = set(self._wanted()) if walk.problems > 1 else set()
        self.members: dict[Node, Member] = {}
        self.unit_of: dict[Node, int] = {}
        for anchor, unit in self.units.of_anchor.items():
            self._keep(anchor.node, unit, None if anchor.part is not None else self._anchored(anchor))
        for node, unit in self.units.of_call.items():
            self._keep(node, unit, self._multiplied(node) if node.is_a(Dot) else None)

    def components(self, forward: bool) -> list[tuple[Member, ...]]:
        """Members of one direction that can run in one kernel each, in the order of the graph, dots in all of them."""
        mine = {n: m for n, m in self.members.items() if (n in self.forward) == forward}
        level = self._levels(mine, forward)
        group: dict[Node, set[Node]] = {n: {n} for n in mine}
        first: dict[tuple[Node, int], Node] = {}  # who else of a level reads a value row by row
        for node, member in mine.items():
            for read in member.in_place:
                inside = read in mine and level[read] == level[node] and not mine[read].sums
                near = read if inside else first.setdefault((read, level[node]), node)
                if group[near] is not group[node]:
                    joined = group[near] | group[node]
                    group.update(dict.fromkeys(joined, joined))
        found = {id(g): g for g in group.values() if sum(n.is_a(Dot) for n in g) >= LEAST_DOTS}
        return [tuple(mine[n] for n in self.graph.nodes if n in g) for g in found.values()]

    def again(self, wanted: Iterable[Member], dots: bool) -> tuple[Member, ...]:
        """Members of forward that make what ``wanted`` reads; ``dots`` among them, or only what follows from these."""
        found: dict[Node, Member] = {}
        stack = [n for m in wanted for n in m.in_place]
        while stack:
            node = stack.pop()
            member = self.members.get(node)
            if member is None or node not in self.forward or node in found or member.sums:
                continue
            if dots or not node.is_a(Dot):
                found[node] = member
                stack.extend(member.in_place)
        return tuple(found[n] for n in self.graph.nodes if n in found)

    def _keep(self, node: Node, unit: int, member: Member | None) -> None:
        self.unit_of[node] = unit
        if member is not None:
            self.members[node] = member

    def _levels(self, mine: Mapping[Node, Member], forward: bool) -> dict[Node, int]:
        """How often the longest way to a value leaves a chain: members of one level have nothing else between them."""
        node_of = {u: n for n, u in self.unit_of.items()}
        level: dict[int, int] = {}
        for unit, needs in enumerate(self.units.needs):
            node = node_of.get(unit)
            if node is None or (node in self.forward) != forward:
                continue
            level[unit] = max(
                (level[n] + self._leaves(mine, node_of[n], node) for n in members(needs) if n in level), default=0
            )
        return {n: level[self.unit_of[n]] for n in mine}

    @staticmethod
    def _leaves(mine: Mapping[Node, Member], made: Node, reader: Node) -> bool:
        """Whether the way from a value to its reader leaves the chain."""
        if made not in mine:
            return False
        return reader not in mine or mine[made].sums or made in mine[reader].apart or made not in mine[reader].in_place

    # --- what can be a stage ----------------------------------------------------------------------------------------

    def _anchored(self, anchor: Anchor) -> Member | None:
        """The anchor as a row value made by a nest, or as a reduction of one.

        Of two ways to find its rows, the one in which dots read it, or it reads what has been made.
        """
        node = anchor.node
        found = [] if node.is_a(Concat) else [self._made(node, nest) for nest in row_nests(node, self.walk)]
        ways = [way for way in found if way is not None]
        if not ways:
            return None
        member, self.steps[node] = max(ways, key=lambda way: ((node, way[1]) in self.wanted, -len(way[0].apart)))
        return member

    def _made(self, node: Node, nest: Nest) -> tuple[Member, int | None] | None:
        """A value as what a nest makes, and how far apart its rows lie."""
        try:
            trace = trace_nest(nest, self.memory)
        except NestError:
            return None
        (value,) = trace.roots.values()
        if value.axes != frozenset(trace.nest.space.sizes) - (
            nest.space.col_names if value.kind == "reduce" else set()
        ):
            return None  # what does not vary along rows and columns is no row value
        member = self._member(node, RowNest(trace.nest), nest.roots[0].by_rows, [trace])
        return member, made_step(trace.nest, self.walk)

    def _multiplied(self, dot: Node) -> Member | None:
        """The dot as rows times a matrix, or as a sum over rows."""
        a, b, *bias = dot.args
        inner = a.shape[2]
        if dot.shape[0] != self.walk.problems or dot.dtype not in FLOATS or not dot.dtype is a.dtype is b.dtype:
            return None
        if any(is_open(n) for n in (*dot.shape, inner)):
            return None
        if dot.shape[1] == self.walk.rows and self._fits(inner, dot.shape[2], dot.dtype):
            trace = self._operand(a)
            if trace is not None:
                matrices = frozenset(memory_of(n, self.memory) for n in (b, *bias))
                return self._member(dot, RowDot(dot, trace.nest), False, [trace], matrices)
        if inner == self.walk.rows and self._fits(dot.shape[1], dot.shape[2], dot.dtype) and not bias:
            left, right = self._operand(a, turned=True), self._operand(b)
            if left is not None and right is not None:
                return self._member(dot, SumDot(dot, left.nest, right.nest), True, [left, right])
        return None

    def _fits(self, rows: int, cols: int, dtype: DType) -> bool:
        """Whether a kernel can hold a matrix, or a sum over rows, of this shape."""
        size = block(rows) * block(cols)
        few = size <= MOST_PLAIN or not self.plain or dtype is not DType.F32
        return max(rows, cols) <= MOST_WIDTH and size * dtype.size <= MOST_MATRIX and few

    def _operand(self, node: Node, turned: bool = False) -> Trace | None:
        """The walk that reads an operand as rows; None where it does not lie in rows of the chain."""
        try:
            trace = trace_nest(operand_nest(node, turned), self.memory)
        except NestError:
            return None
        load = operand_load(trace)
        if load is None or (self.ambiguous and not _row_major(load, trace, self.walk)):
            return None
        if self.walk.problems > 1 and not trace.nest.space.row_names <= load.axes:
            return None  # all problems have these rows: the other operand is no matrix of a problem
        return trace

    def _wanted(self) -> Iterator[tuple[Node, int]]:
        """How far apart rows lie in what dots read."""
        for dot in self.graph.nodes:
            if not dot.is_a(Dot) or dot.shape[0] != self.walk.problems:
                continue
            a, b, *_ = dot.args
            for operand, turned in ((a, False), (a, True), (b, False)):
                rows = operand.shape[2 if turned else 1]
                trace = self._operand(operand, turned) if rows == self.walk.rows else None
                for load in trace.loads() if trace else ():
                    step = row_step(load, trace.nest.space, self.walk) if trace else None
                    if step is not None:
                        yield load.node, step

    def _member(
        self, node: Node, stage: Stage, sums: bool, traces: Sequence[Trace], matrices: frozenset[Node] = frozenset()
    ) -> Member:
        loads = [(i, t) for t in traces for i in t.loads()]
        apart = {i.node for i, t in loads if not self._in_place(i, t)}
        return Member(node, stage, sums, frozenset(i.node for i, _ in loads), frozenset(apart | matrices))

    def _in_place(self, load: Inst, trace: Trace) -> bool:
        """Whether a load reads row by row, where rows lie as they are made."""
        step, node = row_step(load, trace.nest.space, self.walk), load.node
        made = node.shape[2] if node.is_a(Dot) else self.steps.get(node, step)
        return step is not None and step == made


def row_nests(node: Node, walk: Walk) -> Iterator[Nest]:
    """The nests that compute ``node`` with M rows of P problems: a map, a reduction over the columns, or over all rows.

    Two where problems may come before the rows, or behind them.
    """
    attrs = node.attrs
    shape = (node.args[0] if isinstance(attrs, Reduce) else node).shape
    if any(is_open(n) for n in shape):
        return
    cut = _cut(shape, walk.total)
    if cut is None or math.prod(shape[cut:]) > MOST_WIDTH:
        return
    for letters, outer in (("pr", walk.problems), ("rp", walk.rows))[: 1 if walk.problems == 1 else 2]:
        middle = _cut(shape[:cut], outer)
        if middle is not None:
            axes = _axes(letters[0], shape[:middle]) + _axes(letters[1], shape[middle:cut])
            nest = _row_nest(node, sorted(axes, key=lambda a: a.name[0]), axes + _axes("c", shape[cut:]))
            if nest is not None:
                yield nest


def _cut(shape: Sequence[int], size: int) -> int | None:
    """How many leading dims have ``size`` elements, those of one element behind them included."""
    return next((d for d in range(len(shape), -1, -1) if math.prod(shape[:d]) == size), None)


def _row_nest(node: Node, rows: Sequence[Axis], axes: Sequence[Axis]) -> Nest | None:
    """The nest whose ``rows`` are those of some ``axes``, one for each dim; None for reductions over other axes."""
    attrs, index = node.attrs, _index(axes)
    space = Space(_real(rows), _real(axes[len(rows) :]))
    if not isinstance(attrs, Reduce):
        return Nest(space, (Root(Anchor(node), index),), flexible=True)
    kept = _index([a for d, a in enumerate(axes) if d not in attrs.axes])
    reduced = {axes[d] for d in attrs.axes if axes[d].size != 1}
    by_rows = reduced in (set(space.rows), {a for a in space.rows if a.name[0] == "r"})
    if not by_rows and (reduced != set(space.cols) or not space.cols):
        return None
    return Nest(space, (Root(Anchor(node), kept, index, by_rows=by_rows),))


def operand_nest(node: Node, turned: bool) -> Nest:
    """The nest that reads an operand ``[P, M, K]`` (``turned``: ``[P, K, M]``) of a dot as M rows of P problems."""
    order = (0, 2, 1) if turned else (0, 1, 2)
    shape = tuple(node.shape[d] for d in order)
    view = Node(-1 - node.uid, Permute(order), (node,), TensorType(shape, node.dtype), node.origin)
    axes = [Axis(name, size) for name, size in zip(("p0", "r0", "c0"), view.shape, strict=True)]
    return Nest(Space(_real(axes[:2]), _real(axes[2:])), (Root(Anchor(view), _index(axes)),))


def _row_major(load: Inst, trace: Trace, walk: Walk) -> bool:
    """Whether neighbouring columns lie nearer to one another than neighbouring rows, in a logically flat value."""
    steps = dict(combine(load.index, contiguous_strides(load.node.shape)).terms)
    space = trace.nest.space
    rows = [steps.get(a.name, 0) for a in walk.axes(space)[1]]
    cols = [steps.get(a.name, 0) for a in space.cols]
    return min(map(abs, rows), default=0) >= max(map(abs, cols), default=0) and 0 not in rows


def ordered(members_: Sequence[Member]) -> list[Member]:
    """Members in an order in which they can run: a sum over rows as soon as its operands are there.

    Values thus die early, and few are held at a time.
    """
    made: set[Node] = set()
    names = {m.node for m in members_}
    waiting = [m for m in members_ if m.sums]
    out: list[Member] = []
    for member in (None, *(m for m in members_ if not m.sums)):
        if member is not None:
            out.append(member)
            made.add(member.node)
        ready = [m for m in waiting if m.in_place & names <= made]
        waiting = [m for m in waiting if m not in ready]
        out.extend(ready)
    return [*out, *waiting]


def make_chain(walk: Walk, own: Sequence[Member], again: Sequence[Member], forward: bool) -> Chain:
    """The chain of some members, which computes ``again`` once more."""
    stages = tuple(m.stage for m in ordered((*again, *own)))
    return Chain(walk.rows, stages, forward, frozenset(m.node for m in again), walk.problems)


def _axes(letter: str, shape: Sequence[int]) -> list[Axis]:
    """One axis per dim; those of more than one element are numbered."""
    numbers = itertools.count()
    return [Axis(f"{letter}{next(numbers)}" if n != 1 else f"{letter}_{d}", n) for d, n in enumerate(shape)]


def _real(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    return tuple(a for a in axes if a.size != 1)


def _index(axes: Sequence[Axis]) -> Index:
    return tuple(Affine(((a.name, 1),)) if a.size != 1 else Affine(()) for a in axes)
