"""Chains: several dots of one row axis and what is computed between them, as data.

What a stage makes is read by later stages *in place*: element (row, column) by the program that made it. All other
reads are of memory.

Dots of several problems, ``[P, M, K] x [P, K, N]``, have the rows of each problem: a program walks those of one. The
walks of such a chain have the axes of P in front of those of M, whichever of them memory has first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megafuse.core.device import ACCESS_BYTES, DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.core.sizes import ceil_div
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.index import Affine, Axis, Index, axis_index, combine
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
class Held:
    """A matrix of each problem as a chain holds it: ``shape`` and ``steps`` of its block, the contiguous side last.

    So a matrix and its transpose, at ``offset`` in the same ``memory``, are one.
    """

    memory: object
    offset: int
    problem: int
    shape: tuple[int, int]
    steps: tuple[int, int]


def held_block(memory: object, offset: int, shape: tuple[int, int], strides: tuple[int, int, int]) -> tuple[Held, bool]:
    """The block of a matrix with ``strides`` of problems, rows and columns, and whether it is the other way round."""
    problem, row, col = strides
    flips = col != 1 and (row == 1 or row < col)
    if flips:
        return Held(memory, offset, problem, shape[::-1], (col, row)), True
    return Held(memory, offset, problem, shape, (row, col)), False


@dataclass(frozen=True, order=True)
class Walk:
    """What a chain walks: so many ``rows`` of each of ``problems``."""

    problems: int
    rows: int

    def __str__(self) -> str:
        return f"{self.rows} rows" + f" of {self.problems} problems" * (self.problems > 1)

    @property
    def total(self) -> int:
        """Rows of all problems."""
        return self.problems * self.rows

    def tiles(self, rows: int) -> int:
        """Tiles of so many rows, none of which has rows of two problems."""
        return self.problems * ceil_div(self.rows, rows)

    def tiles_each(self, rows: int, at_once: int) -> int:
        """Tiles of so many rows that each program walks, where so many programs run ``at_once``.

        A program has rows of one problem. Where as many programs of each as run at once would leave others idle, there
        are up to twice as many, one after the other; each takes as long to start as to work on a tile.
        """
        tiles = ceil_div(self.rows, rows)
        least, most = (ceil_div(tiles, max(1, n * at_once // self.problems)) for n in (2, 1))

        def end(each: int) -> int:
            return ceil_div(self.problems * ceil_div(tiles, each), at_once) * (each + 1)

        return min(range(most, least - 1, -1), key=end)

    def axes(self, space: Space) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """The row axes of a walk: those of the problems, those of the rows."""
        count, size = 0, 1
        while size < self.problems:
            size, count = size * space.rows[count].size, count + 1
        return space.rows[:count], space.rows[count:]


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

    ``rows`` is M, ``problems`` is P. ``stages`` are in order; a value that a stage makes is read by later ones where it
    was computed, row by row. ``again``: forward values that a chain of backward computes once more.
    """

    rows: int
    stages: tuple[Stage, ...]
    forward: bool
    again: frozenset[Node] = frozenset()
    problems: int = 1

    @property
    def walk(self) -> Walk:
        """Problems and rows."""
        return Walk(self.problems, self.rows)

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


def only_sums(chain: Chain) -> bool:
    """Whether it multiplies values in memory into sums over the rows, does nothing else, and can load them ahead."""
    return chain.problems == 1 and all(isinstance(s, SumDot) and loads_ahead(s.node) for s in chain.stages)


def loads_ahead(dot: Node) -> bool:
    """Whether rows of its operands can go from memory to shared memory, and from there to matrix units.

    They are of a 16-bit type and whole accesses. For fp32 products, matrix units are not trusted.
    """
    whole = (n * dot.dtype.size % ACCESS_BYTES == 0 for n in dot.shape[1:])
    return dot.dtype in (DType.BF16, DType.F16) and all(whole)


def widths_of(chain: Chain) -> tuple[int, ...]:
    """Columns of all row values, and edges of all matrices and sums."""
    walked = [n.space.num_cols for s in chain.stages for n in nests_of(s)]
    return (*walked, *itertools.chain(*(s.node.args[1].shape[1:] for s in chain.dots if isinstance(s, RowDot))))


