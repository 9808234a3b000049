"""Values evaluated more than once: candidates for memory of their own instead of being recomputed."""

from __future__ import annotations

from collections.abc import Sequence

from megafuse.core.sizes import typical
from megafuse.ir.graph import Node
from megafuse.ir.index import Index
from megafuse.ir.trace import Inst, Trace


def recompute_candidates(traces: Sequence[Trace], limit: int = 4) -> list[Node]:
    """Nodes whose evaluation at several places reads more than storing them once would; best saving first.

    Only values that vary over a whole nest and stand on two or more loads count, and of a chain of such values only the
    last one (its consumers differ from place to place).
    """
    places: dict[Node, dict[tuple[int, frozenset[Index]], int]] = {}
    inner: set[Node] = set()
    for number, trace in enumerate(traces):
        below = _bytes_below(trace)
        for inst, size in below.items():
            if inst.kind in ("map", "cast") and inst.index == () and inst.axes:
                places.setdefault(inst.node, {})[number, _key(inst)] = size
    for node, spots in places.items():
        for arg in node.args:
            if arg in places and len(places[arg]) <= len(spots):
                inner.add(arg)
    scored = []
    for node, spots in places.items():
        if len(spots) < 2 or node in inner or not node.dtype.is_float:
            continue
        own = node.type.nbytes
        saving = sum(spots.values()) - max(spots.values()) - own * len(spots)
        if saving > 0:
            scored.append((saving, -node.uid, node))
    return [node for _, _, node in sorted(scored, key=lambda t: t[:2], reverse=True)[:limit]]


def _key(inst: Inst) -> frozenset[Index]:
    """The indices of the loads under an instance identify the place where it is evaluated."""
    seen = {inst}  # a value that is used twice is walked once: chains of such values have as many paths as 2^length
    stack = [inst]
    while stack:
        new = [a for a in dict.fromkeys(stack.pop().args) if a not in seen]
        seen.update(new)
        stack.extend(new)
    return frozenset(i.index for i in seen if i.kind == "load")


def _bytes_below(trace: Trace) -> dict[Inst, int]:
    """Bytes of distinct tile-level loads that each instance stands on (through maps, not through reductions)."""
    sizes = trace.nest.space.sizes
    cols = trace.nest.space.col_names
    found: dict[Inst, frozenset[Inst]] = {}
    for inst in trace.insts:
        if inst.kind == "load":
            found[inst] = frozenset({inst}) if inst.axes & cols else frozenset()
        elif inst.kind == "reduce":
            found[inst] = frozenset()
        else:
            found[inst] = frozenset().union(*(found[a] for a in inst.args))
    out = {}
    for inst, loads in found.items():
        size = 0
        for load in loads:
            count = 1
            for a in load.axes:
                count *= typical(sizes[a])
            size += count * load.dtype.size
        if len(loads) > 1:
            out[inst] = size
    return out
