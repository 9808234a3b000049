"""The fusion stage: graph -> cover. Anchors, joining, grouping, and the save-or-recompute search around them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megafuse.core.device import DeviceSpec
from megafuse.core.errors import VerifyError
from megafuse.core.text import counted
from megafuse.fusion.anchors import Anchors, choose_anchors
from megafuse.fusion.chain_cost import replaced_seconds
from megafuse.fusion.chain_search import candidates, chain_item, chains_seconds, left_out
from megafuse.fusion.cover import Search, boundaries
from megafuse.fusion.epilogue import (
    LIBRARY,
    DotRule,
    Epilogue,
    consumers_of,
    epilogue_item,
    epilogues,
    slower_by,
    unwritten_bytes,
)
from megafuse.fusion.group import Group, group_items, single_groups, total_seconds
from megafuse.fusion.items import Items
from megafuse.fusion.plan import Cover, KernelGroup
from megafuse.fusion.recompute import recompute_candidates
from megafuse.fusion.split_dot import split_of
from megafuse.ir.chain import Chain, made_by, only_sums
from megafuse.ir.graph import Graph, Node
from megafuse.ir.trace import NestError
from megafuse.ir.types import Dot

MAX_ROUNDS = 4
MAX_STARTS = 200
MOST_DOTS = 64  # that are tried with an epilogue
MOST_CHAINS = 32  # that are tried
WORTH_FUSING = 2.0  # predicted saving of an epilogue, over what the slower product costs, from which it is taken in
WORTH_CHAINING = 0.2  # predicted saving of a chain, over the time of the products it replaces, from which it is taken
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
    tf32: bool = False
    chains: tuple[Chain, ...] = ()
    splits: Mapping[Node, int] = field(default_factory=dict)

    def cover(self) -> Cover:
        """The cover as data, with the reasons for its boundaries."""
        items = [i for g in self.groups for i in g.items if i.chain is None]
        number = {id(i): n for n, i in enumerate(items)}
        groups = tuple(
            KernelGroup(tuple(number[id(i)] for i in g.items), g.fixed, g.blocks_per_sm, g.items[0].dot)
            for g in self.groups
            if g.items[0].chain is None
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
            tf32=self.tf32,
            chains=self.chains,
            splits=self.splits,
        )


def cover_options(
    graph: Graph, wanted: Mapping[int, Sequence[int]], device: DeviceSpec, dots: DotRule = LIBRARY
) -> tuple[CoverOption, ...]:
    """Ways to cover ``graph`` with nests, for ``select`` to choose from.

    ``wanted[i]``: strides (elements) that output ``i`` must have. Each set of stored values is offered with nests as
    kernels of their own and, where some share outer rows, as phases of one kernel. Values that several nests would
    recompute from many loads are given memory one at a time as long as the predicted time falls. Then, where ``dots``
    allow it, dots take in what follows from them, one dot at a time, where that is predicted to win.
    """
    known = Items(graph, device)
    plan = _Plan(graph, wanted, known, dots)
    best = _options(plan, (), ())
    found = list(best)
    extra: tuple[Node, ...] = ()
    decisions: tuple[str, ...] = ()
    for _ in range(MAX_ROUNDS):
        for node in recompute_candidates([i.trace for g in best[0].groups for i in g.items]):
            if node in extra:
                continue
            trial = _options(plan, (*extra, node), decisions)
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
    extra = best[0].anchors.extra  # with what could not be computed where it is read
    fused = _with_chains(plan, best, extra) if dots.chain else []
    fused = _with_splits(plan, _with_epilogues(plan, fused or best, extra)) if dots.fuse else fused
    names = {o.name for o in fused}  # where nothing was taken in, these are the best ones with the reasons
    return (*(o for o in found if o.name not in names), *fused)


@dataclass(frozen=True)
class _Plan:
    """What all options of one graph share."""

    graph: Graph
    wanted: Mapping[int, Sequence[int]]
    known: Items
    dots: DotRule


def _with_chains(plan: _Plan, best: list[CoverOption], extra: tuple[Node, ...]) -> list[CoverOption]:
    """The options in which dots run in chains; of each chain's forms the best, where the predicted time falls."""
    decisions = best[0].decisions
    chains: tuple[Chain, ...] = ()
    alone: list[tuple[Chain, str]] = []  # of forward, not worth it if backward reads what they make
    found = candidates(plan.graph, best[0].anchors, plan.known.device, plan.dots.tf32)
    for forms in itertools.islice(found, MOST_CHAINS):
        tried, reason = _tried(plan, extra, chains, forms)
        both = [(*before, *form) for form in forms if (before := _computed_again(form[0], alone))]
        tried += _tried(plan, extra, chains, both)[0]
        (first, *_), *_ = forms
        made = ", ".join(repr(s.node) for s in first.dots)
        if tried:
            trial, new = min(tried, key=lambda t: _least(t[0]))
            gain = (_least(best) - _least(trial)) * 1e6
            enough = WORTH_CHAINING * 1e6 * sum(replaced_seconds(c, plan.known.device, plan.dots.tf32) for c in new)
            reason = f"in a chain {abs(gain):.1f} us {'less' if gain > 0 else 'more'} predicted"
            if gain > enough:
                best, chains = trial, (*chains, *new)
                said = f"{made} with {new[-1].walk} run as a chain: {gain:.1f} us less predicted"
                of_sums = [s.node for c in new if only_sums(c) for s in c.dots]
                if of_sums:
                    said += f"; of these {', '.join(map(repr, of_sums))} by kernels that do nothing else"
                if new[0].forward and not new[-1].forward:
                    said += ", with the chain of forward"
                    decisions = tuple(d for d in decisions if d not in [s for c, s in alone if c in new])
                    alone = [(c, s) for c, s in alone if c not in new]
                decisions = (*decisions, said)
                continue
        said = f"{made} with {first.walk} are products of their own: {reason}"
        decisions = (*decisions, said)
        if first.forward:
            alone.append((first, said))
    decisions = (*decisions, *left_out(plan.graph, chains))
    return [replace(o, decisions=decisions) for o in best]


