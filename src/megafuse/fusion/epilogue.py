"""Dots that take the maps behind them into their own kernel: what they may take, and what that is predicted to cost.

A dot's *region* is what follows from its result element by element: maps, casts and moves that need nothing else which
depends on the dot. The values of the region that have memory (or one more that is given memory for this: the last sum
before a norm, say) can be computed from each tile of the product while it is in registers; the product itself is then
written only if something else reads it. Reductions of the region's values over all rows (bias gradients) leave one
partial result per tile of rows, which a second, small kernel adds up in fixed order as elsewhere. The library's product
may be faster than a generated one, so this is worth it where it saves more memory traffic than that costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.core.sizes import ceil_div, is_open
from megafuse.fusion.anchors import Anchors
from megafuse.fusion.cost import NestCost, nest_cost
from megafuse.fusion.initial import initial_nests
from megafuse.fusion.items import Item
from megafuse.fusion.merge import merge_nests, orient
from megafuse.ir.graph import Graph, Node
from megafuse.ir.index import Affine, Axis
from megafuse.ir.nest import Anchor, Nest, Root, Space
from megafuse.ir.trace import Memory, NestError, Trace, trace_nest
from megafuse.ir.types import Cast, Dot, Map, Opaque, Permute, Reduce, Reshape
from megafuse.ir.views import memory_of

# Types whose products may be generated. On an H200 generated fp32 products missed the acceptance rule: matrix units cut
# operands to TF32 where the library rounds them, and a chain of thousands of IEEE sums is less accurate than its sums.
HALVES = (DType.BF16, DType.F16)
EFFICIENCY = 0.97  # time of the library's product over that of a generated one
MOST_ENDS = 4  # values that one epilogue stores
PARTIAL_ROWS = 128  # of the product, over which a partial result runs (what the cost model takes)
MOST_SUMS = 4  # reductions over rows of which one epilogue stores partial results


@dataclass(frozen=True)
class DotRule:
    """How dots may be run. ``fuse``: as generated kernels where these are predicted to win; else by the library alone.

    ``tf32``: fp32 products are allowed to round their operands to TF32. ``chain``: several dots of one row axis run in
    one kernel where that is predicted to win.
    """

    fuse: bool = False
    tf32: bool = False
    chain: bool = False


LIBRARY = DotRule()


@dataclass(frozen=True)
class Epilogue:
    """A dot and the values that its kernel computes from the product."""

    dot: Node
    ends: tuple[Node, ...]


def epilogues(graph: Graph, anchors: Anchors, dot: Node, consumers: dict[Node, list[Node]]) -> list[Epilogue]:
    """What ``dot`` could take in: its region's values with memory; and with them the values that leave the region."""
    if any(is_open(n) for n in (*dot.shape, dot.args[0].shape[-1])) or dot.dtype not in HALVES:
        return []  # fp32 stays with the library: see HALVES
    if any(a.dtype is not dot.dtype for a in dot.args[:2]) or 1 in dot.shape[1:]:
        return []  # one row or column is no work for tiles
    region = _region(graph, dot)
    stored = [n for n in graph.nodes if n in region and n in anchors.nodes and n is not dot]
    leaving = [n for n in region if any(c not in region for c in consumers.get(n, ()))]
    last = [n for n in dict.fromkeys(map(_narrowed, leaving)) if n is not dot and n not in stored]
    order = {n: i for i, n in enumerate(graph.nodes)}
    options = [stored, sorted({*stored, *last}, key=order.__getitem__)]
    forward = graph.forward_nodes()
    sums = [n for n in graph.nodes if n.is_a(Reduce) and n.args[0] in region and (n in forward) == (dot in forward)]
    found: dict[Epilogue, None] = {}
    for ends in map(tuple, options):
        if len(ends) <= MOST_ENDS:
            found[_with_sums(Epilogue(dot, ends), sums, anchors.materialised)] = None
            found[Epilogue(dot, ends)] = None
    return [e for e in found if e.ends]


def _with_sums(epilogue: Epilogue, sums: Sequence[Node], materialised: Memory) -> Epilogue:
    """``epilogue`` with those of ``sums`` that run over all rows of the product and over none of its columns."""
    count = len(epilogue.ends)
    for node in sums:
        more = Epilogue(epilogue.dot, (*epilogue.ends, node))
        try:
            _trace(more, materialised)
        except NestError:
            continue
        epilogue = more
        if len(epilogue.ends) == count + MOST_SUMS:
            break
    return epilogue


def _region(graph: Graph, dot: Node) -> set[Node]:
    """``dot`` and all that follows from it element by element in its direction (forward or backward)."""
    forward = graph.forward_nodes()
    region, behind = {dot}, {dot}
    for node in graph.nodes:
        needed = [a for a in node.args if a in behind]
        if not needed or node in behind:
            continue
        behind.add(node)
        same = node.type.numel == dot.type.numel and (node in forward) == (dot in forward)
        if same and node.is_a(Map, Cast, Permute, Reshape) and all(a in region for a in needed):
            region.add(node)
    return region


def _narrowed(node: Node) -> Node:
    """The value to store for ``node``: what it is a move or a wider copy of."""
    while node.is_a(Permute, Reshape) or (node.is_a(Cast) and node.dtype.size > node.args[0].dtype.size):
        node = node.args[0]
    return node


