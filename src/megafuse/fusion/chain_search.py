"""Which chains a graph could have, as candidates for the cover."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import is_open
from megafuse.fusion.anchors import Anchors
from megafuse.fusion.chain import MOST_WIDTH, Finder, Member, chain_walks, make_chain, ordered
from megafuse.fusion.chain_cost import (
    MOST_SUMS_BYTES,
    chain_seconds,
    library_seconds,
    replaced_seconds,
    sums_bytes,
)
from megafuse.fusion.cost import NestCost
from megafuse.fusion.items import Item
from megafuse.ir.chain import (
    Chain,
    RowNest,
    SumDot,
    Walk,
    chain_traces,
    external_loads,
    external_reads,
    is_sum,
    loads_ahead,
    made_by,
    matrices_of,
)
from megafuse.ir.graph import Graph, Node
from megafuse.ir.index import Axis
from megafuse.ir.nest import Nest, Space
from megafuse.ir.trace import Inst, Memory, Trace
from megafuse.ir.types import Dot, Opaque
from megafuse.ir.views import memory_of

MANY_NODES = 600  # each form of a chain takes a whole search
ROWS_AT_ONCE = 32  # of the tiles of chains with sums
SINGLE_ROWS = 2  # rows for each SM up to which a program works on one row at a time
NOTHING = NestCost(0.0, (), 0, 0, 0.0, 0, 0)


def candidates(graph: Graph, anchors: Anchors, device: DeviceSpec, tf32: bool) -> Iterator[list[tuple[Chain, ...]]]:
    """For each set of stages that can be one kernel, the forms that it can have; of large graphs two.

    Behind the chain of a form stand those of sums that it leaves out.
    """
    many = len(graph.nodes) > MANY_NODES
    for walk in chain_walks(graph):
        finder = Finder(graph, anchors, walk, plain=walk.total > SINGLE_ROWS * device.sms)
        for forward in (True, False):
            for component in finder.components(forward):
                forms = list(_forms(finder, component, forward, walk.tiles(ROWS_AT_ONCE) <= device.sms))
                forms = [forms[0], forms[-1]] if many and len(forms) > 2 else forms
                yield [(chain, *_of_sums(finder, left, device, tf32)) for chain, left in forms]


def _forms(
    finder: Finder, component: Sequence[Member], forward: bool, once: bool
) -> Iterator[tuple[Chain, Sequence[Member]]]:
    """A forward chain as it is; of backward, several. With each the sums over rows that it leaves out.

    They read forward's values or compute them once more; they have some of the sums over rows on chip: those that are
    ready first. ``once``: programs have one row tile, after which they store each sum; else they hold their sums over
    the walk.
    """
    if forward:
        yield make_chain(finder.walk, component, (), True), ()
        return
    sums = [m for m in ordered(component) if isinstance(m.stage, SumDot)]
    known: set[tuple[frozenset[Node], frozenset[Node]]] = set()
    for kept in range(len(sums) if once else _fitting(sums), -1, -1):
        own = [m for m in component if m not in sums[kept:]]
        if sum(not isinstance(m.stage, RowNest) for m in own) < 1:
            continue
        for again in (finder.again(own, True), finder.again(own, False), ()):
            key = frozenset(m.node for m in own), frozenset(m.node for m in again)
            if key not in known:
                known.add(key)
                yield make_chain(finder.walk, own, again, False), sums[kept:]


def _of_sums(finder: Finder, sums: Sequence[Member], device: DeviceSpec, tf32: bool) -> Iterator[Chain]:
    """Chains of nothing but sums over the rows, as many in each as a program can hold.

    Sums stay with the library where that is predicted to be faster; where there are several problems; of fp32 values,
    for which matrix units are not trusted; and of rows that are no whole accesses of memory, which cannot be loaded
    ahead.
    """
    single = finder.walk.problems == 1
    held = [m for m in sums if single and loads_ahead(m.node) and sums_bytes(m.node) <= MOST_SUMS_BYTES]
    while held:
        count = _fitting(held)
        chain, held = make_chain(finder.walk, held[:count], (), False), held[count:]
        library = library_seconds([s.node for s in chain.dots], device, tf32)
        if chain_seconds(chain, finder.memory, device, ()) < library:
            yield chain


def _fitting(sums: Sequence[Member]) -> int:
    """How many sums over rows one program can hold."""
    held, count = 0, 0
    for member in sums:
        held += sums_bytes(member.node)
        if held > MOST_SUMS_BYTES:
            break
        count += 1
    return count


def left_out(graph: Graph, chains: Sequence[Chain]) -> Iterator[str]:
    """Why dots are in no chain: matrices too large beside a chain of as many rows, or open sizes."""
    sizes_open = sum(dot.is_a(Dot) and _has_open_sizes(dot) for dot in graph.nodes)
    if sizes_open > 1:
        yield f"{sizes_open} products are in no chain: their sizes are open"
    walks, inside = {c.walk for c in chains}, {s.node for c in chains for s in c.dots}
    for dot in graph.nodes:
        if not dot.is_a(Dot) or dot in inside or _has_open_sizes(dot) or Walk(*dot.shape[:2]) not in walks:
            continue
        inner, cols = dot.args[0].shape[2], dot.shape[2]
        if Walk(dot.shape[0], inner) not in walks and max(inner, cols) > MOST_WIDTH:
            yield f"{dot!r} is in no chain: its matrix of {inner} x {cols} is wider than {MOST_WIDTH}"


def _has_open_sizes(dot: Node) -> bool:
    return any(is_open(n) for n in (*dot.shape, dot.args[0].shape[2]))


def chain_item(chain: Chain, memory: Memory) -> Item:
    """The chain as an item of the search: what it reads from memory and which anchors it makes; without its cost."""
    traces = chain_traces(chain, memory)
    own = [s for s in chain.stages if isinstance(s, RowNest) and made_by(s) not in chain.again]
    nest = Nest(Space((Axis("rows", chain.walk.total),), ()), tuple(s.nest.roots[0] for s in own))
    matrices = dict.fromkeys(memory_of(n, memory) for s in chain.stages for n in matrices_of(s))
    loads = [load for load, _ in external_loads(chain, traces)]
    loads += [Inst("load", n, n.dtype, frozenset()) for n in matrices]
    return Item((Trace(nest, tuple(loads), {}),), NOTHING, chain.forward, chain=chain)


def chains_seconds(
    graph: Graph, memory: Memory, items: Sequence[Item], chains: Sequence[Chain], device: DeviceSpec, tf32: bool
) -> float:
    """Predicted time of the chains less that of the library's products in their place."""
    total = 0.0
    for chain in chains:
        stored = read_outside(graph, memory, [i.trace for i in items if i.chain is None], chains, chain)
        total += chain_seconds(chain, memory, device, stored)
        total -= replaced_seconds(chain, device, tf32)
    return total


def read_outside(
    graph: Graph, memory: Memory, traces: Sequence[Trace], chains: Sequence[Chain], chain: Chain
) -> Collection[Node]:
    """Values that anything but ``chain`` reads from memory: nests, other chains, library calls, the caller."""
    inside = {s.node for c in chains for s in c.dots if s.node not in c.again}
    called = [a for n in graph.nodes if n.is_a(Dot, Opaque) and n not in inside for a in n.args]
    read = {memory_of(n, memory) for n in (*called, *graph.outputs) if n is not None}
    for trace in traces:
        read |= trace.loaded()
    for other in chains:
        if other is not chain:
            read.update(external_reads(other, memory))
    return read | {made_by(s) for s in chain.stages if is_sum(s)}
