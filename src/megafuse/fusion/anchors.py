"""Which values get memory of their own, and in which layout.

Anchored are: reductions, operands of dots and opaque calls, outputs and gradients; each through its moves down to the
value that holds the elements, when some dense layout of that value serves the consumer as a strided view. A consumer
that no layout serves gets an anchor at the moved node itself (a copy, but one that carries the computation before it).
The first consumer, outputs before dots, chooses the layout; so a dot operand that is a transpose of a computed value is
written transposed, and the library reads contiguous matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megafuse.core.device import ACCESS_BYTES
from megafuse.core.sizes import is_open, typical
from megafuse.ir.graph import Graph, Node, contiguous_strides
from megafuse.ir.nest import Anchor
from megafuse.ir.trace import Memory
from megafuse.ir.types import Cast, Concat, Const, Dot, Gather, Input, Iota, Opaque, Pick, Reduce
from megafuse.ir.views import VIEW_MOVES, is_dense, is_disjoint, layout_for, same_strides, strided_view, view_base

IN_MEMORY = (Input, Dot, Opaque, Pick)


@dataclass
class Anchors:
    """``layout``: strides of every anchored node. ``order``: anchors in topological order. ``extra``: as asked for."""

    graph: Graph
    extra: tuple[Node, ...] = ()
    layout: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    nodes: set[Node] = field(default_factory=set)

    @property
    def order(self) -> tuple[Anchor, ...]:
        """Anchors, arguments first; a concat is anchored part by part."""
        out: list[Anchor] = []
        for node in self.graph.nodes:
            if node in self.nodes:
                parts = range(len(node.args)) if isinstance(node.attrs, Concat) else [None]
                out.extend(Anchor(node, p) for p in parts)
        return tuple(out)

    @property
    def materialised(self) -> Memory:
        """Every node that can be read from memory."""
        nodes = frozenset(self.nodes) | frozenset(n for n in self.graph.nodes if n.is_a(*IN_MEMORY))
        flat = (n for n in nodes if same_strides(n.shape, self.strides(n), contiguous_strides(n.shape)))
        return Memory(nodes, flat)

    def strides(self, node: Node) -> tuple[int, ...]:
        """Strides of a materialised node in elements."""
        if isinstance(node.attrs, Input):
            return node.attrs.strides
        return self.layout.get(node) or contiguous_strides(node.shape)


def choose_anchors(graph: Graph, wanted: Mapping[int, Sequence[int]], extra: Sequence[Node] = ()) -> Anchors:
    """Choose the anchors of ``graph``.

    ``wanted[i]``: strides that output ``i`` must have. ``extra``: further nodes to give memory to (save-or-recompute
    decisions of the cover).
    """
    anchors = Anchors(graph, tuple(extra))
    for node in extra:
        _anchor(anchors, node, contiguous_strides(node.shape))
    for i, output in enumerate(graph.outputs):
        if output is not None:
            _anchor_output(anchors, output, tuple(wanted.get(i, contiguous_strides(output.shape))))
    for node in graph.nodes:
        if isinstance(node.attrs, Dot | Opaque):
            for arg in node.args:
                _anchor_operand(anchors, arg)
        elif isinstance(node.attrs, Reduce):
            _anchor(anchors, node, contiguous_strides(node.shape))
        elif isinstance(node.attrs, Gather):
            _anchor_table(anchors, node)
    return anchors


def _anchor(anchors: Anchors, node: Node, strides: tuple[int, ...]) -> None:
    if node not in anchors.nodes:
        anchors.nodes.add(node)
        anchors.layout[node] = strides


def _anchor_output(anchors: Anchors, node: Node, strides: tuple[int, ...]) -> None:
    """An output must come out with ``strides`` and must not be a view of an input."""
    if isinstance(node.attrs, Input):
        return  # handed through as it is: x itself, or a tangent that is a gradient
    base = view_base(node)
    if isinstance(base.attrs, Input | Const | Iota):
        _anchor(anchors, node, strides)
        return
    if base.is_a(*IN_MEMORY):
        if isinstance(base.attrs, Dot) and base not in anchors.layout:
            _choose_dot_layout(anchors, node, base, strides)
        view = strided_view(node, anchors.strides(base))
        if view is None or not same_strides(node.shape, view.strides, strides):
            _anchor(anchors, node, strides)
        return
    _anchor_value(anchors, node, base, strides)


def _choose_dot_layout(anchors: Anchors, node: Node, dot: Node, strides: tuple[int, ...]) -> None:
    """The library writes rows or columns contiguously, so a transposed output needs no copy."""
    layout = layout_for(node, strides) if is_dense(node.shape, strides) else None
    if layout is not None and (layout[-1] == 1 or layout[-2] == 1):
        anchors.layout[dot] = layout


def _anchor_operand(anchors: Anchors, node: Node) -> None:
    """An operand of a library call may be any strided view.

    A computed value is laid out for its first such reader; by rows, though, where its columns would not start at whole
    accesses of memory: the library takes a matrix either way.
    """
    base = view_base(node)
    if isinstance(base.attrs, Const | Iota):
        _anchor(anchors, node, contiguous_strides(node.shape))
        return
    if base.is_a(*IN_MEMORY) or base in anchors.nodes:
        if strided_view(node, anchors.strides(base)) is None:
            _anchor(anchors, node, contiguous_strides(node.shape))
        return
    plain = contiguous_strides(base.shape)
    view = strided_view(node, plain)
    turned = view is not None and _is_turned(node, view.strides) and _whole_lines(view.strides[-1], node)
    if turned and not _whole_lines(node.shape[-1], node):
        _anchor(anchors, base, plain)
        return
    _anchor_value(anchors, node, base, contiguous_strides(node.shape))


def _is_turned(node: Node, strides: Sequence[int]) -> bool:
    """Whether ``strides`` lay ``node`` out as matrices one after the other, each by columns."""
    if len(node.shape) < 2:
        return False
    *outer, rows, cols = contiguous_strides((*node.shape[:-2], node.shape[-1], node.shape[-2]))
    return same_strides(node.shape, strides, (*outer, cols, rows))


def _whole_lines(length: int, node: Node) -> bool:
    """Whether lines of so many elements are whole accesses; taken to be so of an open number."""
    return is_open(length) or length * node.dtype.size % ACCESS_BYTES == 0


def _anchor_table(anchors: Anchors, gather: Node) -> None:
    """A table that is computed gets memory where more elements are read of it than it has; else, these are computed."""
    base = gather.args[0]
    size = typical(base.type.numel)
    while base.is_a(*VIEW_MOVES):
        base = base.args[0]
        size = min(size, typical(base.type.numel))  # before expansions, behind slices
    source = base
    while source.is_a(Cast, Gather, *VIEW_MOVES):
        source = source.args[0]
    if typical(gather.type.numel) > size and not source.is_a(*IN_MEMORY, Const) and source not in anchors.nodes:
        _anchor(anchors, base, contiguous_strides(base.shape))


def _anchor_value(anchors: Anchors, node: Node, base: Node, strides: tuple[int, ...]) -> None:
    """Anchor a computed value so that ``node``, a view of it, has ``strides``."""
    if base in anchors.nodes:
        view = strided_view(node, anchors.strides(base))
        if view is None or not same_strides(node.shape, view.strides, strides):
            _anchor(anchors, node, strides)
        return
    layout = layout_for(node, strides) if is_dense(node.shape, strides) else None
    if layout is None:
        plain = contiguous_strides(base.shape)
        view = None if is_dense(node.shape, strides) else strided_view(node, plain)
        if view is not None and same_strides(node.shape, view.strides, strides):
            _anchor(anchors, base, plain)  # an output that is expanded, or a part of a larger value, as in eager mode
            return
        _anchor(anchors, node, strides if is_disjoint(node.shape, strides) else contiguous_strides(node.shape))
        return
    _anchor(anchors, base, layout)
