"""Values that only copy an input get a node of their own: an identity permutation, which planning may give memory to."""

from __future__ import annotations

from collections.abc import Sequence

from megafuse.ir.graph import Builder, Graph, Node, contiguous_strides
from megafuse.ir.rewrite import rewrite, rule
from megafuse.ir.types import Input, Permute, Reshape
from megafuse.ir.views import same_strides


@rule(Reshape)
def reshape_of_strided_input(b: Builder, node: Node) -> Node | None:
    """A reshape reads a strided input through a node that can become a contiguous copy where no strides express it."""
    (arg,) = node.args
    if not isinstance(arg.attrs, Input) or same_strides(arg.shape, arg.attrs.strides, contiguous_strides(arg.shape)):
        return None
    same = b.make(Permute(tuple(range(arg.type.rank))), (arg,), arg.type)
    return b.reshape(same, node.shape)


def with_copies(graph: Graph, out_alias: Sequence[int | None]) -> Graph:
    """``graph`` with copies where they may be needed.

    ``out_alias[i]``: the input of which output ``i`` is a view in the original, or None: there an output that is an
    input (``x.clone()``) must have memory of its own.
    """
    graph = rewrite(graph, (reshape_of_strided_input,), "copies")
    uid = max((n.uid for n in graph.nodes), default=0) + 1
    outputs = list(graph.outputs)
    for i, alias in enumerate(out_alias):
        node = outputs[i]
        if alias is None and node is not None and isinstance(node.attrs, Input):
            outputs[i] = Node(uid, Permute(tuple(range(node.type.rank))), (node,), node.type)
            uid += 1
    return Graph(graph.inputs, tuple(outputs), graph.num_forward, graph.grad_of)
