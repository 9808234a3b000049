"""Which kernels take their rows from the last to the first, to find in the L2 what the call before left there."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import ceil_div, typical
from megafuse.schedule.kernel_plan import KernelPlan
from megafuse.schedule.order import Work

AT_ONCE = 4  # programs with whole rows in registers that run at once on an SM, about: the order of fewer says nothing


def last_rows_first(order: Sequence[Work], device: DeviceSpec) -> frozenset[int]:
    """Positions in ``order`` of the kernels whose programs start with the last rows.

    The call before has just read or written a value that the L2 does not hold whole: its end is still there, and a walk
    in the same direction would push it out before it gets to it. Library calls go from the first problem to the last.
    """
    found: set[int] = set()
    before: Work | None = None
    for at, work in enumerate(order):
        turned = before is not None and at - 1 in found
        if before is not None and not turned and before.forward == work.forward:
            shared = {*before.reads, *before.writes}.intersection(work.reads)
            large = any(typical(node.type.nbytes) > device.l2_bytes for node in shared)
            if large and work.kernel is not None and _can_turn(work.kernel, device):
                found.add(at)
        before = work
    return frozenset(found)


def _can_turn(kernel: KernelPlan, device: DeviceSpec) -> bool:
    """Whether programs are numbered by their rows alone, and are more than run at once."""
    if kernel.dot is not None or kernel.chain is not None or kernel.apart:
        return False
    first = kernel.phases[0]
    if any(p.tile.col_grid for p in kernel.phases):
        return False
    rows = math.prod(typical(axis.size) for axis in first.loop)
    programs = math.prod(typical(axis.size) for axis in first.fixed) * ceil_div(rows, first.tile.rows_per_chunk)
    return programs > AT_ONCE * device.sms