def _computed_again(form: Chain, alone: Sequence[tuple[Chain, str]]) -> tuple[Chain, ...]:
    """The chains of forward that make what ``form``, of backward, computes once more."""
    return tuple(chain for chain, _ in alone if any(made_by(stage) in form.again for stage in chain.stages))


def _tried(
    plan: _Plan, extra: tuple[Node, ...], chains: tuple[Chain, ...], more: Sequence[tuple[Chain, ...]]
) -> tuple[list[tuple[list[CoverOption], tuple[Chain, ...]]], str]:
    """The options with each of some further sets of chains, and why another cannot be."""
    tried, reason = [], ""
    for new in more:
        try:
            tried.append((_options(plan, extra, (), chains=(*chains, *new)), new))
        except NestError as error:
            reason = str(error)
    return tried, reason


def _with_epilogues(plan: _Plan, best: list[CoverOption], extra: tuple[Node, ...]) -> list[CoverOption]:
    """The options in which dots have epilogues; each taken in only where the predicted time falls by enough."""
    consumers = consumers_of(plan.graph)
    taken: tuple[Epilogue, ...] = ()
    decisions = best[0].decisions
    chained = {s.node for c in best[0].chains for s in c.dots}
    for dot in [n for n in plan.graph.nodes if n.is_a(Dot) and n not in chained][:MOST_DOTS]:
        slower, before = slower_by(dot, plan.known.device), _least(best)
        reasons: list[str] = []
        for one in epilogues(plan.graph, best[0].anchors, dot, consumers):
            stored = (*extra, *(n for n in one.ends if n not in best[0].anchors.nodes))
            if best[0].chains and stored != extra:
                continue  # a chain is made for the values that have memory now
            try:
                trial = _options(plan, stored, decisions, (*taken, one), best[0].chains)
            except NestError as error:
                reasons.append(str(error))
                continue
            gain = before - _least(trial)
            if gain > 0 and gain >= slower * (WORTH_FUSING - 1):
                said = f"{dot!r} is multiplied by a generated kernel, which also makes {one.ends!r}: "
                decisions = (*decisions, f"{said}{gain * 1e6:.1f} us less predicted")
                best = [replace(o, decisions=decisions) for o in trial]
                taken, extra = (*taken, one), stored
                break
            reasons.append(f"{-gain * 1e6:.1f} us more predicted" if gain <= 0 else "it gains too little")
        else:
            if reasons:
                decisions = (
                    *decisions,
                    f"{dot!r} is multiplied by the library, what follows stays apart: {reasons[0]}",
                )
                best = [replace(o, decisions=decisions) for o in best]
    return best


