"""Chains: several dots of one row axis and what is computed between them, as data.

What a stage makes is read by later stages *in place*: element (row, column) by the program that made it. All other
reads are of memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.core.sizes import ceil_div
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.index import Affine, Axis, axis_index, combine
from megafuse.ir.nest import Nest, Space
from megafuse.ir.trace import Inst, Memory, Trace, trace_nest
from megafuse.ir.views import memory_of

MOST_TURNED = 12  # products in tiles of columns by rows: with more, registers run out
NARROW = (16, 32)  # rows of narrow tiles
UNIT = 64  # features that matrix units take at once, and 16-bit elements of a full line of shared memory


def block(width: int) -> int:
    """Elements in which an edge of a matrix or the columns of rows are held: a power of two that matrix units take."""
    return max(16, 1 << (width - 1).bit_length())


@dataclass(frozen=True)
class Rows:
    """The row axis of a chain: ``each`` rows for each of ``problems`` matrices, as in ``[P, M, K] x [P, K, N]``.

    Spaces of chains have axes of the problems first. A value in memory that holds all rows has a *run*, the number of
    rows of one problem that lie together: M in ``[P, M, K]``, 1 in ``[M, P, K]``, M2 in ``[M1, P, M2, K]``.
    """

    each: int
    problems: int = 1

    @property
    def count(self) -> int:
        """Rows of all problems."""
        return self.each * self.problems

    def __str__(self) -> str:
        return str(self.each) if self.problems == 1 else f"{self.problems} x {self.each}"

    def cut(self, space: Space) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """The axes of a space's problems, and those of its rows."""
        at, found = 0, 1
        while found < self.problems:
            found *= space.rows[at].size
            at += 1
        assert found == self.problems
        return space.rows[:at], space.rows[at:]

    def place(self, node: Node, index: Sequence[Affine], space: Space) -> int | None:
        """The run of a value that is indexed by (problem, row, column) in place, or by rows where it has no columns.

        None where an element is read elsewhere than at its own row and column.
        """
        width, rest = divmod(node.type.numel, self.count)
        found = combine(index, contiguous_strides(node.shape))
        if rest or not width or found.const or (width > 1 and width != space.num_cols):
            return None
        fixed, loop = self.cut(space)
        run = self.each if self.problems == 1 else dict(found.terms).get(fixed[-1].name, 0) // width
        if run < 1 or self.each % run:
            return None
        want = dict(axis_index(fixed).scale(run * width).terms)
        sizes = {a.name: a.size for a in loop}
        for name, step in axis_index(loop).terms:
            if step < run < step * sizes[name]:
                return None
            want[name] = step * width * (1 if step < run else self.problems)
        cols = axis_index(space.cols) if width > 1 else Affine(())
        return run if dict(found.terms) == {**want, **dict(cols.terms)} else None


@dataclass(frozen=True)
class RowNest:
    """Computes one value, the nest's only root, from rows of others: element by element, or by reductions over a row.

    A root ``by_rows`` is a sum over the chain's rows, complete only when all of them are walked.
    """

    nest: Nest


@dataclass(frozen=True)
class RowDot:
    """``[P, M, K] x [P, K, N]``: rows times a matrix that does not depend on them. ``rows`` reads ``[P, M, K]``."""

    node: Node
    rows: Nest


@dataclass(frozen=True)
class SumDot:
    """``[P, K, M] x [P, M, N]``: contracts the rows, as a weight's gradient does.

    ``left`` reads ``[P, M, K]``, ``right`` ``[P, M, N]``.
    """

    node: Node
    left: Nest
    right: Nest


Stage = RowNest | RowDot | SumDot


@dataclass(frozen=True)
class Chain:
    """Several dots that share one row axis, and what is computed between them, in one kernel.

    ``stages`` are in order; a value that a stage makes is read by later ones where it was computed, row by row.
    ``again``: forward values that a chain of backward computes once more.
    """

    rows: Rows
    stages: tuple[Stage, ...]
    forward: bool
    again: frozenset[Node] = frozenset()

    @property
    def dots(self) -> tuple[RowDot | SumDot, ...]:
        """The dots, in order."""
        return tuple(s for s in self.stages if not isinstance(s, RowNest))


def made_by(stage: Stage) -> Node:
    """The value that a stage makes."""
    return stage.nest.roots[0].anchor.node if isinstance(stage, RowNest) else stage.node


def nests_of(stage: Stage) -> tuple[Nest, ...]:
    """The walks of a stage."""
    if isinstance(stage, RowNest):
        return (stage.nest,)
    return (stage.rows,) if isinstance(stage, RowDot) else (stage.left, stage.right)


