"""What a chain is predicted to cost, beside the library's products and the nests that it takes the place of.

``time = launch + start + dots * latency + memory + arithmetic (+ launch + partial sums)``. Memory: each external row
once, matrices, what is stored. Arithmetic: products and sums over the rows at the shares of the device's rate that
tiles in registers reach, the maps' results, and what is stored in passing. In one program these overlap little, so they
are added up; but for a chain of nothing but sums, whose rows go to shared memory ahead of the products. Latency: what
the dependent products of one row tile take, once.

The constants are fitted to timings on one H200 that are not kept as records (GPU time in CUDA graphs; width 128,
fp16, three to five layers with softplus, 64 to 2**20 rows; with it three odd layers of bf16 and three tiny ones of
fp32). The unit tests hold what was faster there; nothing else is known of other GPUs than their rates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from megafuse.core.device import DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.core.sizes import ceil_div, typical
from megafuse.fusion.cost import nest_cost
from megafuse.ir.chain import (
    Chain,
    RowNest,
    SumDot,
    block,
    chain_traces,
    external_loads,
    is_sum,
    made_by,
    matrices_of,
    nests_of,
    only_sums,
    turned,
    turned_rows,
)
from megafuse.ir.graph import Node
from megafuse.ir.nest import Nest
from megafuse.ir.trace import Memory, Trace
from megafuse.ir.traffic import bytes_of
from megafuse.ir.views import memory_of

SUMS_SHARE = 0.45  # of the rate of products, by sums over the rows, whose operands are turned
TURNED = 0.52  # of the time of work in tiles of rows by columns, in tiles of columns by rows: no warp does it again
MAP_SHARE = 1.15  # of the rate at which maps run that are kernels of their own
STORE_RATE = 2.0e12  # 16-bit elements of row values that a device moves from registers to addresses in a second
LATENCY = 0.6e-6  # of one product of a row tile, its operands and what follows
START = 0.7e-6  # until the first rows and matrices are there
SMALLEST = 1.0e-6  # of the library's smallest product, beside its launch
ALONE = 1.4e-9  # of the library for each step of the longest sum, where one program or few make the product
SPLIT = 6.0e-6  # at most: then it splits the sums, and adds up their parts
UNALIGNED = 4.0  # as long does the library take where neighbouring rows of a matrix are not 16 bytes apart
LIBRARY_TILE = 128
TYPICAL_ROWS = 64  # of a tile; half as many where sums fill the registers or programs would be idle
MOST_SUMS_BYTES = 132 * 1024  # of fp32 sums over rows that one program can hold in registers beside its tiles


def chain_seconds(chain: Chain, memory: Memory, device: DeviceSpec, stored: Collection[Node]) -> float:
    """Predicted time of one launch; ``stored`` are the values of the chain that something outside reads."""
    traces = chain_traces(chain, memory)
    sums = [s for s in chain.stages if is_sum(s)]
    seen = {load.node for load, _ in external_loads(chain, traces)}
    seen |= {memory_of(n, memory) for s in chain.stages for n in matrices_of(s)}
    written = [made_by(s).type for s in chain.stages if made_by(s) in stored and s not in sums]
    moved = bytes_of(seen, traces.values()) + sum(t.nbytes for t in written)
    tiles = ceil_div(chain.rows, tile := _tile_rows(chain, device))
    each = chain.walk.tiles_each(tile, device.sms)
    waves = ceil_div(chain.problems * ceil_div(tiles, each), device.sms)
    parts = min(max(1, waves * device.sms // chain.problems), tiles)
    programs = chain.problems * parts / waves  # that work at a time
    walk, memory_seconds = waves * (START + LATENCY * len(chain.dots)), moved / device.dram_bandwidth
    if only_sums(chain):
        flops = sum(dot_flops(s.node) for s in chain.dots)
        walk += max(memory_seconds, flops / dot_rate(chain, device) * device.sms / programs)
    else:
        work = _work(chain, traces, device) * (TURNED if turned(chain, device) else 1.0)
        work += sum(t.nbytes for t in written) / 2 / STORE_RATE
        walk += memory_seconds + work * device.sms / programs
    partial = sum(made_by(s).type.numel * 4 * 2 * parts for s in sums)
    finish = device.launch_seconds + partial / device.l2_bandwidth if sums and parts > 1 else 0.0
    return device.launch_seconds + walk + finish


def _tile_rows(chain: Chain, device: DeviceSpec) -> int:
    """Rows of its tiles, about."""
    sums = any(map(is_sum, chain.stages))
    if only_sums(chain):
        return TYPICAL_ROWS
    if turned(chain, device):
        return turned_rows(chain.walk, sums, device)
    few = sums or chain.walk.tiles(TYPICAL_ROWS) <= device.sms // 2
    return TYPICAL_ROWS // 2 if few else TYPICAL_ROWS


def _work(chain: Chain, traces: Mapping[Nest, Trace], device: DeviceSpec) -> float:
    """Time of all products and maps on a whole device."""
    rate = dot_rate(chain, device)
    flops = sum(dot_flops(s.node) / (SUMS_SHARE if isinstance(s, SumDot) else 1.0) for s in chain.dots)
    nests = [n for s in chain.stages if isinstance(s, RowNest) for n in nests_of(s)]
    return flops / rate + sum(nest_cost(traces[n], device).results for n in nests) / (device.fp32_rate * MAP_SHARE)


def dot_rate(chain: Chain, device: DeviceSpec) -> float:
    """Flop per second of the chain's products at best."""
    if chain.dots[0].node.dtype is not DType.F32:
        return device.dot_rate_16bit
    return device.dot_rate_fp32


def library_seconds(dots: Sequence[Node], device: DeviceSpec, tf32: bool) -> float:
    """Predicted time of the library for some dots, one call each."""
    total = 0.0
    for dot in dots:
        half = dot.dtype is not DType.F32
        rate = device.dot_rate_16bit if half else device.dot_rate_tf32 if tf32 else device.dot_rate_fp32
        moved = dot.type.nbytes + sum(a.type.nbytes for a in dot.args)
        slow = UNALIGNED if any(typical(n.shape[2]) * n.dtype.size % 16 for n in (dot, *dot.args[:2])) else 1.0
        busy = max(SMALLEST, slow * moved / device.dram_bandwidth, slow * dot_flops(dot) / rate)
        total += device.launch_seconds + busy + _long_sums(dot, device)
    return total


def replaced_seconds(chain: Chain, device: DeviceSpec, tf32: bool) -> float:
    """Predicted time of the library for the products that it need not make beside the chain."""
    return library_seconds([s.node for s in chain.dots if s.node not in chain.again], device, tf32)


def _long_sums(dot: Node, device: DeviceSpec) -> float:
    """What a product takes longer whose tiles are too few for the device."""
    problems, rows, cols = (typical(n) for n in dot.shape)
    tiles = problems * ceil_div(rows, LIBRARY_TILE) * ceil_div(cols, LIBRARY_TILE)
    return min(SPLIT, ALONE * typical(dot.args[0].shape[2])) if tiles <= device.sms // 4 else 0.0


def dot_flops(dot: Node) -> float:
    """Multiplications and additions."""
    return 2.0 * math.prod(dot.shape) * dot.args[0].shape[2]


def sums_bytes(stage_node: Node) -> int:
    """Bytes of the fp32 sums that a sum over rows holds in a program."""
    return math.prod(map(block, stage_node.shape[1:])) * 4
