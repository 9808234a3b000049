"""Small kernels that do not depend on one another share a launch.

Where the launch is most of a kernel's time, others of its kind can be done by further programs of the same launch
(``codegen.program``: phases that stand apart). Matrices that are normalised one by one are such kernels. So are the
finishers of sums, large ones too. Whether one depends on another is asked of the step as contracted so far, library
calls included: what comes of it can always be put in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megafuse.core.dependencies import Dependencies, union
from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import is_open
from megafuse.ir.graph import Node
from megafuse.ir.ops import weight
from megafuse.ir.traffic import bytes_of, elements
from megafuse.schedule.kernel_plan import KernelPlan
from megafuse.schedule.order import Work, is_given

MOST_PARTS = 16  # kernels of one launch: they are compiled together, in time that grows faster than their number
MOST_BUFFERS = 128  # arguments of one kernel
MOST_BYTES = 16 * 2**20  # of the step's values that one launch touches: so much, at most, may live longer for it
MOST_SUMMED = 64 * 2**20  # the same where it adds up partial sums: a chain's take many bytes, whatever its rows are


def share_launches(works: Sequence[Work], device: DeviceSpec, finishers_alone: bool = False) -> list[Work]:
    """The calls of a step, small kernels that do not depend on one another joined.

    ``works`` are in an order in which they can run; the result may be in none. A shared kernel has no key: its parts
    keep the tiles that they have alone. ``finishers_alone``: what adds up the partial sums of a kernel that has a key
    shares no launch with others, so that both can be measured together.
    """
    small = [n for n, w in enumerate(works) if w.kernel is not None and is_small(w, w.kernel, device)]
    sharing = _Sharing(works)
    sharing.join((n for n in small if not _plan(works[n]).finishes), MOST_BYTES)
    kept = sharing.keys() if finishers_alone else set()
    sums = [n for n, w in enumerate(works) if w.kernel is not None and w.kernel.finishes and _is_simple(w, w.kernel)]
    of: dict[str, list[int]] = {}
    for n in sums:
        key = _plan(works[n]).finishes
        of.setdefault(key if key in kept else "", []).append(n)
    for numbers in of.values():
        sharing.join(numbers, MOST_SUMMED)
    return sharing.joined() if sharing.groups else list(works)


def is_small(work: Work, kernel: KernelPlan, device: DeviceSpec) -> bool:
    """A kernel of one phase of known sizes that takes no longer than its launch."""
    if not _is_simple(work, kernel):
        return False
    trace, nodes = kernel.phases[0].trace, (*work.reads, *work.writes)
    additions = sum(weight(i.kind, i.fn) * elements(i, trace.nest.space) for i in trace.insts)
    seconds = max(bytes_of(nodes, [trace]) / device.dram_bandwidth, additions / device.fp32_rate)
    return seconds <= device.launch_seconds


def _is_simple(work: Work, kernel: KernelPlan) -> bool:
    """One phase, all sizes known."""
    if len(kernel.phases) != 1 or kernel.dot is not None or kernel.chain is not None:
        return False
    sizes = (*(n.type.numel for n in (*work.reads, *work.writes)), *kernel.phases[0].trace.nest.space.sizes.values())
    return not any(map(is_open, sizes))


def _held(nodes: Iterable[Node]) -> int:
    """Bytes of values that the step itself keeps."""
    return sum(n.type.nbytes for n in nodes if not is_given(n))


def _plan(work: Work) -> KernelPlan:
    assert work.kernel is not None
    return work.kernel


@dataclass
class _Group:
    """Works that share a launch, by number; the values that they read and write."""

    numbers: list[int]
    values: set[Node]

    @property
    def units(self) -> int:
        return union(1 << n for n in self.numbers)


class _Sharing:
    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works
        self.groups: list[_Group] = []
        makers: dict[Node, int] = {}
        for n, work in enumerate(works):
            for node in work.writes:
                makers[node] = makers.get(node, 0) | 1 << n
        self.dependencies = Dependencies([union(makers.get(node, 0) for node in w.reads) for w in works])

    def join(self, numbers: Iterable[int], most: int) -> None:
        """Put each work into the first group that can take it in, of those that this call makes; ``most``: bytes."""
        groups: list[_Group] = []
        for n in numbers:
            values = {*self.works[n].reads, *self.works[n].writes}
            group = next((g for g in groups if self._fits(g, n, values, most)), None)
            if group is None:
                groups.append(_Group([n], values))
                continue
            group.numbers.append(n)
            group.values |= values
            self.dependencies.join(group.units)
        self.groups += (g for g in groups if len(g.numbers) > 1)

    def _fits(self, group: _Group, number: int, values: set[Node], most: int) -> bool:
        first = group.numbers[0]
        if (self.dependencies.before(1 << first) | self.dependencies.after(1 << first)) >> number & 1:
            return False
        plan, other = _plan(self.works[first]), _plan(self.works[number])
        return (
            (plan.forward, plan.num_stages) == (other.forward, other.num_stages)
            and len(group.numbers) < MOST_PARTS
            and len(group.values | values) <= MOST_BUFFERS
            and _held(group.values | values) <= most
        )

    def _alone(self) -> list[int]:
        shared = {n for g in self.groups for n in g.numbers}
        return [n for n in range(len(self.works)) if n not in shared]

    def keys(self) -> set[str]:
        """The keys of the kernels that have a launch of their own."""
        return {w.kernel.key for w in (self.works[n] for n in self._alone()) if w.kernel is not None}

    def joined(self) -> list[Work]:
        """One work for each group, in the place of its first, among those that remain."""
        keys = self.keys()
        made = {n: _on_its_own(self.works[n], keys) for n in self._alone()}
        made |= {g.numbers[0]: _on_its_own(self._work(g), keys) for g in self.groups}
        return [made[n] for n in sorted(made)]

    def _work(self, group: _Group) -> Work:
        plans = [_plan(self.works[n]) for n in group.numbers]
        phases = tuple(itertools.chain.from_iterable(p.phases for p in plans))
        warps, first, *others = max(p.num_warps for p in plans), *dict.fromkeys(p.finishes for p in plans)
        kernel = KernelPlan(phases, warps, plans[0].forward, key="", finishes="" if others else first, apart=True)
        return Work(kernel.reads, kernel.writes, kernel.forward, kernel=kernel)


def _on_its_own(work: Work, keys: set[str]) -> Work:
    """What finishes the sums of a kernel without a key is a kernel like others."""
    if work.kernel is None or work.kernel.finishes in keys:
        return work
    return replace(work, kernel=replace(work.kernel, finishes=""))