def matrices_of(stage: Stage) -> tuple[Node, ...]:
    """The operands of a stage that do not have the chain's rows."""
    return stage.node.args[1:] if isinstance(stage, RowDot) else ()


def is_sum(stage: Stage) -> bool:
    """Whether the stage sums over the rows."""
    return isinstance(stage, SumDot) or (isinstance(stage, RowNest) and stage.nest.roots[0].by_rows)


def sum_edges(stage: Stage) -> tuple[int, int]:
    """Rows and columns of a sum over the rows of one problem."""
    if isinstance(stage, RowNest):
        return 1, stage.nest.space.num_cols
    return stage.node.shape[1], stage.node.shape[2]


def chunks_at_once(rows: Rows, tile: int, programs: int) -> int:
    """Into how many chunks the rows of a problem are cut, for so many programs at once; each has a tile at least."""
    return min(ceil_div(rows.each, tile), max(1, programs // rows.problems))


def widths_of(chain: Chain) -> tuple[int, ...]:
    """Columns of all row values, and edges of all matrices and sums."""
    walked = [n.space.num_cols for s in chain.stages for n in nests_of(s)]
    return (*walked, *itertools.chain(*(s.node.args[1].shape[1:] for s in chain.dots if isinstance(s, RowDot))))


def turned(chain: Chain, device: DeviceSpec) -> bool:
    """Whether its tiles are columns by rows: then operands serve products and sums over the rows alike.

    Without sums, where tiles have few rows: columns fill the matrix units. Only with columns that fill those of all
    warps, and the lines of shared memory: ptxas 12.8 loses parts of the addresses of operands whose lines differ in
    width.
    """
    if len(chain.dots) > MOST_TURNED or chain.dots[0].node.dtype is DType.F32:
        return False
    edges = [block(n) for n in widths_of(chain)]
    fills = min(edges) >= UNIT and max(edges) <= 2 * UNIT
    sums = any(map(is_sum, chain.stages))
    return fills and (sums or turned_rows(chain.rows, sums, device) < UNIT)


def turned_rows(rows: Rows, sums: bool, device: DeviceSpec) -> int:
    """Rows of tiles that are columns by rows: fewer than fill a line of shared memory where programs would be idle.

    Each program leaves its part of the ``sums`` over the rows: then a quarter of the device is enough.
    """
    programs = device.sms // 4 if sums else device.sms
    narrow = (n for n in NARROW if device.narrow_tiles and rows.problems * ceil_div(rows.each, n) <= programs)
    return next(narrow, UNIT)


def external_loads(chain: Chain, traces: Mapping[Nest, Trace]) -> Iterator[tuple[Inst, Trace]]:
    """The loads of a chain that read memory: of what it does not make itself, or makes but reads otherwise."""
    made: dict[Node, int | None] = {}
    for stage in chain.stages:
        for nest in nests_of(stage):
            trace = traces[nest]
            for load in trace.loads():
                run = read_in_place(load, trace.nest.space, chain.rows)
                if run is None or made.get(load.node) != run:
                    yield load, trace
        if not is_sum(stage):
            made[made_by(stage)] = run_of(stage, chain.rows)


def chain_traces(chain: Chain, memory: Memory) -> dict[Nest, Trace]:
    """The traces of all walks of a chain."""
    return {nest: trace_nest(nest, memory) for stage in chain.stages for nest in nests_of(stage)}


def external_reads(chain: Chain, memory: Memory) -> tuple[Node, ...]:
    """The values in memory that a chain reads, matrices included."""
    traces = chain_traces(chain, memory)
    rows = [load.node for load, _ in external_loads(chain, traces)]
    matrices = [memory_of(n, memory) for s in chain.stages for n in matrices_of(s)]
    return tuple(dict.fromkeys((*rows, *matrices)))


def read_in_place(load: Inst, space: Space, rows: Rows) -> int | None:
    """The run of a value that a load reads in place; see ``Rows.place``."""
    return None if load.lookups else rows.place(load.node, load.index, space)


def run_of(stage: Stage, rows: Rows) -> int | None:
    """The run of the row value that a stage makes."""
    if not isinstance(stage, RowNest):
        return rows.each
    return rows.place(made_by(stage), stage.nest.roots[0].index, stage.nest.space)


def operand_load(trace: Trace) -> Inst | None:
    """The one load that an operand's walk is, if it is nothing else."""
    (root,) = trace.roots.values()
    return root if root.kind == "load" and not root.guards and not root.lookups else None
