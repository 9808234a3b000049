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
    Programs of chains walk side by side: each leaves the end of its rows, of all values together, and sums alone over
    the same rows start there.
    """
    found: set[int] = set()
    before: Work | None = None
    for at, work in enumerate(order):
        turned = before is not None and at - 1 in found
        if before is not None and not turned and before.forward == work.forward:
            shared = {*before.reads, *before.writes}.intersection(work.reads)
            if _both_walk(before, work):
                touched = {*before.reads, *before.writes}
                large = bool(shared) and sum(n.type.nbytes for n in touched) > device.l2_bytes
            else:
                large = any(typical(node.type.nbytes) > device.l2_bytes for node in shared)
            if large and work.kernel is not None and _can_turn(work.kernel, device):
                found.add(at)
        before = work
    return frozenset(found)


def _both_walk(before: Work, work: Work) -> bool:
    """Whether both are chains of the same rows."""
    chains = [w.kernel.chain if w.kernel is not None else None for w in (before, work)]
    return all(chains) and len({c.walk for c in chains if c is not None}) == 1


def _can_turn(kernel: KernelPlan, device: DeviceSpec) -> bool:
    """Whether programs are numbered by their rows alone, and are more than run at once; or are sums alone."""
    if kernel.chain is not None:
        tile = kernel.chain.tile
        return kernel.chain.rules.streamed and tile.rows_per_chunk > tile.rows and not tile.early
    if kernel.dot is not None or kernel.apart:
        return False
    first = kernel.phases[0]
    if any(p.tile.col_grid for p in kernel.phases):
        return False
    rows = math.prod(typical(axis.size) for axis in first.loop)
    programs = math.prod(typical(axis.size) for axis in first.fixed) * ceil_div(rows, first.tile.rows_per_chunk)
    return programs > AT_ONCE * device.sms
