"""Forward values that backward could compute again instead of having them saved: at what price, and the graph."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.fusion.chain_cost import library_seconds
from megafuse.ir.graph import Graph, Node
from megafuse.ir.types import Const, Dot, Input, Iota, Opaque, Pick


@dataclass(frozen=True)
class SecondTime:
    """A saved value, the forward nodes to compute it again from what stays, and what that is predicted to take."""

    value: Node
    nodes: frozenset[Node]
    seconds: float

    @property
    def price(self) -> float:
        """Seconds for each byte that need not be saved."""
        return self.seconds / max(1, self.value.type.nbytes)


def by_price(saved: Sequence[Node], kept: Collection[Node], device: DeviceSpec, tf32: bool) -> list[SecondTime]:
    """Those of ``saved`` that can be computed again, the cheapest for its size first.

    ``kept``: values that stay in memory anyway (outputs). Every other saved value is taken to stay too.
    """
    stays = {*saved, *kept}
    found = (second_time(value, stays - {value}, device, tf32) for value in saved)
    return sorted((s for s in found if s is not None), key=lambda s: (s.price, s.value.uid))


def second_time(value: Node, stays: Collection[Node], device: DeviceSpec, tf32: bool) -> SecondTime | None:
    """How ``value`` is computed again; None where it stands on a call that may give something else the next time."""
    nodes: set[Node] = set()
    reads: set[Node] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if node.is_a(Input) or node in stays:
            reads.add(node)
        elif node.is_a(Opaque, Pick):
            return None
        elif node not in nodes and not node.is_a(Const, Iota):
            nodes.add(node)
            stack.extend(node.args)
    moved = sum(n.type.nbytes for n in (*reads, value))
    dots = [n for n in nodes if n.is_a(Dot)]
    seconds = device.launch_seconds + moved / device.dram_bandwidth + library_seconds(dots, device, tf32)
    return SecondTime(value, frozenset(nodes), seconds)


def computed_again(graph: Graph, again: Collection[Node], stays: Collection[Node]) -> Graph:
    """``graph`` whose backward has nodes of its own in place of ``again``, and of what follows from these in forward.

    ``stays``: forward values that backward goes on reading, whatever they stand on.
    """
    forward, again, stays = graph.forward_nodes(), set(again), set(stays)
    uids = itertools.count(max((n.uid for n in graph.nodes), default=0) + 1)
    new: dict[Node, Node] = {}  # nodes of backward, by the nodes of forward or backward that they are made from
    for node in graph.nodes:
        args = tuple(new.get(a, a) for a in node.args)
        own = node in again or args != node.args
        if own and not (node in forward and node in stays):
            new[node] = Node(next(uids), node.attrs, args, node.type, node.origin)
    outputs = [None if n is None else n if n in forward else new.get(n, n) for n in graph.outputs]
    return Graph(graph.inputs, tuple(outputs), graph.num_forward, graph.grad_of)
