"""Order of kernels and library calls: dependencies first, then the choice that leaves least memory alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megafuse.ir.graph import Graph, Node
from megafuse.ir.types import Dot, Input, Opaque, Pick
from megafuse.ir.views import view_base
from megafuse.schedule.kernels import KernelPlan


@dataclass(frozen=True, eq=False)
class Work:
    """One call: a kernel, a dot or an opaque call, with the values it reads and writes."""

    reads: tuple[Node, ...]
    writes: tuple[Node, ...]
    forward: bool
    kernel: KernelPlan | None = None
    node: Node | None = None


def collect_work(graph: Graph, kernels: Sequence[KernelPlan], materialised: frozenset[Node]) -> list[Work]:
    """All calls of a step, unordered."""
    forward = graph.forward_nodes()
    works = [Work(k.reads, k.writes, k.forward, kernel=k) for k in kernels]
    picks: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if isinstance(node.attrs, Pick):
            picks.setdefault(node.args[0], []).append(node)
    for node in graph.nodes:
        if isinstance(node.attrs, Dot | Opaque):
            reads = tuple(dict.fromkeys(memory_of(a, materialised) for a in node.args))
            writes = (node, *picks.get(node, ()))
            works.append(Work(reads, writes, node in forward, node=node))
    return works


def memory_of(node: Node, materialised: frozenset[Node]) -> Node:
    """The materialised value of which ``node`` is a view (itself, where it has memory of its own)."""
    base = node
    while base not in materialised and base is not view_base(base):
        base = base.args[0]
    return base


def order_work(works: Sequence[Work], kept: frozenset[Node], sizes: Mapping[Node, int]) -> list[Work]:
    """Order calls so that values die early.

    ``kept``: values that outlive the step (outputs, gradients, inputs). Among the calls that are ready, the one that
    frees most and allocates least goes first; forward calls all precede backward calls.
    """
    pending = list(works)
    made = {n for w in works for n in w.writes}
    writers: dict[Node, int] = {}  # calls still to come that write (a part of) a value
    for work in works:
        for node in work.writes:
            writers[node] = writers.get(node, 0) + 1
    readers: dict[Node, int] = {}
    for work in works:
        for node in work.reads:
            readers[node] = readers.get(node, 0) + 1
    out: list[Work] = []
    while pending:
        phase = [w for w in pending if w.forward] or pending
        ready = [w for w in phase if not any(writers.get(n) for n in w.reads)]
        if not ready:
            raise AssertionError("the calls of a step depend on one another in a circle")
        best = max(ready, key=lambda w: (_freed(w, readers, kept, made, sizes), -works.index(w)))
        pending.remove(best)
        for node in best.writes:
            writers[node] -= 1
        for node in best.reads:
            readers[node] -= 1
        out.append(best)
    return out


def _freed(
    work: Work, readers: Mapping[Node, int], kept: frozenset[Node], made: set[Node], sizes: Mapping[Node, int]
) -> int:
    frees = sum(sizes[n] for n in work.reads if readers[n] == 1 and n in made and n not in kept)
    return frees - sum(sizes[n] for n in work.writes if n not in kept)


def is_given(node: Node) -> bool:
    """True for values that the caller hands in."""
    return isinstance(node.attrs, Input) and node.attrs.role != "partial"
