"""Anchors and library calls as numbered units, and what each reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megafuse.core.dependencies import union
from megafuse.fusion.anchors import Anchors
from megafuse.ir.graph import Graph, Node
from megafuse.ir.nest import Anchor
from megafuse.ir.types import Dot, Opaque


@dataclass(frozen=True)
class Units:
    """Anchors and library calls, numbered in topological order. ``needs[u]``: the set of units that ``u`` reads."""

    of_anchor: Mapping[Anchor, int]
    needs: tuple[int, ...]
    of_call: Mapping[Node, int] = field(default_factory=dict)


def number_units(graph: Graph, anchors: Anchors) -> Units:
    """Number anchors and library calls and find what each reads."""
    by_node: dict[Node, list[Anchor | None]] = {}
    for one in anchors.order:
        by_node.setdefault(one.node, []).append(one)
    of_anchor: dict[Anchor, int] = {}
    of_call: dict[Node, int] = {}
    needs: list[int] = []
    read: dict[Node, int] = {}  # the units that an evaluation of a node reads: its own where it is in memory
    for node in graph.nodes:
        below = union(read[a] for a in node.args)
        own = 0
        for anchor in by_node.get(node) or ([None] if node.is_a(Dot, Opaque) else []):
            own |= 1 << len(needs)
            if anchor is not None:
                of_anchor[anchor] = len(needs)
            else:
                of_call[node] = len(needs)
            needs.append(below if anchor is None or anchor.part is None else read[anchor.value])
        read[node] = own or below
    return Units(of_anchor, tuple(needs), of_call)
