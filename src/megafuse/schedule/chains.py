"""Kernel plans of chains: phases and dots in order, what is stored, partial sums over the rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from megafuse.core.device import DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.core.sizes import ceil_div
from megafuse.fusion.plan import Cover
from megafuse.ir.chain import (
    Chain,
    Held,
    RowDot,
    RowNest,
    Stage,
    SumDot,
    block,
    can_turn,
    chain_traces,
    external_loads,
    external_reads,
    held_block,
    is_sum,
    made_by,
    nests_of,
    only_sums,
    turned,
)
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.index import Affine, Axis, axis_index, combine
from megafuse.ir.nest import Anchor, Nest, Root, Space
from megafuse.ir.trace import Inst, Trace
from megafuse.ir.views import memory_of, strided_view
from megafuse.schedule.chain_tile import ChainRules, ChainTile
from megafuse.schedule.chain_tiling import STREAMED_ROWS, Beside, ChainRequest, chain_rules, choose_chain_tile
from megafuse.schedule.choice import Known
from megafuse.schedule.identity import chain_key
from megafuse.schedule.kernel_plan import ChainDotPlan, ChainPlan, KernelPlan, PhasePlan
from megafuse.schedule.partials import Partial, dot_partial, make_partial
from megafuse.schedule.types import KernelTiles, Tile

Strides = Callable[[Node], tuple[int, ...]]


class ChainMaker:
    """Turns the chains of a cover into kernel plans."""

    def __init__(
        self, cover: Cover, device: DeviceSpec, strides: Strides, known: Known, problems: list[tuple[str, str]]
    ) -> None:
        """``problems`` takes keys of chains and why their known tiles were not taken."""
        self.cover, self.device, self.strides = cover, device, strides
        self.known, self.problems = known, problems

    def plan(
        self, chain: Chain, read_by: Mapping[Node, Collection[object]], uids: Iterator[int]
    ) -> tuple[KernelPlan, dict[Node, Partial]]:
        """The kernel of a chain, and the partial sums that it leaves. ``read_by``: who reads each value in memory."""
        request, traces = self._request(chain), chain_traces(chain, self.cover.materialised)
        heuristic = choose_chain_tile(request, self.device)
        rules = chain_rules(request, heuristic, self.device)
        key = self._key(chain, traces, read_by)
        tile = self._taken(key, heuristic, rules)
        making = _Making(self, chain, tile, traces, read_by, uids)
        making.run()
        stored = dict.fromkeys(n for p in making.phases for _, n, _ in p.stores)
        sums = dict.fromkeys(s.sums for s in making.stages if isinstance(s, ChainDotPlan) and s.sums is not None)
        owned = frozenset(s.node for s in chain.dots if s.node not in chain.again)
        part = ChainPlan(
            walk=chain.walk,
            stages=tuple(making.stages),
            tile=tile,
            rules=rules,
            reads=external_reads(chain, self.cover.materialised),
            writes=(*stored, *sums),
            owned=owned,
        )
        plan = KernelPlan(tuple(making.phases), tile.num_warps, chain.forward, key, chain=part)
        return plan, making.partials

    def _key(self, chain: Chain, traces: Mapping[Nest, Trace], read_by: Mapping[Node, Collection[object]]) -> str:
        return chain_key(
            chain, traces, self.strides, self.cover.materialised, lambda node: is_stored(node, chain, read_by)
        )

    def _taken(self, key: str, heuristic: ChainTile, rules: ChainRules) -> ChainTile:
        """The tile that is known for a chain if it is legal here, else the heuristic's."""
        forced: KernelTiles | None = self.known(key)
        if forced is None:
            return heuristic
        problem = rules.problem(forced.chain) if forced.chain is not None else "they are not of a chain"
        if problem or forced.chain is None:
            self.problems.append((key, problem))
            return heuristic
        return forced.chain

    def _matrices(self, chain: Chain) -> dict[Held, int]:
        """The matrices of a chain as it holds them, and the stage that is the first to multiply by each."""
        found: dict[Held, int] = {}
        for at, stage in enumerate(chain.stages):
            if isinstance(stage, RowDot):
                matrix = stage.node.args[1]
                memory = memory_of(matrix, self.cover.materialised)
                view = strided_view(matrix, self.strides(memory), memory)
                assert view is not None
                (problem, row, col), (_, *shape) = view.strides, view.shape
                found.setdefault(held_block(memory, view.offset, (shape[0], shape[1]), (problem, row, col))[0], at)
        return found

    def _request(self, chain: Chain) -> ChainRequest:
        dtype = chain.dots[0].node.dtype
        products = self._matrices(chain)
        traces = chain_traces(chain, self.cover.materialised)
        loads = external_loads(chain, traces)
        loaded = {
            ld.node: block(t.nest.space.num_cols) * ld.dtype.size
            for ld, t in loads
            if ld.axes & t.nest.space.row_names and not ld.lookups
        }
        return ChainRequest(
            walk=chain.walk,
            widths=tuple(n.space.num_cols for s in chain.stages for n in nests_of(s)),
            matrices=tuple(m.shape for m in products),
            sums=tuple(_edges(s) for s in chain.stages if is_sum(s)),
            dtype=dtype,
            plain=dtype is DType.F32,
            loaded=sum(loaded.values()),
            turned=turned(chain, self.device),
            turns=can_turn(chain),
            products=sum(isinstance(s, SumDot) for s in chain.stages),
            beside=tuple(_beside(chain, traces, loaded, at) for at in products.values()),
            streamed=only_sums(chain) and chain.rows > STREAMED_ROWS * self.device.sms,
        )


