"""Work, traffic and lifetimes."""

from __future__ import annotations

from ir_graphs import argument, graph_of
from megafuse.core.dtypes import DType
from megafuse.ir import analysis
from megafuse.ir.graph import Builder, Graph


def test_work_of_each_kind() -> None:
    b = Builder()
    x, w, bias = (argument(b, s, DType.BF16, i) for i, s in enumerate([(2, 5, 8), (2, 8, 3), (3,)]))
    assert analysis.flops(b.dot(x, w, DType.BF16)) == 2 * 30 * 8
    assert analysis.flops(b.dot(x, w, DType.BF16, bias)) == 2 * 30 * 8 + 30
    assert analysis.float_ops(b.map("exp", x)) == analysis.special_ops(b.map("exp", x)) == 80
    assert analysis.float_ops(b.reduce("sum", x, [0])) == 80
    assert analysis.float_ops(b.map("gt", x, 0.0)) == 80
    for free in (x, b.permute(x, (1, 0, 2)), b.cast(x, DType.F32), b.map("not", b.map("gt", x, 0.0))):
        assert analysis.flops(free) == 0
    assert analysis.special_ops(b.map("mul", x, 2.0)) == 0


def test_bytes() -> None:
    b = Builder()
    x = argument(b, (4, 3), DType.BF16)
    square = b.map("mul", x, x)
    assert (analysis.bytes_read(square), analysis.bytes_written(square)) == (24, 24)
    assert analysis.bytes_read(b.map("mul", x, 2.0)) == 24
    assert analysis.bytes_written(x) == 0
    assert analysis.total(graph_of(square, inputs=[x]), analysis.bytes_written) == 24


def test_kinds() -> None:
    b = Builder()
    x = argument(b, (4, 3))
    assert analysis.is_move(b.permute(x, (1, 0))) and not analysis.is_move(b.map("neg", x))
    assert analysis.is_narrowing(b.cast(x, DType.BF16)) and not analysis.is_narrowing(b.cast(x, DType.F64))
    assert analysis.is_free(b.iota((3,), 0)) and not analysis.is_free(x)


def test_lifetimes_users_and_saved_values() -> None:
    b = Builder()
    x, g = argument(b, (4,), position=0), argument(b, (4,), position=1)
    e = b.map("exp", x)
    y = b.map("add", e, 1.0)
    dx = b.map("mul", g, e)
    graph = Graph((x, g), (y, dx), 1, (0,))
    life = analysis.lifetimes(graph)
    end = len(graph.nodes)
    assert life[y].last == life[dx].last == end
    assert life[e].last == graph.nodes.index(dx) and life[x].last == graph.nodes.index(e)
    assert life[e].overlaps(life[y]) and not life[x].overlaps(life[dx])
    assert analysis.saved_values(graph) == [e]
    users = graph.users()
    assert analysis.single_user(users, x) is e and analysis.single_user(users, e) is None
    assert analysis.ancestors(dx) == {dx, g, e, x}
