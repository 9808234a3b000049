"""Values that only copy another get a node of their own: an identity permutation, to which planning may give memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Graph, Node, contiguous_strides
from megafuse.ir.rewrite import rewrite, rule
from megafuse.ir.types import Again, Cast, Const, Dot, Input, Map, Opaque, Permute, Pick, Reshape, TensorType
from megafuse.ir.views import same_strides, view_base


@rule(Reshape)
def reshape_of_strided_input(b: Builder, node: Node) -> Node | None:
    """A reshape reads a strided input through a node that can become a contiguous copy where no strides express it."""
    (arg,) = node.args
    base = arg.args[0] if arg.is_a(Again) else arg
    if not isinstance(base.attrs, Input) or same_strides(
        base.shape, base.attrs.strides, contiguous_strides(base.shape)
    ):
        return None
    same = b.make(Permute(tuple(range(arg.type.rank))), (arg,), arg.type)
    return b.reshape(same, node.shape)


def with_copies(graph: Graph, out_alias: Sequence[int | None], out_shared: Sequence[int | None]) -> Graph:
    """``graph`` with copies where they may be needed; a copy that turns out to be a plain view costs nothing.

    Nodes behind an ``Again`` become nodes of their own here: nothing later makes equal nodes one.

    ``out_alias[i]``: the input of which output ``i`` is a view in the original, or None: there an output that is an
    input (``x.clone()``) must have memory of its own. So must an output that wants another layout than a library
    call's result, or than another output that is a view of it, or that shares no memory with an earlier output of the
    same value (``out_shared[i]`` is None).
    """
    graph = without_again(rewrite(graph, (reshape_of_strided_input,), "copies"))
    distinct = {n for n in graph.outputs if n is not None}
    bases = Counter(view_base(n) for n in distinct)
    first = max((n.uid for n in graph.nodes), default=0) + 1
    copies: dict[Node, Node] = {}
    outputs = list(graph.outputs)
    seen: set[Node] = set()
    count = 0
    for i, node in enumerate(outputs):
        if node is None:
            continue
        again = node in seen and i < len(out_shared) and out_shared[i] is None
        seen.add(node)
        if node is not view_base(node):
            wanted = False
        elif isinstance(node.attrs, Input):
            wanted = i < len(out_alias) and out_alias[i] is None
        else:
            wanted = isinstance(node.attrs, Dot | Opaque | Pick) or bases[node] > 1
        if again:
            uid = first + len(bases) + 2 * count
            count += 1
            outputs[i] = _computed_copy(node, uid)
        elif wanted:
            same = Permute(tuple(range(node.type.rank)))
            outputs[i] = copies.setdefault(node, Node(first + len(copies), same, (node,), node.type, node.origin))
    return Graph(graph.inputs, tuple(outputs), graph.num_forward, graph.grad_of)


def without_again(graph: Graph) -> Graph:
    """``graph`` with every ``Again`` replaced by its argument; what stands on one is not shared with equal nodes."""
    uids = itertools.count(max((n.uid for n in graph.nodes), default=0) + 1)
    new: dict[Node, Node] = {}
    for node in graph.nodes:
        args = tuple(new[a] for a in node.args)
        if node.is_a(Again):
            new[node] = args[0]
        else:
            new[node] = node if args == node.args else Node(next(uids), node.attrs, args, node.type, node.origin)
    outputs = tuple(None if n is None else new[n] for n in graph.outputs)
    return Graph(graph.inputs, outputs, graph.num_forward, graph.grad_of)


def _computed_copy(node: Node, uid: int) -> Node:
    """A value equal to ``node`` bit for bit that is no view of it: x * 1, x | x, or fp32 and back for 16-bit floats."""
    if node.dtype in (DType.BF16, DType.F16):
        wide = Node(uid, Cast(), (node,), TensorType(node.shape, DType.F32), node.origin)
        return Node(uid + 1, Cast(), (wide,), node.type, node.origin)
    if node.dtype is DType.BOOL:
        return Node(uid, Map("or"), (node, node), node.type, node.origin)
    one = Node(uid + 1, Const(1.0 if node.dtype.is_float else 1), (), TensorType((), node.dtype))
    return Node(uid, Map("mul"), (node, one), node.type, node.origin)