def turned(chain: Chain, device: DeviceSpec) -> bool:
    """Whether its tiles are columns by rows: then operands serve products and sums over the rows alike.

    Without sums, where tiles have few rows: columns fill the matrix units. Where there are only sums of 16-bit rows,
    matrix units take either from what was loaded.
    """
    sums = any(map(is_sum, chain.stages))
    return can_turn(chain) and (sums or turned_rows(chain.walk, sums, device) < UNIT)


def can_turn(chain: Chain) -> bool:
    """Whether its tiles may be columns by rows.

    Only with columns that fill the matrix units of all warps, and the lines of shared memory: ptxas 12.8 loses parts of
    the addresses of operands whose lines differ in width.
    """
    if len(chain.dots) > MOST_TURNED or chain.dots[0].node.dtype is DType.F32 or only_sums(chain):
        return False
    edges = [block(n) for n in widths_of(chain)]
    return min(edges) >= UNIT and max(edges) <= 2 * UNIT


def turned_rows(walk: Walk, sums: bool, device: DeviceSpec) -> int:
    """Rows of tiles that are columns by rows: fewer than fill a line of shared memory where programs would be idle.

    Each program leaves its part of the ``sums`` over the rows: then a quarter of the device is enough.
    """
    programs = device.sms // 4 if sums else device.sms
    narrow = (n for n in NARROW if device.narrow_tiles and walk.tiles(n) <= programs)
    return next(narrow, UNIT)


def external_loads(chain: Chain, traces: Mapping[Nest, Trace]) -> Iterator[tuple[Inst, Trace]]:
    """The loads of a chain that read memory: of what it does not make itself, or makes but reads otherwise."""
    made: dict[Node, int | None] = {}
    for stage in chain.stages:
        for nest in nests_of(stage):
            trace = traces[nest]
            for load in trace.loads():
                step = row_step(load, trace.nest.space, chain.walk)
                if step is None or made.get(load.node) != step:
                    yield load, trace
        if isinstance(stage, RowDot):
            made[stage.node] = stage.node.shape[2]
        elif isinstance(stage, RowNest) and not is_sum(stage):
            made[made_by(stage)] = made_step(traces[stage.nest].nest, chain.walk)


def chain_traces(chain: Chain, memory: Memory) -> dict[Nest, Trace]:
    """The traces of all walks of a chain."""
    return {nest: trace_nest(nest, memory) for stage in chain.stages for nest in nests_of(stage)}


def external_reads(chain: Chain, memory: Memory) -> tuple[Node, ...]:
    """The values in memory that a chain reads, matrices included."""
    traces = chain_traces(chain, memory)
    rows = [load.node for load, _ in external_loads(chain, traces)]
    matrices = [memory_of(n, memory) for s in chain.stages for n in matrices_of(s)]
    return tuple(dict.fromkeys((*rows, *matrices)))


def row_step(load: Inst, space: Space, walk: Walk) -> int | None:
    """How far apart rows lie in a row value that a load reads at (row, column), or at its rows' only column.

    None where the load reads anything else. Problems come before rows in the value, or rows before problems: values of
    several problems are the same only where their rows lie alike.
    """
    return None if load.lookups else _step(load.node, load.index, space, walk)


def made_step(nest: Nest, walk: Walk) -> int | None:
    """How far apart rows lie in the row value that a nest makes."""
    (root,) = nest.roots
    return _step(root.anchor.node, root.index, nest.space, walk)


def _step(node: Node, index: Index, space: Space, walk: Walk) -> int | None:
    """Elements between two rows of ``node``, whose element (problem, row, column) has ``index``; None if it has not."""
    if node.type.numel % walk.total:
        return None
    width = node.type.numel // walk.total
    if width > 1 and width != space.num_cols:
        return None
    col = axis_index(space.cols) if width > 1 else Affine(())
    found = combine(index, contiguous_strides(node.shape))
    if found.const:
        return None
    problems, rows = map(axis_index, walk.axes(space))
    for problem, row in ((walk.rows * width, width), (width, walk.problems * width)):
        if dict(found.terms) == dict((*problems.scale(problem).terms, *rows.scale(row).terms, *col.terms)):
            return row
    return None


def operand_load(trace: Trace) -> Inst | None:
    """The one load that an operand's walk is, if it is nothing else."""
    (root,) = trace.roots.values()
    return root if root.kind == "load" and not root.guards and not root.lookups else None
