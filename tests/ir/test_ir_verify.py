"""Each invariant, broken once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from ir_graphs import argument, graph_of
from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError
from megafuse.ir.graph import Builder, Graph, Node
from megafuse.ir.types import (
    Again,
    Attrs,
    Cast,
    Concat,
    Const,
    Dot,
    Expand,
    Gather,
    Iota,
    Map,
    Opaque,
    Origin,
    Pad,
    Permute,
    Pick,
    Reduce,
    Reshape,
    Slice,
    TensorType,
)
from megafuse.ir.verify import RULES, verify

F32, BF16, I64, BOOL = DType.F32, DType.BF16, DType.I64, DType.BOOL

# (op, shapes and types of the arguments, result, part of the message)
BROKEN: list[tuple[Attrs, list[tuple[tuple[int, ...], DType]], tuple[tuple[int, ...], DType], str]] = [
    (Const(1.0), [], ((2,), F32), "scalar"),
    (Const(1), [], ((), F32), "not a float"),
    (Iota(2), [], ((2, 3), I64), "no axis 2"),
    (Map("exp"), [((2,), F32)], ((3,), F32), "has shape"),
    (Map("exp"), [((2,), F32)], ((2,), BF16), "should be f32"),
    (Map("exp"), [((2,), I64)], ((2,), I64), "needs a float"),
    (Map("xor"), [((2,), F32), ((2,), F32)], ((2,), F32), "xor of f32"),
    (Map("sub"), [((2,), BOOL), ((2,), BOOL)], ((2,), BOOL), "sub of bool"),
    (Map("add"), [((2,), F32), ((2,), BF16)], ((2,), F32), "mixed argument types"),
    (Map("add"), [((2,), F32)], ((2,), F32), "takes 2 arguments"),
    (Map("mystery"), [((2,), F32)], ((2,), F32), "unknown function"),
    (Cast(), [((2,), F32)], ((2,), F32), "same dtype"),
    (Cast(), [((2,), F32)], ((3,), BF16), "keeps the shape"),
    (Reduce("sum", (1,)), [((2,), F32)], ((2,), F32), "axes"),
    (Reduce("sum", (1, 0)), [((2, 2), F32)], ((), F32), "axes"),
    (Reduce("sum", (0,)), [((2, 3), F32)], ((2,), F32), "should have shape"),
    (Reduce("mean", (0,)), [((2, 3), F32)], ((3,), F32), "unknown function"),
    (Reduce("sum", (0,)), [((2, 3), BF16)], ((3,), F32), "is bf16"),
    (Dot(), [((2, 3), F32), ((3, 2), F32)], ((2, 2), F32), "rank 3"),
    (Dot(), [((1, 2, 3), F32), ((1, 4, 2), F32)], ((1, 2, 2), F32), "do not match"),
    (Dot(), [((1, 2, 3), F32), ((1, 3, 2), BF16)], ((1, 2, 2), F32), "operands are"),
    (Dot(), [((1, 2, 3), F32), ((1, 3, 4), F32)], ((1, 4, 2), F32), "should have shape"),
    (Dot(), [((1, 2, 3), F32), ((1, 3, 4), F32), ((3,), F32)], ((1, 2, 4), F32), "bias"),
    (Again(), [((2,), F32)], ((2,), BF16), "should be f32"),
    (Permute((0, 0)), [((2, 3), F32)], ((2, 2), F32), "not a permutation"),
    (Permute((1, 0)), [((2, 3), F32)], ((2, 3), F32), "should have shape"),
    (Reshape(), [((2, 3), F32)], ((5,), F32), "6 elements into 5"),
    (Reshape(), [((2, 3), F32)], ((6,), BF16), "is f32"),
    (Expand(), [((2, 3), F32)], ((4, 3), F32), "expands to 4"),
    (Expand(), [((3,), F32)], ((4, 3), F32), "keeps the rank"),
    (Slice((1,), (2,)), [((4,), F32)], ((3,), F32), "start 1, step 2"),
    (Slice((1,), (-1,)), [((4,), F32)], ((3,), F32), "step -1"),
    (Slice((0,), (0,)), [((4,), F32)], ((1,), F32), "step 0"),
    (Pad((1,), 0.0), [((4,), F32)], ((4,), F32), "does not fit"),
    (Pad((-1,), 0.0), [((4,), F32)], ((4,), F32), "does not fit"),
    (Concat(0), [((4,), F32), ((3,), F32)], ((6,), F32), "add up to 7"),
    (Concat(1), [((4, 1), F32), ((3, 1), F32)], ((4, 2), F32), "has shape"),
    (Gather(0), [((4, 3), BF16), ((2, 3), I64)], ((2, 3), F32), "table is bf16"),
    (Gather(0), [((4, 3), F32), ((2, 3), F32)], ((2, 3), F32), "index is f32"),
    (Gather(2), [((4, 3), F32), ((2, 3), I64)], ((2, 3), F32), "axis 2"),
    (Gather(0), [((4,), F32), ((2, 3), I64)], ((2, 3), F32), "ranks 1 and 2"),
    (Gather(0), [((4, 3), F32), ((2, 1), I64)], ((2, 3), F32), "index has shape"),
    (Gather(0), [((4, 1), F32), ((2, 3), I64)], ((2, 3), F32), "table has shape"),
    (Opaque("f", 0, "r", (None,)), [], ((2,), F32), "first tensor result"),
    (Pick(0), [((2,), F32)], ((2,), F32), "not an opaque call"),
]


@pytest.mark.parametrize(("attrs", "args", "result", "message"), BROKEN, ids=lambda v: str(v)[:24])
def test_broken_nodes(attrs: Attrs, args: list, result: tuple, message: str) -> None:
    b = Builder()
    inputs = [argument(b, shape, dtype, i) for i, (shape, dtype) in enumerate(args)]
    b.origin = Origin("block.py", 7)
    node = b.make(attrs, inputs, TensorType(*result))
    with pytest.raises(VerifyError, match=message) as caught:
        verify(graph_of(node, inputs=inputs))
    assert caught.value.where == "block.py:7"


def test_every_kind_has_rules() -> None:
    assert set(RULES) == set(Attrs.__args__)  # type: ignore[attr-defined]


def healthy() -> tuple[Graph, Node, Node]:
    """A legal graph with every kind of node but opaque ones; and two of its nodes."""
    b = Builder()
    x = argument(b, (2, 3), position=0)
    g = argument(b, (2, 3), position=1)
    y = b.map("mul", x, 2.0)
    s = b.broadcast(b.reduce("sum", y, [1], keepdim=True), (2, 3))
    d = b.dot(b.reshape(x, (1, 2, 3)), b.reshape(b.permute(g, (1, 0)), (1, 3, 2)), DType.F32)
    z = b.concat([b.slice(s, (0, 0), (2, 1)), b.reshape(d, (2, 2))], 1)
    z = b.map("add", z, b.gather(z, b.iota((2, 3), 1), 1))
    grad = b.map("add", g, b.cast(b.iota((2, 3), 1), DType.F32))
    return Graph((x, g), (z, grad, None), 1, (0, 1)), z, g


def test_a_healthy_graph_passes() -> None:
    verify(healthy()[0])


def other_builder(graph: Graph) -> Graph:
    """A graph that mixes in a node of another builder."""
    b = Builder()
    b.const(1.0, DType.F32)
    return dataclasses.replace(graph, outputs=(*graph.outputs[:1], argument(b, (2, 3), position=1), None))


def of_rank_3(graph: Graph) -> Node:
    """Some node of rank 3."""
    return next(n for n in graph.nodes if n.type.rank == 3)


GRAPH_FAULTS: list[tuple[Callable[[Graph], Graph], str]] = [
    (lambda g: dataclasses.replace(g, inputs=g.inputs[::-1]), "has position"),
    (lambda g: dataclasses.replace(g, inputs=(g.inputs[0], *g.outputs[:1])), "not an input node"),
    (lambda g: dataclasses.replace(g, inputs=g.inputs[:1], grad_of=(0,), outputs=g.outputs[:2]), "not among"),
    (lambda g: dataclasses.replace(g, num_forward=4), "num_forward"),
    (lambda g: dataclasses.replace(g, grad_of=(0,)), "grad_of has 1"),
    (lambda g: dataclasses.replace(g, grad_of=(1, 1)), "twice"),
    (lambda g: dataclasses.replace(g, grad_of=(0, 5)), "names input 5"),
    (lambda g: dataclasses.replace(g, grad_of=(0, 1), outputs=(g.outputs[0], of_rank_3(g), None)), "has shape"),
    (other_builder, "different builders|before its arguments|not a node"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), GRAPH_FAULTS)
def test_broken_graphs(damage: Callable[[Graph], Graph], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(damage(healthy()[0]))


def test_order_is_checked() -> None:
    graph = healthy()[0]
    object.__setattr__(graph, "nodes", graph.nodes[::-1])
    with pytest.raises(VerifyError, match="before its arguments"):
        verify(graph)