def _with_splits(plan: _Plan, options: list[CoverOption]) -> list[CoverOption]:
    """The options in which products that would leave most of the device idle are cut into parts of K."""
    taken = {i.dot for o in options for g in o.groups for i in g.items}
    taken |= {s.node for o in options for c in o.chains for s in c.dots}
    dots = [n for n in plan.graph.nodes if n.is_a(Dot) and n not in taken]
    splits = [s for s in (split_of(n, plan.known.device) for n in dots) if s is not None]
    said = tuple(
        f"{s.dot!r} is multiplied by a generated kernel in {s.parts} parts of K: {s.gain * 1e6:.1f} us less predicted"
        for s in splits
    )
    parts, gain = {s.dot: s.parts for s in splits}, sum(s.gain for s in splits)
    cut = [replace(o, splits=parts, seconds=o.seconds - gain, decisions=(*o.decisions, *said)) for o in options]
    return cut if splits else options


def _least(options: Sequence[CoverOption]) -> float:
    return min(o.seconds for o in options)


def _options(
    plan: _Plan,
    extra: tuple[Node, ...],
    decisions: tuple[str, ...],
    fused: tuple[Epilogue, ...] = (),
    chains: tuple[Chain, ...] = (),
) -> list[CoverOption]:
    """The options for one set of stored values, epilogues and chains: separate kernels and, where they differ, phases.

    Raises:
        NestError: an epilogue cannot be computed from its product, or a chain needs what needs it.
    """
    graph, known = plan.graph, plan.known
    anchors, search = _start(plan, extra, fused, chains)
    items = search.run()
    parts = (("stored value", extra), ("generated product", fused), ("chain", chains))
    counts = "".join(f", {counted(len(those), what)}" for what, those in parts if those)
    unwritten = unwritten_bytes(graph, anchors.materialised, items) / known.device.dram_bandwidth if fused else 0.0
    unwritten -= chains_seconds(graph, anchors.materialised, items, chains, known.device, plan.dots.tf32)
    out: list[CoverOption] = []
    for name, groups in (
        ("separate kernels", single_groups(items, known.device)),
        ("kernels of several phases", group_items(search, items, known.device)),
    ):
        if not out or len(groups) != len(out[0].groups):
            seconds = total_seconds(groups) - unwritten
            tf32 = plan.dots.tf32
            made = (graph, anchors, search, tuple(groups), decisions, tf32, chains)
            out.append(CoverOption(name + counts, seconds, *made))
    return out


def _start(
    plan: _Plan, extra: tuple[Node, ...], fused: tuple[Epilogue, ...], chains: tuple[Chain, ...]
) -> tuple[Anchors, Search]:
    """Anchors under which every anchor can be computed alone: what a reshape cannot look through gets memory."""
    for _ in range(MAX_STARTS):
        anchors = choose_anchors(plan.graph, plan.wanted, extra)
        forward = plan.graph.forward_nodes()
        made = [epilogue_item(e, anchors, plan.known.device, plan.dots, e.dot in forward) for e in fused]
        made += [chain_item(c, anchors.materialised) for c in chains]
        try:
            return anchors, Search(plan.graph, anchors, plan.known, made)
        except NestError as error:
            if error.culprit is None or error.culprit in extra:
                if fused or chains:
                    raise
                raise VerifyError(f"a value cannot be computed in any nest: {error}") from error
            extra = (*extra, error.culprit)
    raise VerifyError(f"{MAX_STARTS} values were given memory without reaching a start")
