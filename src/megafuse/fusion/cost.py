"""The cost model: predicted seconds of a nest from its bytes, its arithmetic and its registers.

``time = launch + max(DRAM bytes / bandwidth + cache bytes / L2 bandwidth, results / rate)``. DRAM bytes count each
region of a buffer once, however many indices read it; cache bytes count the further reads. The model ranks candidates;
it is never reported as a measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.ir.graph import Node
from megafuse.ir.nest import Root, Space
from megafuse.ir.ops import MAP_FNS
from megafuse.ir.trace import Inst, Trace
from megafuse.ir.types import Cast, Map, Reduce

LIVE_TEMPORARIES = 4
REGISTER_BYTES = 200 * 1024  # of the 256 KiB register file of an SM, what one program's tile may take


@dataclass(frozen=True)
class NestCost:
    """Predicted cost of one nest. Bytes; ``seconds`` excludes the launch. ``reads``/``writes``: DRAM bytes by node."""

    seconds: float
    reads: tuple[tuple[Node, int], ...]
    write_bytes: int
    cache_bytes: int
    results: float
    tile_bytes: int
    reduce_depth: int

    @property
    def dram_bytes(self) -> int:
        """Predicted DRAM traffic in bytes."""
        return sum(b for _, b in self.reads) + self.write_bytes


def read_bytes(trace: Trace) -> dict[Node, int]:
    """DRAM bytes read of each node: distinct regions once, at most the whole buffer."""
    sizes = trace.nest.space.sizes
    regions: dict[Node, dict[tuple[int, ...], int]] = {}
    for load in trace.loads():
        start = tuple(ix.const for ix in load.index)
        size = math.prod(sizes[a] for a in load.axes)
        per_node = regions.setdefault(load.node, {})
        per_node[start] = max(per_node.get(start, 0), size)
    return {n: min(sum(r.values()), n.type.numel) * n.dtype.size for n, r in regions.items()}


def level_counts(inst: Inst, space: Space) -> int:
    """How many elements an instance has in the whole nest."""
    sizes = space.sizes
    return math.prod(sizes[a] for a in inst.axes)


def reduce_depth(trace: Trace) -> int:
    """Longest chain of row reductions that depend on one another."""
    depth: dict[Inst, int] = {}
    for inst in trace.insts:
        depth[inst] = max((depth[a] for a in inst.args), default=0) + (inst.kind == "reduce")
    return max(depth.values(), default=0)


def nest_cost(trace: Trace, device: DeviceSpec) -> NestCost:
    """Predict the cost of a traced nest on ``device``."""
    space = trace.nest.space
    reads = read_bytes(trace)
    touched = sum(level_counts(i, space) * i.dtype.size for i in trace.loads() if i.axes & space.col_names)
    writes = sum(_write_bytes(trace, device, r) for r in trace.nest.roots)
    cache = max(0, touched - sum(reads.values()))
    results = sum(_weight(i) * level_counts(i, space) for i in trace.insts)
    tile = _tile_bytes(trace)
    depth = reduce_depth(trace)
    if tile > REGISTER_BYTES and depth:
        cache += depth * touched  # the columns are walked once more per dependent reduction
    memory = (sum(reads.values()) + writes) / device.dram_bandwidth + cache / device.l2_bandwidth
    seconds = max(memory, results / device.fp32_rate)
    return NestCost(seconds, tuple(reads.items()), writes, cache, results, tile, depth)


def _weight(inst: Inst) -> float:
    if inst.kind == "map" and inst.fn in MAP_FNS:
        return 1.0 + 15.0 * MAP_FNS[inst.fn].special
    return 0.0 if inst.kind == "const" else 1.0


def _write_bytes(trace: Trace, device: DeviceSpec, root: Root) -> int:
    """DRAM bytes written for one root; a column reduction writes and re-reads its partials."""
    node = root.anchor.value
    if root.by_rows:
        space = trace.nest.space
        programs = max(1, min(2 * device.sms, space.num_rows // 8))
        return (2 * programs * space.num_cols + node.type.numel) * node.dtype.size
    return node.type.nbytes


def _tile_bytes(trace: Trace) -> int:
    """Register bytes of one row: loaded tiles, column accumulators and a few temporaries, all fp32."""
    space = trace.nest.space
    loads = sum(1 for i in trace.loads() if i.axes & space.col_names)
    accumulators = sum(1 for r in trace.nest.roots if r.by_rows)
    return (loads + accumulators + LIVE_TEMPORARIES) * space.num_cols * 4


def is_float_op(node: Node) -> bool:
    """True for the floating-point maps, casts and reductions whose coverage by generated kernels is reported."""
    return node.dtype.is_float and isinstance(node.attrs, Map | Cast | Reduce)
