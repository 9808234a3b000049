"""The fusion stage: graph -> cover. Anchors, joining, grouping, and the save-or-recompute search around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megafuse.core.device import DeviceSpec
from megafuse.core.errors import VerifyError
from megafuse.fusion.anchors import Anchors, choose_anchors
from megafuse.fusion.cover import Search, boundaries
from megafuse.fusion.group import Group, group_items, single_groups, total_seconds
from megafuse.fusion.items import Items
from megafuse.fusion.plan import Cover, KernelGroup
from megafuse.fusion.recompute import recompute_candidates
from megafuse.ir.graph import Graph, Node
from megafuse.ir.trace import NestError

MAX_ROUNDS = 4
MAX_STARTS = 200
WORTH_STORING = 0.99  # predicted time with the value stored, over the time without, below which it is


@dataclass(frozen=True)
class CoverOption:
    """One complete way to cover a graph, before it is chosen. ``seconds``: predicted time outside dots."""

    name: str
    seconds: float
    graph: Graph
    anchors: Anchors
    search: Search
    groups: tuple[Group, ...]
    decisions: tuple[str, ...]

    def cover(self) -> Cover:
        """The cover as data, with the reasons for its boundaries."""
        items = [i for g in self.groups for i in g.items]
        number = {id(i): n for n, i in enumerate(items)}
        groups = tuple(
            KernelGroup(tuple(number[id(i)] for i in g.items), g.fixed, g.blocks_per_sm) for g in self.groups
        )
        return Cover(
            graph=self.graph,
            nests=tuple(i.nest for i in items),
            groups=groups,
            layout={n: self.anchors.strides(n) for n in self.anchors.materialised},
            materialised=self.anchors.materialised,
            boundaries=boundaries(self.search, items),
            seconds=self.seconds,
            decisions=self.decisions,
        )


def cover_options(graph: Graph, wanted: Mapping[int, Sequence[int]], device: DeviceSpec) -> tuple[CoverOption, ...]:
    """Ways to cover ``graph`` with nests, for ``select`` to choose from.

    ``wanted[i]``: strides (elements) that output ``i`` must have. Each set of stored values is offered with nests as
    kernels of their own and, where some share outer rows, as phases of one kernel. Values that several nests would
    recompute from many loads are given memory one at a time as long as the predicted time falls.
    """
    known = Items(graph, device)
    decisions: tuple[str, ...] = ()
    best = _options(graph, wanted, known, (), decisions)
    found = list(best)
    extra: tuple[Node, ...] = ()
    for _ in range(MAX_ROUNDS):
        for node in recompute_candidates([i.trace for g in best[0].groups for i in g.items]):
            if node in extra:
                continue
            trial = _options(graph, wanted, known, (*extra, node), decisions)
            before, after = _least(best), _least(trial)
            if after < WORTH_STORING * before:
                gain = (before - after) * 1e6
                said = f"{node!r} is stored once instead of recomputed: {gain:.1f} us less predicted"
                decisions, extra = (*decisions, said), (*extra, node)
                best = [replace(o, decisions=decisions) for o in trial]
                found.extend(best)
                break
        else:
            break
    return tuple(found)


def _least(options: Sequence[CoverOption]) -> float:
    return min(o.seconds for o in options)


def _options(
    graph: Graph,
    wanted: Mapping[int, Sequence[int]],
    known: Items,
    extra: tuple[Node, ...],
    decisions: tuple[str, ...],
) -> list[CoverOption]:
    """The options for one set of stored values: separate kernels and, where they differ, phases."""
    anchors, search = _start(graph, wanted, known, extra)
    items = search.run()
    stored = f"{len(extra)} values stored, " if extra else ""
    out: list[CoverOption] = []
    for name, groups in (
        ("separate kernels", single_groups(items, known.device)),
        ("phases", group_items(search, items, known.device)),
    ):
        if not out or len(groups) != len(out[0].groups):
            seconds = total_seconds(groups)
            out.append(CoverOption(stored + name, seconds, graph, anchors, search, tuple(groups), decisions))
    return out


def _start(
    graph: Graph, wanted: Mapping[int, Sequence[int]], known: Items, extra: tuple[Node, ...]
) -> tuple[Anchors, Search]:
    """Anchors under which every anchor can be computed alone: what a reshape cannot look through gets memory."""
    for _ in range(MAX_STARTS):
        anchors = choose_anchors(graph, wanted, extra)
        try:
            return anchors, Search(graph, anchors, known)
        except NestError as error:
            if error.culprit is None or error.culprit in extra:
                raise VerifyError(f"a value cannot be computed in any nest: {error}") from error
            extra = (*extra, error.culprit)
    raise VerifyError(f"{MAX_STARTS} values were given memory without reaching a start")
