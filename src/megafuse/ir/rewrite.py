"""The rewrite engine: a graph is rebuilt from its leaves through a builder that applies a table of rules.

Every node is settled the moment it is made, whether by the rebuild or by a rule: rules run on it until none fires, and
what users see is the result. So one bottom-up pass reaches the fixpoint, and a rule only has to look at its node and
the node's arguments, which are settled already. What no output needs is simply not in the new graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megafuse.core.errors import VerifyError
from megafuse.core.sizes import OpenSize
from megafuse.ir.graph import Builder, Graph, Node, toposort
from megafuse.ir.types import Attrs, Cast, Concat, Expand, Pad, Permute, Reshape, Slice, TensorType

DEPTH_LIMIT = 100

RuleFn = Callable[[Builder, Node], "Node | None"]


@dataclass(frozen=True)
class Rule:
    """A named rewrite of nodes of one kind.

    ``apply(builder, node)`` returns a node of the same type that stands for ``node``, or None. ``differs`` says in
    which way the result may not be bit-equal; empty means that it always is.
    """

    kind: type
    apply: RuleFn
    differs: str = ""

    @property
    def name(self) -> str:
        """The function's name."""
        return self.apply.__name__


def rule(kind: type, differs: str = "") -> Callable[[RuleFn], Rule]:
    """Decorator that makes a ``Rule`` of a function."""
    return lambda fn: Rule(kind, fn, differs)


Trace = Callable[[str, Node, Node], None]


def rewrite(graph: Graph, rules: Sequence[Rule], name: str, *, trace: Trace | None = None) -> Graph:
    """Rebuild ``graph`` with ``rules`` applied everywhere, to a fixpoint.

    Args:
        graph: left as it is.
        rules: tried in order on every node of their kind.
        name: the pass's name, for errors.
        trace: called with (rule name, node, replacement) whenever a rule fires.

    Returns:
        A graph with the same inputs in the same order, and outputs of the same types.

    Raises:
        VerifyError: a rule changed a value's type, or rules feed each other without end.
    """
    builder = RewritingBuilder(rules, name, trace)
    new: dict[Node, Node] = {}
    for node in toposort([*graph.inputs, *(n for n in graph.outputs if n is not None)]):
        builder.origin = node.origin
        new[node] = rebuild(builder, node, [new[a] for a in node.args])
    outputs = tuple(None if n is None else new[n] for n in graph.outputs)
    return Graph(tuple(new[n] for n in graph.inputs), outputs, graph.num_forward, graph.grad_of)


def rebuild(builder: Builder, node: Node, args: Sequence[Node]) -> Node:
    """Make ``node``'s op again on ``args`` (same shapes; a move takes its dtype from them)."""
    match node.attrs:
        case Cast():
            return builder.cast(args[0], node.dtype)
        case Permute(perm):
            return builder.permute(args[0], perm)
        case Reshape():
            return builder.reshape(args[0], node.shape)
        case Expand():
            return builder.expand(args[0], node.shape)
        case Slice(starts, steps):
            return builder.slice(args[0], starts, node.shape, steps)
        case Pad(lo, value):
            return builder.pad(args[0], lo, node.shape, value)
        case Concat(axis):
            return builder.concat(args, axis)
    return builder.make(node.attrs, args, node.type)


class RewritingBuilder(Builder):
    """A builder whose nodes are settled under a table of rules as they are made."""

    def __init__(self, rules: Sequence[Rule], name: str = "rewrite", trace: Trace | None = None) -> None:
        super().__init__()
        self._pass, self._trace = name, trace
        self._by_kind: dict[type, list[Rule]] = {}
        for r in rules:
            self._by_kind.setdefault(r.kind, []).append(r)
        self._settled: dict[int, Node] = {}
        self._open: dict[int, str] = {}  # nodes being settled: uid -> rule being tried

    def make(self, attrs: Attrs, args: Sequence[Node], type_: TensorType) -> Node:
        """The settled form of the node."""
        node = super().make(attrs, args, type_)
        if node.uid in self._settled:
            return self._settled[node.uid]
        if node.uid in self._open:  # a rule has rebuilt the node it is applied to: there it stops
            return node
        result = self._settle(node)
        self._settled[node.uid] = result
        return result

    def _settle(self, node: Node) -> Node:
        """The first rule that fires decides: its result was made here, and so is settled."""
        for r in self._by_kind.get(type(node.attrs), ()):
            self._open[node.uid] = r.name
            if len(self._open) > DEPTH_LIMIT:
                names = sorted(set(self._open.values()))
                raise VerifyError(f"{self._pass}: rules feed each other without end: {', '.join(names)}")
            try:
                result = r.apply(self, node)
            except OpenSize:
                result = None  # whether it applies depends on the size
            del self._open[node.uid]
            if result is None or result is node:
                continue
            if result.type != node.type:
                raise VerifyError(f"{self._pass}: rule {r.name} turned {node!r} {node.type} into {result.type}")
            if self._trace:
                self._trace(r.name, node, result)
            return result
        return node