def consumers_of(graph: Graph) -> dict[Node, list[Node]]:
    """Who reads each value, in the direction that makes it."""
    forward = graph.forward_nodes()
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for arg in node.args:
            if (node in forward) == (arg in forward):
                found.setdefault(arg, []).append(node)
    return found


def epilogue_item(epilogue: Epilogue, anchors: Anchors, device: DeviceSpec, rule: DotRule, forward: bool) -> Item:
    """The nest that computes the ends from the product: rows are the product's problems and rows, columns its columns.

    Raises:
        NestError: no walk over the product computes them.
    """
    trace = _trace(epilogue, anchors.materialised)
    cost = nest_cost(trace, device, anchors.strides)
    return Item((trace,), _cost(cost, trace, epilogue.dot, device, rule), forward, epilogue.dot)


def _trace(epilogue: Epilogue, materialised: Memory) -> Trace:
    """The ends from the product, in its rows and columns."""
    dot = epilogue.dot
    trace: Trace | None = None
    for n, end in enumerate(epilogue.ends):
        nest, *_ = initial_nests(Anchor(end), f"d{dot.uid}_{n}_")
        own = trace_nest(nest, materialised)
        trace = own if trace is None else merge_nests(trace, own, materialised)[0]
    assert trace is not None
    fixed, loop, cols = product_axes(trace, dot)
    space = Space((*fixed, *loop), cols)
    trace = trace_nest(Nest(space, tuple(orient(root, space) for root in trace.nest.roots)), materialised)
    _, loop, _ = product_axes(trace, dot)
    rows = {a.name for a in loop}
    if any(root.arg_index is not None and not rows <= root.reduced_axes for root in trace.nest.roots):
        raise NestError(f"a reduction keeps rows of the product {dot!r}, or runs over its columns")
    return trace


def product_axes(trace: Trace, dot: Node) -> tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...]]:
    """The axes that make up the problem, the row and the column of the product, each row-major.

    Raises:
        NestError: the nest does not read the product once, element by element.
    """
    loads = [i for i in trace.insts if i.kind == "load" and i.node is dot]
    if len(loads) != 1 or loads[0].guards:
        raise NestError(f"it reads the product {dot!r} at {len(loads)} places")
    if any(i.kind == "reduce" for i in trace.insts):
        raise NestError(f"it reduces what follows from the product {dot!r}")
    sizes = trace.nest.space.sizes
    groups = tuple(_row_major(index, n, sizes) for index, n in zip(loads[0].index, dot.shape, strict=True))
    if sum(map(len, groups)) != len(sizes):
        raise NestError(f"it walks more than the elements of the product {dot!r}")
    fixed, loop, cols = groups
    return fixed, loop, cols


def _row_major(index: Affine, size: int, sizes: dict[str, int]) -> tuple[Axis, ...]:
    """The axes of an index that runs through ``0 .. size - 1``, slowest first."""
    terms = sorted(index.terms, key=lambda t: -t[1])
    axes = tuple(Axis(name, sizes[name]) for name, _ in terms)
    steps = [math.prod(a.size for a in axes[n + 1 :]) for n in range(len(axes))]
    if index.const or steps != [s for _, s in terms] or math.prod(a.size for a in axes) != size:
        raise NestError("it reads the product in another order than the rows and columns of its tiles")
    return axes


def _cost(cost: NestCost, trace: Trace, dot: Node, device: DeviceSpec, rule: DotRule) -> NestCost:
    """Beside the library's product: what a generated one takes longer, and the epilogue's traffic and arithmetic."""
    reads = tuple((n, b) for n, b in cost.reads if n is not dot)
    writes = sum(_written(root, trace, dot) for root in trace.nest.roots)
    memory = (sum(b for _, b in reads) + writes) / device.dram_bandwidth
    seconds = max(memory, cost.results / device.fp32_rate) + slower_by(dot, device)
    return NestCost(seconds, reads, writes, 0, cost.results, cost.tile_bytes, 0)


def _written(root: Root, trace: Trace, dot: Node) -> int:
    """Bytes that one end writes; partial results of a reduction are written and read again."""
    node, sizes = root.anchor.value, trace.nest.space.sizes
    if not root.by_rows:
        return node.type.nbytes
    fixed, loop, _ = product_axes(trace, dot)
    tiles = ceil_div(math.prod(a.size for a in loop), PARTIAL_ROWS)
    tiles *= math.prod(sizes[a.name] for a in fixed if a.name in root.reduced_axes)
    return (2 * tiles + 1) * node.type.nbytes


def slower_by(dot: Node, device: DeviceSpec) -> float:
    """Predicted seconds by which a generated product is slower than the library's."""
    flops = 2.0 * math.prod(dot.shape) * dot.args[0].shape[-1]
    return flops / device.dot_rate_16bit * (1 / EFFICIENCY - 1)


def unwritten_bytes(graph: Graph, materialised: Memory, items: Sequence[Item]) -> int:
    """Bytes of the products that no one but their own epilogue reads, so that they are never written."""
    read = {n for i in items for n in i.trace.loaded() if n is not i.dot}
    called = [a for n in graph.nodes if n.is_a(Dot, Opaque) for a in n.args]
    read |= {memory_of(n, materialised) for n in (*called, *graph.outputs) if n is not None}
    return sum(i.dot.type.nbytes for i in items if i.dot is not None and i.dot not in read)
