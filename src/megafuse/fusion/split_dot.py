"""Products whose results are too small to fill the device, and into how many parts of K they are cut for that."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import ceil_div, is_open
from megafuse.fusion.epilogue import EFFICIENCY, HALVES
from megafuse.ir.graph import Node

TILE = 128  # rows and columns of the tiles that are counted
LEAST_PART = 512  # of K
MOST_SPLITS = 128
LIBRARY_SPLITS = 4  # parts of K in which the library is taken to work where its tiles do not fill the device


@dataclass(frozen=True)
class Split:
    """A product in ``parts`` of K, and the seconds by which that is predicted to be faster than the library."""

    dot: Node
    parts: int
    gain: float


def split_of(dot: Node, device: DeviceSpec) -> Split | None:
    """How ``dot`` would be cut; None where its tiles fill the device, or where the library is predicted to be faster.

    ``time = max(flops / (rate * share of the SMs that have work), operand bytes / bandwidth)``, and for parts the
    sums that are written and read again, through the L2 cache, and one launch more.
    """
    if len(dot.args) > 2 or any(is_open(n) for n in (*dot.shape, *dot.args[0].shape)):
        return None
    if dot.dtype not in HALVES or any(a.dtype is not dot.dtype for a in dot.args) or 1 in dot.shape[1:]:
        return None
    problems, rows, cols = dot.shape
    inner = dot.args[0].shape[-1]
    tiles = problems * ceil_div(rows, TILE) * ceil_div(cols, TILE)
    parts = min(device.sms // tiles, inner // LEAST_PART, MOST_SPLITS)
    if parts < 2:
        return None
    work = 2.0 * math.prod(dot.shape) * inner / device.dot_rate_16bit
    memory = sum(a.type.nbytes for a in dot.args) / device.dram_bandwidth
    library = max(work / min(1.0, LIBRARY_SPLITS * tiles / device.sms), memory)
    sums = 2 * parts * math.prod(dot.shape) * 4 / device.l2_bandwidth + device.launch_seconds
    generated = max(work / EFFICIENCY / min(1.0, parts * tiles / device.sms), memory) + sums
    return Split(dot, parts, library - generated) if generated < library else None