def _beside(chain: Chain, traces: Mapping[Nest, Trace], loaded: Mapping[Node, int], product: int) -> Beside:
    """What lies beside the matrices if those up to that of the stage ``product`` are loaded first, with their rows.

    ``loaded``: bytes of a row of each value that comes from memory.
    """
    since: dict[Node, int] = {}  # the stage that is the first to read or make a value
    last: dict[Node, int] = {}  # the last that multiplies it
    width: dict[Node, int] = {}
    for at, stage in enumerate(chain.stages):
        for nest in nests_of(stage):
            for load in traces[nest].loads():
                since.setdefault(load.node, at)
            if not isinstance(stage, RowNest):
                (root,) = traces[nest].roots.values()
                since.setdefault(root.node, at)
                last[root.node], width[root.node] = at, block(nest.space.num_cols)
        since.setdefault(made_by(stage), at)
    first = {n for n in loaded if since[n] <= product}
    dots = [(at, isinstance(s, SumDot)) for at, s in enumerate(chain.stages) if not isinstance(s, RowNest)]
    there = {at: {n for n in width if (n in first or since[n] <= at) and at <= last[n]} for at, _ in dots}
    held = [{n for n in there[at] if last[n] > at or not sums} for at, sums in dots]
    start = {n: width[n] * n.dtype.size for n in there[dots[0][0]]}
    return Beside(
        most=max(sum(width[n] for n in nodes) for nodes in there.values()),
        after=max(sum(width[n] for n in nodes) for nodes in held),
        rows=sum((start | {n: loaded[n] for n in first}).values()),
    )


def is_stored(node: Node, chain: Chain, read_by: Mapping[Node, Collection[object]]) -> bool:
    """Whether a chain writes what it makes to memory; ``read_by``: who reads each value there."""
    return bool(read_by.get(node)) and node not in chain.again


def _edges(stage: Stage) -> tuple[int, int]:
    """Rows and columns of a sum over the rows."""
    if isinstance(stage, RowNest):
        return 1, stage.nest.space.num_cols
    return stage.node.shape[1], stage.node.shape[2]


@dataclass
class _Making:
    """One kernel in the making."""

    maker: ChainMaker
    chain: Chain
    tile: ChainTile
    traces: Mapping[Nest, Trace]
    read_by: Mapping[Node, Collection[object]]
    uids: Iterator[int]
    phases: list[PhasePlan] = field(default_factory=list)
    stages: list[int | ChainDotPlan] = field(default_factory=list)
    partials: dict[Node, Partial] = field(default_factory=dict)

    def run(self) -> None:
        """All stages in order."""
        self.chunks = ceil_div(self.chain.rows, self.tile.rows_per_chunk)
        for stage in self.chain.stages:
            if isinstance(stage, RowNest):
                self._nest(stage)
            elif isinstance(stage, RowDot):
                operand = self._phase(stage.rows, ())
                self.stages.append(ChainDotPlan(stage.node, (operand,)))
                if self._stored(stage.node):
                    self._store_product(stage.node)
            else:
                operands = self._phase(stage.left, ()), self._phase(stage.right, ())
                self.stages.append(ChainDotPlan(stage.node, operands, self._sums(stage.node)))

    def _stored(self, node: Node) -> bool:
        return is_stored(node, self.chain, self.read_by)

    def _phase(self, nest: Nest, stores: tuple[tuple[Root, Node, Affine], ...], trace: Trace | None = None) -> int:
        """Add a phase; its position."""
        trace = trace or self.traces[nest]
        space = trace.nest.space
        held = Tile(
            row_tile=self.tile.rows,
            rows_per_chunk=self.tile.rows_per_chunk,
            pieces=(block(space.num_cols),),
            num_warps=self.tile.num_warps,
            num_stages=self.tile.num_stages,
            why=self.tile.why,
        )
        fixed, loop = self.chain.walk.axes(space)
        self.phases.append(PhasePlan(trace, fixed, loop, held, stores, None))
        self.stages.append(len(self.phases) - 1)
        return len(self.phases) - 1

    def _nest(self, stage: RowNest) -> None:
        nest = self.traces[stage.nest].nest
        (root,) = nest.roots
        node, strides = root.anchor.node, self.maker.strides
        if not root.by_rows:
            stores = ((root, node, combine(root.index, strides(node))),) if self._stored(node) else ()
            self._phase(stage.nest, stores)
            return
        uid = next(self.uids)
        partial = make_partial(root, self.chain.walk.axes(nest.space)[0], self.chunks, f"partial_{uid}", uid)
        if partial is None:
            self._phase(stage.nest, ((root, node, combine(root.index, strides(node))),))
            return
        self.partials[node] = partial
        offset = combine(partial.index, contiguous_strides(partial.node.shape))
        self._phase(stage.nest, ((root, partial.node, offset),))

    def _store_product(self, dot: Node) -> None:
        """A phase that stores a product, which others read too."""
        axes = [Axis(name, size) for name, size in zip(("p0", "r0", "c0"), dot.shape, strict=True)]
        space = Space(*(tuple(a for a in part if a.size > 1) for part in (axes[:2], axes[2:])))
        index = tuple(axis_index((a,)) for a in axes)
        root = Root(Anchor(dot), index)
        nest = Nest(space, (root,))
        load = Inst("load", dot, dot.dtype, frozenset(space.sizes), index=index)
        trace = Trace(nest, (load,), {root: load})
        self._phase(nest, ((root, dot, combine(index, self.maker.strides(dot))),), trace)

    def _sums(self, dot: Node) -> Node:
        """The value that holds a sum's parts: the dot itself where one program makes it whole."""
        if self.chunks == 1:
            return dot
        uid, _ = next(self.uids), next(self.uids)
        partial = self.partials[dot] = dot_partial(dot, self.chunks, f"partial_{uid}", uid)
        return partial.node
