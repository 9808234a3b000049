"""Values computed once more: kept apart from the first computation by every rewrite, equal in value."""

from __future__ import annotations

import numpy as np

from ir_graphs import argument, random_inputs
from megafuse.core.dtypes import DType
from megafuse.ir.copies import with_copies
from megafuse.ir.graph import Builder, Graph, Node
from megafuse.ir.interpret import evaluate
from megafuse.ir.printer import format_graph
from megafuse.ir.rewrite import rewrite
from megafuse.ir.rules import SIMPLIFY
from megafuse.ir.types import Again, Dot, Map, Reshape
from megafuse.ir.verify import verify


def checkpointed() -> Graph:
    """``exp(x @ w)``, whose gradient by x reads the product and its exponential as computed again."""
    b = Builder()
    x, w = argument(b, (1, 4, 6), position=0), argument(b, (1, 6, 6), position=1)

    def product(x: Node, w: Node) -> Node:
        return b.dot(b.reshape(b.permute(x, (0, 1, 2)), (1, 4, 6)), b.permute(w, (0, 2, 1)), DType.F32)

    first = b.map("exp", product(x, w))
    inner = product(b.again(x), b.again(w))
    grad = b.map("mul", b.map("exp", inner), b.map("sin", inner))
    return Graph((x, w), (first, grad), 1, (0,))


def test_again_survives_rewriting_and_leaves_nodes_of_its_own() -> None:
    graph = checkpointed()
    verify(graph)
    assert "again(" in format_graph(graph)
    simplified = rewrite(graph, SIMPLIFY, "test")
    final = with_copies(simplified, (None,), (None,))
    for g in (graph, simplified, final):
        assert [n.is_a(Dot) for n in g.nodes].count(True) == 2
        made = [n for n in g.nodes if n.is_a(Map) and n.attrs == Map("exp")]
        assert [n in g.forward_nodes() for n in made] == [True, False]
    assert any(n.is_a(Again) for n in simplified.nodes)
    assert not any(n.is_a(Again) for n in final.nodes)
    verify(final)


def test_values_stay() -> None:
    graph = checkpointed()
    final = with_copies(graph, (None,), (None,))
    inputs = random_inputs(graph)
    for want, got in zip(evaluate(graph, inputs), evaluate(final, inputs), strict=True):
        assert want is not None
        np.testing.assert_array_equal(want, got)


def test_a_reshape_of_a_strided_input_can_still_be_copied() -> None:
    b = Builder()
    x = b.input("x", argument(Builder(), (4, 6), position=0).type, (1, 4), "arg", 0)
    grad = b.map("exp", b.reshape(b.again(x), (24,)))
    final = with_copies(Graph((x,), (b.map("sin", x), b.reshape(grad, (4, 6))), 1, (0,)), (None,), (None,))
    (inner,) = [n for n in final.nodes if n.is_a(Reshape) and n.shape == (24,)]
    assert inner.args[0].op == "permute"


def test_constants_are_not_computed_again() -> None:
    b = Builder()
    for node in (b.const(1.0, DType.F32), b.iota((4,), 0)):
        assert b.again(node) is node
