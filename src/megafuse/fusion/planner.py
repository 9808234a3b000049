"""The fusion stage: graph -> cover. Anchors, joining, grouping, and the save-or-recompute search around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.core.errors import VerifyError
from megafuse.fusion.anchors import Anchors, choose_anchors
from megafuse.fusion.cover import Item, Memo, Search, boundaries
from megafuse.fusion.group import Group, group_items, total_seconds
from megafuse.fusion.plan import Cover, KernelGroup
from megafuse.fusion.recompute import recompute_candidates
from megafuse.ir.graph import Graph, Node
from megafuse.ir.trace import NestError

MAX_ROUNDS = 4
MAX_STARTS = 200


@dataclass
class _Attempt:
    anchors: Anchors
    search: Search
    items: list[Item]
    groups: list[Group]

    @property
    def seconds(self) -> float:
        return total_seconds(self.groups)


def plan_cover(graph: Graph, wanted: Mapping[int, Sequence[int]], device: DeviceSpec) -> Cover:
    """Cover ``graph`` with nests.

    ``wanted[i]``: strides (elements) that output ``i`` must have. Values that several nests would recompute from many
    loads are given memory one at a time as long as the predicted time falls.
    """
    memo: Memo = {}
    best = _attempt(graph, wanted, device, (), memo)
    decisions: list[str] = []
    extra: tuple[Node, ...] = ()
    for _ in range(MAX_ROUNDS):
        for node in recompute_candidates([i.trace for i in best.items]):
            if node in extra:
                continue
            trial = _attempt(graph, wanted, device, (*extra, node), memo)
            if trial.seconds < 0.99 * best.seconds:
                gain = (best.seconds - trial.seconds) * 1e6
                decisions.append(f"{node!r} is stored once instead of recomputed: {gain:.1f} us less predicted")
                best, extra = trial, (*extra, node)
                break
        else:
            break
    return _freeze(graph, best, decisions)


def _attempt(
    graph: Graph, wanted: Mapping[int, Sequence[int]], device: DeviceSpec, extra: tuple[Node, ...], memo: Memo
) -> _Attempt:
    anchors, search = _start(graph, wanted, device, extra, memo)
    items = search.run()
    return _Attempt(anchors, search, items, group_items(search, items, device))


def _start(
    graph: Graph, wanted: Mapping[int, Sequence[int]], device: DeviceSpec, extra: tuple[Node, ...], memo: Memo
) -> tuple[Anchors, Search]:
    """Anchors under which every anchor can be computed alone: what a reshape cannot look through gets memory."""
    for _ in range(MAX_STARTS):
        anchors = choose_anchors(graph, wanted, extra)
        try:
            return anchors, Search(graph, anchors, device, memo)
        except NestError as error:
            if error.culprit is None or error.culprit in extra:
                raise VerifyError(f"a value cannot be computed in any nest: {error}") from error
            extra = (*extra, error.culprit)
    raise VerifyError(f"{MAX_STARTS} values were given memory without reaching a start")


def _freeze(graph: Graph, attempt: _Attempt, decisions: list[str]) -> Cover:
    items = [i for g in attempt.groups for i in g.items]
    number = {id(i): n for n, i in enumerate(items)}
    groups = tuple(KernelGroup(tuple(number[id(i)] for i in g.items), g.fixed, g.blocks_per_sm) for g in attempt.groups)
    return Cover(
        graph=graph,
        nests=tuple(i.nest for i in items),
        groups=groups,
        layout={n: attempt.anchors.strides(n) for n in attempt.anchors.materialised},
        materialised=attempt.anchors.materialised,
        boundaries=boundaries(attempt.search, items),
        seconds=attempt.seconds,
        decisions=tuple(decisions),
    )
