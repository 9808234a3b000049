"""What a traced nest reads from memory: elements of each load, bytes of each value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from megafuse.core.sizes import typical
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.index import Guard, combine
from megafuse.ir.nest import Space
from megafuse.ir.trace import Inst, Trace

SECTOR = 32  # bytes that memory hands out at a time


def elements(inst: Inst, space: Space) -> int:
    """How many elements an instance has in the whole nest, all parts of a sum counted.

    Loads by index read no more than their guards let through.

    Of other loads the size of the buffer tells how much they read.
    """
    count = int(typical(math.prod(space.sizes[a] for a in inst.axes))) * inst.parts
    return math.ceil(count * _let_through(inst.guards, space.sizes)) if inst.lookups else count


def read_bytes(trace: Trace) -> dict[Node, int]:
    """DRAM bytes read of each node: distinct regions once, at most the whole buffer; by index, the rows read."""
    space = trace.nest.space
    regions: dict[Node, dict[tuple[object, ...], int]] = {}
    for load in trace.loads():
        start = (*(ix.const for ix in load.index), *load.args)
        size = round(elements(load, space) * _fetched(load, space.sizes))
        per_node = regions.setdefault(load.node, {})
        per_node[start] = max(per_node.get(start, 0), size)
    return {n: min(sum(r.values()), typical(n.type.numel)) * n.dtype.size for n, r in regions.items()}


def bytes_of(nodes: Iterable[Node], traces: Iterable[Trace]) -> int:
    """DRAM bytes of values that a kernel of some traced nests reads: each once and whole, but for tables.

    Of a table that all its loads read by index, they are those of the rows.
    """
    whole: set[Node] = set()
    rows: dict[Node, int] = {}
    for trace in traces:
        whole |= {load.node for load in trace.loads() if not load.lookups}
        for node, size in read_bytes(trace).items():
            rows[node] = rows.get(node, 0) + size
    return sum(n.type.nbytes if n in whole else min(n.type.nbytes, rows.get(n, n.type.nbytes)) for n in nodes)


def _let_through(guards: Sequence[Guard], sizes: Mapping[str, int]) -> float:
    """The part of a walk in which guards hold."""
    parts: dict[tuple[tuple[str, int], ...], float] = {}
    for guard in guards:
        extent = 1 + sum(abs(step) * (typical(sizes[name]) - 1) for name, step in guard.index.terms)
        part = min(1.0, typical(guard.hi - guard.lo) / extent)
        parts[guard.index.terms] = min(part, parts.get(guard.index.terms, 1.0))
    return math.prod(parts.values())


def _fetched(load: Inst, sizes: Mapping[str, int]) -> float:
    """Elements fetched for each one read: whole sectors, where short rows lie at places that are not known."""
    if not load.lookups:
        return 1.0
    steps = combine(load.index, contiguous_strides(load.node.shape)).terms
    run = math.prod(typical(sizes[name]) for name, step in steps if step in (1, -1))
    return max(1.0, SECTOR / (run * load.dtype.size))
