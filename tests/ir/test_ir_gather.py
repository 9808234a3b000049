"""Loads by index in graphs: what they mean, and what a nest that reads a table loads."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ir_graphs import argument, graph_of
from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Node
from megafuse.ir.index import Affine, Axis
from megafuse.ir.interpret import Mode, evaluate
from megafuse.ir.nest import Anchor, Nest, Root, Space
from megafuse.ir.printer import format_graph
from megafuse.ir.rewrite import rewrite
from megafuse.ir.rules import SIMPLIFY
from megafuse.ir.trace import Lookup, Memory, NestError, Trace, trace_nest
from megafuse.ir.verify import verify

F32, I64 = DType.F32, DType.I64
INDEX = np.array([[2, -1, 0], [5, 3, 4]])  # of tables of 4: the last of each row, and what stands before 0, is outside


@pytest.mark.parametrize("mode", ["native", "f64"])
@pytest.mark.parametrize("axis", [0, 1])
def test_elements_at_an_index_and_nothing_outside(mode: Mode, axis: int) -> None:
    b = Builder()
    shape = (4, 3) if axis == 0 else (2, 4)
    table, index = argument(b, shape, DType.BF16), argument(b, INDEX.shape, I64, 1)
    graph = graph_of(b.gather(table, index, axis), inputs=(table, index))
    verify(graph)
    values = np.arange(np.prod(shape)).reshape(shape).astype(ml_dtypes.bfloat16)
    (got,) = evaluate(graph, [values, INDEX], mode=mode)
    assert got is not None
    for (r, c), i in np.ndenumerate(INDEX):
        want = values[i % 4, c] if axis == 0 else values[r, i % 4]
        assert np.isnan(got[r, c]) if not 0 <= i < 4 else got[r, c] == want


@pytest.mark.parametrize(("dtype", "nothing"), [(I64, 0), (DType.U8, 0), (DType.BOOL, False)])
def test_outside_of_integers_is_zero_and_empty_tables_have_no_inside(dtype: DType, nothing: int) -> None:
    for size in (4, 0):
        b = Builder()
        table, index = argument(b, (size,), dtype), argument(b, (3,), I64, 1)
        graph = graph_of(b.gather(table, index, 0), inputs=(table, index))
        (got,) = evaluate(graph, [np.ones(size), np.array([-1, size, size + 9])])
        assert got is not None and got.tolist() == [nothing] * 3


def test_text_and_rewriting_keep_it() -> None:
    b = Builder()
    table, index = argument(b, (4, 3)), argument(b, (2, 1), I64, 1)
    graph = graph_of(b.map("neg", b.gather(table, b.expand(index, (2, 3)), 0)), inputs=(table, index))
    assert "gather(%0, %2, axis=0)" in format_graph(graph)
    assert [n.op for n in rewrite(graph, SIMPLIFY, "rules").nodes] == [n.op for n in graph.nodes]


# --- what a nest loads ------------------------------------------------------------------------------------------------


def traced(node: Node, *memory: Node) -> Trace:
    """The nest of ``node`` [R, C], one axis a dim."""
    rows, cols = Axis("r", node.shape[0]), Axis("c", node.shape[1])
    root = Root(Anchor(node), (Affine((("r", 1),)), Affine((("c", 1),))))
    return trace_nest(Nest(Space((rows,), (cols,)), (root,)), Memory(memory, memory))


def table_load(trace: Trace, table: Node) -> tuple[tuple[Affine, ...], tuple[Lookup, ...], list[str]]:
    """Index, lookups and the kinds of what the lookups read, of the one load of ``table``."""
    (load,) = (i for i in trace.loads() if i.node is table)
    return load.index, load.lookups, [a.kind for a in load.args]


def rows_of(b: Builder, table: Node, count: int) -> tuple[Node, Node]:
    """``count`` rows of a matrix: the index and the rows."""
    index = argument(b, (count,), I64, 1)
    return index, b.gather(table, b.expand(b.reshape(index, (count, 1)), (count, table.shape[1])), 0)


def test_an_index_by_row_is_read_once_a_row() -> None:
    b = Builder()
    table = argument(b, (50, 8))
    index, rows = rows_of(b, table, 6)
    trace = traced(b.map("mul", rows, 2.0), table, index)
    assert table_load(trace, table) == ((Affine(()), Affine((("c", 1),))), (Lookup(0, 1),), ["load", "within"])
    (read,) = (i for i in trace.loads() if i.node is index)
    assert read.axes == {"r"}


def test_moves_and_functions_of_a_table_are_computed_where_it_is_read() -> None:
    b = Builder()
    table = argument(b, (8, 101))
    rows = b.slice(b.permute(b.map("exp", table), (1, 0)), (99, 0), (50, 8), (-2, 1))
    _, found = rows_of(b, rows, 6)
    trace = traced(found, table, found.args[1].args[0].args[0])
    assert table_load(trace, table) == ((Affine((("c", 1),)), Affine((), 99)), (Lookup(1, -2),), ["load", "within"])


def test_a_gather_of_a_gather_has_two_lookups_and_no_memory_between() -> None:
    b = Builder()
    table = argument(b, (4, 5, 6))
    i, j = argument(b, (7,), I64, 1), argument(b, (7,), I64, 2)
    first = b.gather(b.permute(table, (1, 0, 2)), b.expand(b.reshape(i, (1, 7, 1)), (5, 7, 6)), 1)
    both = b.gather(first, b.expand(b.reshape(j, (1, 7, 1)), (5, 7, 1)), 2)
    trace = traced(b.reshape(both, (5, 7)), table, i, j)
    _, lookups, kinds = table_load(trace, table)
    assert set(lookups) == {Lookup(0, 1), Lookup(2, 1)} and kinds == ["load", "within"] * 2


def test_a_table_of_other_dims_is_read_by_address_where_it_is_contiguous() -> None:
    b = Builder()
    table = argument(b, (3, 5, 8))
    index, rows = rows_of(b, b.reshape(table, (15, 8)), 6)
    _, lookups, _ = table_load(traced(rows, table, index), table)
    assert lookups == (Lookup(2, 8),)
    with pytest.raises(NestError, match="cannot be split") as caught:
        trace_nest(traced(rows, table, index).nest, Memory((table, index)))
    assert caught.value.culprit is table


@pytest.mark.parametrize("kind", ["pad", "concat", "iota"])
def test_what_cannot_be_read_by_index_wants_memory(kind: str) -> None:
    b = Builder()
    x = argument(b, (5, 8))
    made = {
        "pad": lambda: b.pad(x, (1, 0), (7, 8)),
        "concat": lambda: b.concat([x, b.map("neg", x)], 0),
        "iota": lambda: b.iota((5, 8), 0),
    }
    table = made[kind]()
    index, rows = rows_of(b, table, 6)
    with pytest.raises(NestError, match="read by index") as caught:
        traced(rows, x, index)
    assert caught.value.culprit is table


def test_an_index_that_counts_is_a_slice_where_it_stays_inside() -> None:
    """Also where it is in memory for others; where it may leave the table, it is looked up."""
    b = Builder()
    for rows, lookups in ((9, 0), (6, 0), (5, 1)):
        table, count = argument(b, (rows, 8)), b.iota((6,), 0)
        found = b.gather(table, b.expand(b.reshape(count, (6, 1)), (6, 8)), 0)
        trace = traced(found, table, count)
        (load,) = trace.loads()
        assert len(load.lookups) == lookups
        assert load.index == (Affine(()) if lookups else Affine((("r", 1),)), Affine((("c", 1),)))


def test_an_index_that_is_known_needs_no_lookup() -> None:
    b = Builder()
    table = argument(b, (5, 8))
    for known, loads in ((3, 1), (5, 0), (-1, 0)):
        rows = b.gather(table, b.broadcast(b.const(known, I64), (2, 8)), 0)
        trace = traced(rows, table)
        assert len(trace.loads()) == loads and not any(i.lookups for i in trace.insts)
