"""Order of kernels and library calls: dependencies first, then the choice that leaves least memory alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megafuse.ir.graph import Graph, Node
from megafuse.ir.types import Dot, Input, Opaque, Pick
from megafuse.ir.views import memory_of
from megafuse.schedule.kernel_plan import KernelPlan


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
    generated = {k.dot.node for k in kernels if k.dot is not None}
    generated = generated.union(*(k.chain.owned for k in kernels if k.chain is not None))
    for node in graph.nodes:
        if isinstance(node.attrs, Dot | Opaque) and node not in generated:
            reads = tuple(dict.fromkeys(memory_of(a, materialised) for a in node.args))
            writes = (node, *picks.get(node, ()))
            works.append(Work(reads, writes, node in forward, node=node))
    return works


def order_work(works: Sequence[Work], kept: frozenset[Node], sizes: Mapping[Node, int]) -> list[Work]:
    """Order calls so that values die early.

    ``kept``: values that outlive the step (outputs, gradients, inputs). Among the calls that are ready, the one that
    frees most and allocates least goes first; forward calls all precede backward calls.
    """
    made = {n for w in works for n in w.writes}
    position = {w: n for n, w in enumerate(works)}
    writers = Counter(n for w in works for n in w.writes)  # calls still to come that write (a part of) a value
    readers = Counter(n for w in works for n in w.reads)
    missing = {w: {n for n in w.reads if n in made} for w in works}
    waiting: dict[Node, list[Work]] = {}
    for work, nodes in missing.items():
        for node in nodes:
            waiting.setdefault(node, []).append(work)
    ready = {w for w in works if not missing[w]}
    forward_left = sum(w.forward for w in works)
    out: list[Work] = []
    while len(out) < len(works):
        phase = [w for w in ready if w.forward or not forward_left]
        if not phase:
            raise AssertionError("the calls of a step depend on one another in a circle")
        best = max(phase, key=lambda w: (_freed(w, readers, kept, made, sizes), -position[w]))
        ready.remove(best)
        forward_left -= best.forward
        readers.subtract(best.reads)
        writers.subtract(best.writes)
        for node in best.writes:
            for work in waiting.get(node, ()) if not writers[node] else ():
                missing[work].discard(node)
                if not missing[work]:
                    ready.add(work)
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
