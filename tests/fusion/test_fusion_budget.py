"""Which saved values can be computed again, at what price, and the graph in which backward does so."""

from __future__ import annotations

from fusion_graphs import DEVICE, arg
from megafuse.core.dtypes import DType
from megafuse.fusion.budget import by_price, computed_again, second_time
from megafuse.ir.graph import Builder, Graph, Node
from megafuse.ir.types import Dot, Opaque
from megafuse.ir.verify import verify

BF16 = DType.BF16


def wide(b: Builder, fn: str, *args: Node) -> Node:
    """An op worked in fp32, rounded once."""
    return b.cast(b.map(fn, *(b.cast(a, DType.F32) for a in args)), BF16)


class Net:
    """``y = tanh(x @ w) @ v``; the gradient of v needs the tanh, that of w the tanh's derivative."""

    def __init__(self) -> None:
        b = Builder()
        self.x, self.w, self.v = (
            arg(b, 0, 1, 64, 32, dtype=BF16), arg(b, 1, 1, 32, 256, dtype=BF16), arg(b, 2, 1, 256, 32, dtype=BF16)
        )  # fmt: skip
        self.dy = arg(b, 3, 1, 64, 32, dtype=BF16)
        self.dot = b.dot(self.x, self.w, BF16)
        self.act = wide(b, "tanh", self.dot)
        self.y = b.dot(self.act, self.v, BF16)
        self.dv = b.dot(b.permute(self.act, (0, 2, 1)), self.dy, BF16)
        self.dh = wide(b, "mul", b.dot(self.dy, b.permute(self.v, (0, 2, 1)), BF16), self.act)
        self.dw = b.dot(b.permute(self.x, (0, 2, 1)), self.dh, BF16)
        inputs = (self.x, self.w, self.v, self.dy)
        self.graph = Graph(inputs, (self.y, self.dw, self.dv), 1, (1, 2))


def backward_reads(graph: Graph) -> set[Node]:
    """Forward values that backward nodes take as arguments."""
    forward = graph.forward_nodes()
    return {a for n in graph.nodes if n not in forward for a in n.args if a in forward and a.args}


def test_what_is_cheap_for_its_size_comes_first():
    net = Net()
    order = by_price([net.dot, net.act], [net.y], DEVICE, False)
    assert [s.value for s in order] == [net.act, net.dot], "an elementwise function before a product"
    act, dot = order
    assert net.dot not in act.nodes and net.dot in dot.nodes
    assert act.seconds < dot.seconds


def test_what_stands_on_a_call_that_may_differ_is_kept():
    b = Builder()
    x = arg(b, 0, 64, 32)
    drawn = b.opaque(Opaque("aten.rand_like", 0, "random", (x.type,)), [x])
    value = b.map("mul", x, drawn)
    assert second_time(value, set(), DEVICE, False) is None
    assert second_time(value, {drawn}, DEVICE, False) is not None


def test_backward_computes_from_what_stays():
    net = Net()
    (act, _) = by_price([net.dot, net.act], [net.y], DEVICE, False)
    made = computed_again(net.graph, act.nodes, {net.dot, net.y})
    verify(made)
    assert backward_reads(net.graph) == {net.act}
    assert backward_reads(made) == {net.dot}, "the product stays, what follows is computed from it"
    assert made.outputs[0] is net.y and made.forward_nodes() == net.graph.forward_nodes(), "forward is as it was"
    assert len([n for n in made.nodes if n.is_a(Dot)]) == len([n for n in net.graph.nodes if n.is_a(Dot)])


def test_products_too_are_computed_again():
    net = Net()
    one = second_time(net.act, {net.y}, DEVICE, False)
    assert one is not None
    made = computed_again(net.graph, one.nodes, {net.y})
    verify(made)
    assert backward_reads(made) == set()
    assert len([n for n in made.nodes if n.is_a(Dot)]) == 1 + len([n for n in net.graph.nodes if n.is_a(Dot)])


def test_what_follows_from_such_a_value_is_computed_again_too():
    """Backward also reads the tanh, which nothing saved: it stands on the product, which is not saved any more."""
    net = Net()
    one = second_time(net.dot, {net.y}, DEVICE, False)
    assert one is not None and net.act not in one.nodes
    made = computed_again(net.graph, one.nodes, {net.y})
    assert backward_reads(made) == set()


def test_nothing_to_compute_again_changes_nothing():
    net = Net()
    made = computed_again(net.graph, (), {net.act, net.y})
    assert made.nodes == net.graph.nodes and made.outputs == net.graph.outputs
