"""A limit on memory: of the values that forward saves, the cheapest ones are computed again until a step fits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megafuse.core.device import DeviceSpec
from megafuse.fusion.budget import by_price, computed_again, second_time
from megafuse.fusion.chain_cost import library_seconds
from megafuse.fusion.plan import Cover
from megafuse.ir.graph import Graph, Node
from megafuse.ir.types import Dot
from megafuse.schedule.memory import MemoryUse, memory_use
from megafuse.schedule.types import Step
from megafuse.select.choose import Selection

MOST_PLANS = 8  # that are made beside the first


@dataclass(frozen=True)
class Planned:
    """A graph with the cover that was chosen for it, and its schedule."""

    graph: Graph
    selection: Selection
    cover: Cover
    step: Step

    @functools.cached_property
    def use(self) -> MemoryUse:
        """The memory that a step takes."""
        return memory_use(self.step)

    def values(self, *kinds: str) -> list[Node]:
        """The graph's forward values in buffers of these kinds, in order."""
        kind = {b.name: b.kind for b in self.step.buffers}
        forward = self.graph.forward_nodes()
        return [n for n in self.graph.nodes if n in forward and kind.get(self.step.names.get(n, "")) in kinds]

    def seconds(self, device: DeviceSpec) -> float:
        """Predicted time of a step, products included."""
        dots = [n for n in self.graph.nodes if n.is_a(Dot)]
        return self.cover.seconds + library_seconds(dots, device, self.cover.tf32)


def within_budget(first: Planned, budget: int, plan: Callable[[Graph], Planned], device: DeviceSpec) -> Planned:
    """A plan that fits in ``budget`` bytes: it computes saved values again, the cheapest for their size first.

    So many are taken as hold what is too much, then more as long as it does not fit, up to all; but where all are
    computed again, they may be alive at the same time again, so that then fewer are tried. Where no plan fits, the one
    that takes least is returned. What was done, and what it costs, is among the cover's decisions.
    """
    if first.use.peak <= budget:
        return first
    tf32, saved, kept = first.cover.tf32, first.values("saved"), first.values("input", "output")
    order = [s.value for s in by_price(saved, kept, device, tf32)]
    best, count, tried = first, 0, set[int]()
    at = _enough(order, 0, first.use.peak - budget)
    while at and len(tried) < MOST_PLANS:
        stays = {*saved, *kept} - set(order[:at])
        times = [second_time(value, stays, device, tf32) for value in order[:at]]
        again = frozenset[Node]().union(*(t.nodes for t in times if t is not None))
        planned = plan(computed_again(first.graph, again, stays))
        if planned.use.peak < best.use.peak:
            best, count = planned, at
        if planned.use.peak <= budget:
            break
        tried.add(at)
        if len(order) not in tried:
            at = _enough(order, at, planned.use.peak - budget)
        else:
            at = next((n for n in (len(order) * i // 8 for i in (6, 4, 2)) if n and n not in tried), 0)
    return _with_decision(best, first, count, budget, device)


def _enough(order: Sequence[Node], start: int, size: int) -> int:
    """How many values hold ``size`` bytes beside the first ``start``; at least one more, at most all."""
    at = start
    while at < len(order) and (at == start or size > 0):
        size -= order[at].type.nbytes
        at += 1
    return at


def _with_decision(planned: Planned, first: Planned, count: int, budget: int, device: DeviceSpec) -> Planned:
    missed = planned.use.peak > budget
    said = (
        f"memory_budget of {_megabytes(budget)}{' is NOT REACHED' * missed}: {count} saved values are computed again "
        f"in backward; at most {_megabytes(planned.use.peak)} instead of {_megabytes(first.use.peak)} at a time, "
        f"{(planned.seconds(device) - first.seconds(device)) * 1e6:.1f} us more predicted"
    )
    cover = replace(planned.cover, decisions=(*planned.cover.decisions, said))
    return replace(planned, cover=cover)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
