"""The cost model: predicted seconds of a nest from its bytes, its arithmetic and its registers.

``time = launch + max(DRAM bytes / bandwidth + cache bytes / L2 bandwidth, results / rate)``. DRAM bytes count each
region of a buffer once, however many indices read it; cache bytes count the further reads. The model ranks candidates;
it is never reported as a measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import typical
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.index import combine
from megafuse.ir.nest import Root
from megafuse.ir.ops import weight
from megafuse.ir.trace import Inst, Trace
from megafuse.ir.traffic import SECTOR, elements, read_bytes
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


def reduce_depth(trace: Trace) -> int:
    """Longest chain of row reductions that depend on one another."""
    depth: dict[Inst, int] = {}
    for inst in trace.insts:
        depth[inst] = max((depth[a] for a in inst.args), default=0) + (inst.kind == "reduce")
    return max(depth.values(), default=0)


Strides = Callable[[Node], tuple[int, ...]]


def nest_cost(trace: Trace, device: DeviceSpec, strides: Strides | None = None) -> NestCost:
    """Predict the cost of a traced nest on ``device``; ``strides`` gives layouts (contiguous where left out)."""
    space = trace.nest.space
    waste = sector_waste(trace, strides or (lambda node: contiguous_strides(node.shape)))
    reads = {n: round(b * waste.get(n, 1.0)) for n, b in read_bytes(trace).items()}
    touched = sum(elements(i, space) * i.dtype.size for i in trace.loads() if i.axes & space.col_names)
    writes = sum(_write_bytes(trace, device, r) for r in trace.nest.roots)
    cache = max(0, touched - sum(reads.values()))
    results = sum(weight(i.kind, i.fn) * elements(i, space) for i in trace.insts)
    tile = _tile_bytes(trace)
    depth = reduce_depth(trace)
    if tile > REGISTER_BYTES and depth:
        cache += depth * touched  # the columns are walked once more per dependent reduction
    memory = (sum(reads.values()) + writes) / device.dram_bandwidth + cache / device.l2_bandwidth
    seconds = max(memory, results / device.fp32_rate)
    return NestCost(seconds, tuple(reads.items()), writes, cache, results, tile, depth)


def sector_waste(trace: Trace, strides: Strides) -> dict[Node, float]:
    """For loads that run along rows in memory: bytes fetched per byte used.

    A program that must hold whole rows beside column sums holds few rows when these are wide; of each sector it then
    uses only as many elements as it holds rows.
    """
    space = trace.nest.space
    if not any(r.by_rows for r in trace.nest.roots) or not reduce_depth(trace):
        return {}
    rows = max(1, REGISTER_BYTES // max(1, _tile_bytes(trace)))
    out: dict[Node, float] = {}
    for load in trace.loads():
        if not (load.axes & space.col_names and load.axes & space.row_names):
            continue
        unit = [name for name, stride in combine(load.index, strides(load.node)).terms if stride in (1, -1)]
        if unit and unit[0] in space.row_names:
            run = min(rows, typical(space.sizes[unit[0]])) * load.dtype.size
            out[load.node] = max(out.get(load.node, 1.0), SECTOR / run)
    return out


def _write_bytes(trace: Trace, device: DeviceSpec, root: Root) -> int:
    """DRAM bytes written for one root; a column reduction writes and re-reads its partials."""
    node = root.anchor.value
    if root.by_rows:
        space = trace.nest.space
        programs = max(1, min(2 * device.sms, typical(space.num_rows) // 8))
        return int(typical(2 * programs * space.num_cols + node.type.numel)) * node.dtype.size
    return node.type.nbytes


def _tile_bytes(trace: Trace) -> int:
    """Register bytes of one row: loaded tiles, column accumulators and a few temporaries, all fp32."""
    space = trace.nest.space
    loads = sum(1 for i in trace.loads() if i.axes & space.col_names)
    accumulators = sum(1 for r in trace.nest.roots if r.by_rows)
    return (loads + accumulators + LIVE_TEMPORARIES) * int(typical(space.num_cols)) * 4


def is_float_op(node: Node) -> bool:
    """True for the floating-point maps, casts and reductions whose coverage by generated kernels is reported."""
    return node.dtype.is_float and isinstance(node.attrs, Map | Cast | Reduce)
