"""Questions about graphs, as pure functions: work, traffic, users and lifetimes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megafuse.core.dtypes import DType
from megafuse.ir.graph import Graph, Node
from megafuse.ir.ops import MAP_FNS
from megafuse.ir.types import MOVES, Cast, Const, Dot, Input, Iota, Map, Reduce


def dot_flops(node: Node) -> int:
    """Multiplications and additions of a dot, 2 per contracted element; 0 for every other node."""
    if not isinstance(node.attrs, Dot):
        return 0
    contracted = node.args[0].shape[2]
    return 2 * node.type.numel * contracted + (node.type.numel if len(node.args) == 3 else 0)


def float_ops(node: Node) -> int:
    """Floating-point operations other than dots: one an element of a map's result, one an element a reduce reads."""
    if not is_float_op(node):
        return 0
    if isinstance(node.attrs, Map):
        return node.type.numel
    return node.args[0].type.numel if isinstance(node.attrs, Reduce) else 0


def special_ops(node: Node) -> int:
    """Special-function results (exp, log, division) of a map on floats."""
    if not (isinstance(node.attrs, Map) and is_float_op(node)):
        return 0
    return MAP_FNS[node.attrs.fn].special * node.type.numel


def flops(node: Node) -> int:
    """All floating-point operations of the node, dots included. Moves and casts count nothing."""
    return dot_flops(node) + float_ops(node)


def bytes_read(node: Node) -> int:
    """Bytes of the distinct arguments when each is read once from memory; constants are free."""
    return sum(a.type.nbytes for a in dict.fromkeys(node.args) if not a.is_a(Const))


def bytes_written(node: Node) -> int:
    """Bytes of the result; nothing for inputs and constants, which no kernel writes."""
    return 0 if node.is_a(Input, Const) else node.type.nbytes


def is_float_op(node: Node) -> bool:
    """True when the node computes on floating-point values (its last argument is one), moves and casts excluded."""
    return node.is_a(Map, Reduce, Dot) and node.args[-1].dtype.is_float


def is_move(node: Node) -> bool:
    """True for pure index maps."""
    return node.is_a(*MOVES)


def is_free(node: Node) -> bool:
    """True for nodes that read no memory of their own: constants, indices."""
    return node.is_a(Const, Iota)


def is_narrowing(node: Node) -> bool:
    """True for a cast to a floating type of fewer bytes: the casts that round."""
    return node.is_a(Cast) and node.dtype.is_float and node.dtype.size < node.args[0].dtype.size


def compares_for_equality(graph: Graph) -> bool:
    """Whether wide floating-point values are compared with one another for equality.

    Constants do not count, nor values that were rounded to 16 bits: these are the same however they are computed.
    """
    compared = [n.args for n in graph.nodes if isinstance(n.attrs, Map) and n.attrs.fn in ("eq", "ne")]
    return any(all(_is_wide(arg) for arg in args) for args in compared)


def _is_wide(node: Node) -> bool:
    """A value in fp32 or fp64 that is more than a widened one, and no constant."""
    extreme = isinstance(node.attrs, Reduce) and node.attrs.fn in ("max", "min")
    widened = isinstance(node.attrs, Cast) and node.args[0].dtype in (DType.F16, DType.BF16)
    if extreme or widened or is_move(node):
        return any(map(_is_wide, node.args))
    return node.dtype in (DType.F32, DType.F64) and not isinstance(node.attrs, Const)


def total(graph: Graph, measure: Callable[[Node], int]) -> int:
    """Sum of a per-node measure, such as ``flops``, over the graph."""
    return sum(measure(n) for n in graph.nodes)


def single_user(users: dict[Node, list[Node]], node: Node) -> Node | None:
    """The only node that reads ``node``, when there is exactly one. Being an output is not counted as reading."""
    readers = users[node]
    return readers[0] if len(readers) == 1 else None


def ancestors(node: Node) -> frozenset[Node]:
    """Every node that ``node`` depends on, itself included."""
    seen: dict[Node, None] = {node: None}
    stack = [node]
    while stack:
        for arg in stack.pop().args:
            if arg not in seen:
                seen[arg] = None
                stack.append(arg)
    return frozenset(seen)


@dataclass(frozen=True)
class Lifetime:
    """Positions in ``graph.nodes``: where a value is made, and where it is read last.

    A graph output lives to the end: its ``last`` is ``len(graph.nodes)``.
    """

    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        """True when both values exist at one time (the reader of one may not overwrite it with the other)."""
        return self.first <= other.last and other.first <= self.last


def lifetimes(graph: Graph) -> dict[Node, Lifetime]:
    """The lifetime of every value in the order of ``graph.nodes``."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    last = dict(position)
    for i, node in enumerate(graph.nodes):
        for arg in node.args:
            last[arg] = i
    for out in graph.outputs:
        if out is not None:
            last[out] = len(graph.nodes)
    return {n: Lifetime(position[n], last[n]) for n in graph.nodes}


def saved_values(graph: Graph) -> list[Node]:
    """Forward values, inputs and constants excluded, that some backward node reads: what would be saved as is."""
    forward = graph.forward_nodes()
    backward = [n for n in graph.nodes if n not in forward]
    read = {a for n in backward for a in n.args}
    outputs = {n for n in graph.gradients if n is not None}
    return [n for n in graph.nodes if n in forward and n in read | outputs and not n.is_a(Input, Const)]
