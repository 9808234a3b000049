"""Kernel schedules of a cover: tiles, partials and finishers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import ceil_div, may_exceed, typical
from megafuse.core.text import counted
from megafuse.fusion.plan import Cover, KernelGroup
from megafuse.ir.chain import external_reads
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.index import Affine, Axis, combine
from megafuse.ir.nest import Anchor, Nest, Root, rename_axes
from megafuse.ir.trace import Inst, Trace, trace_nest
from megafuse.ir.types import Dot, Opaque
from megafuse.ir.views import memory_of
from megafuse.schedule.chains import ChainMaker
from megafuse.schedule.choice import Choice, Known, choose_tiles, nothing_known
from megafuse.schedule.dot_tiling import choose_dot_tile, live_tiles
from megafuse.schedule.hoisting import hoisting_axes
from megafuse.schedule.kernel_plan import DotPlan, KernelPlan, PhasePlan
from megafuse.schedule.partials import Partial, finisher_nests, make_partial, summed_in_place
from megafuse.schedule.residency import sharers, short_run_axis
from megafuse.schedule.row_walk import walk_order
from megafuse.schedule.split_dot import split_finisher, split_kernel
from megafuse.schedule.tiling import TileRequest, choose_tile
from megafuse.schedule.types import Tile, TileRules

Store = Callable[[Root], Iterable[tuple[Root, Node, Affine]]]  # where a root goes


class KernelMaker:
    """Turns the groups of a cover into kernel plans."""

    def __init__(self, cover: Cover, device: DeviceSpec, known: Known = nothing_known) -> None:
        self.cover, self.device, self.known = cover, device, known
        self.problems: list[tuple[str, str]] = []  # kernel key and why its known tiles were not taken
        self.forward = cover.graph.forward_nodes()
        self.layout = dict(cover.layout)
        self.uids = itertools.count(max((n.uid for n in cover.graph.nodes), default=0) + 1, 2)
        self.absorbed: set[int] = set()
        self.traces = [trace_nest(nest, cover.materialised) for nest in cover.nests]
        self.chains = ChainMaker(cover, device, self.strides, known, self.problems)
        self.read_by = self._readers()

    def run(self) -> list[KernelPlan]:
        """All kernels, finishers right after the kernel whose partials they sum."""
        out: list[KernelPlan] = []
        for chain in self.cover.chains:
            plan, partials = self.chains.plan(chain, self.read_by, self.uids)
            out += [plan, *self._finishers(-1, partials, chain.forward, plan.key)]
        for number, group in enumerate(self.cover.groups):
            if number not in self.absorbed:
                out.extend(self._group(number, group))
        for dot, splits in self.cover.splits.items():
            out.extend(self._split(dot, splits))
        return out

    def strides(self, node: Node) -> tuple[int, ...]:
        """Strides of a value in memory."""
        return self.layout.get(node) or contiguous_strides(node.shape)

    def _readers(self) -> dict[Node, set[object]]:
        """Who reads each materialised value: nest numbers, chains, and "call" for library calls and outputs."""
        readers: dict[Node, set[object]] = {}
        products = {g.nests[0]: g.dot for g in self.cover.groups if g.dot is not None}
        for number, trace in enumerate(self.traces):
            for node in trace.loaded() - {products.get(number)}:
                readers.setdefault(node, set()).add(number)
        for at, chain in enumerate(self.cover.chains):
            for node in external_reads(chain, self.cover.materialised):
                readers.setdefault(node, set()).add(("chain", at))
        chained = {s.node for c in self.cover.chains for s in c.dots if s.node not in c.again}
        from_calls = [a for n in self.cover.graph.nodes if n.is_a(Dot, Opaque) and n not in chained for a in n.args]
        for node in (*from_calls, *(n for n in self.cover.graph.outputs if n is not None)):
            readers.setdefault(memory_of(node, self.cover.materialised), set()).add("call")
        return readers

    def _dot(self, number: int, group: KernelGroup, dot: Node) -> list[KernelPlan]:
        """A generated product with its epilogue, and what adds up the partial sums that its tiles of rows leave."""
        nest, fixed = self._tidy(self.cover.nests[group.nests[0]], group.fixed[0])
        trace = trace_nest(nest, self.cover.materialised)
        (product,) = (i for i in trace.loads() if i.node is dot)
        if self.read_by.get(dot):  # it is written too
            trace = replace(trace, roots={Root(Anchor(dot), product.index): product, **trace.roots})
        tiled = {load.node for load in trace.loads() if load.axes == product.axes and load is not product}
        problems, rows, cols = dot.shape
        shape = (problems, rows, cols, dot.args[0].shape[-1])
        live = live_tiles(trace, product.axes)
        tile = choose_dot_tile(shape, dot.dtype, self.device, len(tiled) + 1, live=live)
        loop = tuple(a for a in nest.space.rows if a.name not in fixed)
        held = Tile(
            row_tile=tile.rows,
            rows_per_chunk=tile.rows,
            pieces=(tile.cols // tile.parts,),
            col_grid=True,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            why=f"{counted(tile.parts, 'piece')} of the product's tiles; {tile.why}",
        )
        partials: dict[Node, Partial] = {}
        outer = tuple(a for a in nest.space.rows if a.name in fixed)
        stores = self._stores(trace.roots, outer, ceil_div(rows, tile.rows), partials)
        phase = PhasePlan(trace, outer, loop, held, stores, None)
        operands = tuple(dict.fromkeys(memory_of(a, self.cover.materialised) for a in dot.args))
        forward = dot in self.forward
        kernel = KernelPlan((phase,), tile.num_warps, forward, "", dot=DotPlan(dot, operands, tile))
        return [kernel, *self._finishers(number, partials, forward, "")]

    def _split(self, dot: Node, splits: int) -> list[KernelPlan]:
        """A generated product in parts of K, and what adds up their sums."""
        operands = tuple(dict.fromkeys(memory_of(a, self.cover.materialised) for a in dot.args))
        forward = dot in self.forward
        kernel, sums = split_kernel(dot, splits, operands, next(self.uids), forward, self.device)
        finisher = split_finisher(dot, sums, next(self.uids), self.cover.materialised)
        return [kernel, self._finisher_kernel(finisher, forward, "", self._force_store)]

    def _group(self, number: int, group: KernelGroup) -> list[KernelPlan]:
        if group.dot is not None:
            return self._dot(number, group, group.dot)
        chosen = [(self.cover.nests[n], f) for n, f in zip(group.nests, group.fixed, strict=True)]
        if len(chosen) == 1 and not chosen[0][1]:
            trace = self.traces[group.nests[0]]
            walked = short_run_axis(trace, trace.nest.space.row_names, self.strides)
            chosen = [(trace.nest, hoisting_axes(trace, self.device, walked))]
            if walked and not chosen[0][1]:
                chosen = [self._shared(trace, walked)]
        nests = [self._tidy(n, f) for n, f in chosen]
        whole = len(nests) > 1
        requests = []
        for nest, fixed in nests:
            trace = trace_nest(nest, self.cover.materialised)
            requests.append(TileRequest(trace, fixed, self.strides, self._chunk_unit(trace, fixed), whole))
        choice = self._choose(requests, group.blocks_per_sm)
        partials: dict[Node, Partial] = {}
        phases = [
            self._phase(r, tile, rules, partials)
            for r, tile, rules in zip(requests, choice.tiles, choice.rules, strict=True)
        ]
        forward = nests[0][0].anchors[0].node in self.forward
        kernels = [KernelPlan(tuple(phases), choice.num_warps, forward, choice.key)]
        return kernels + self._finishers(number, partials, forward, choice.key)

    def _shared(self, trace: Trace, axis: str) -> tuple[Nest, tuple[str, ...]]:
        """A walk with column sums is shared along ``axis``: each program takes some rows of every block it comes to.

        Without column sums, programs are short anyway.
        """
        nest = trace.nest
        if not any(r.by_rows for r in nest.roots):
            return nest, ()
        request = TileRequest(trace, (), self.strides, self._chunk_unit(trace, ()), False)
        chunk = choose_tile(request, self.device).rows_per_chunk
        programs = ceil_div(typical(nest.space.num_rows), typical(chunk))
        number = sharers(trace, axis, programs, self.device)
        if number == 1:
            return nest, ()
        return nest.split(axis, nest.space.sizes[axis] // number), (axis + "a",)

    def _choose(self, requests: list[TileRequest], blocks_per_sm: int = 0) -> Choice:
        choice = choose_tiles(requests, self.device, self.known, lambda r: bool(self._store(r)), blocks_per_sm)
        if choice.problem:
            self.problems.append((choice.key, choice.problem))
        return choice

    def _chunk_unit(self, trace: Trace, fixed: tuple[str, ...]) -> int:
        """Rows over which a gather completes the sectors that it fetches: one program should walk them all."""
        rows = trace.nest.space.row_names - set(fixed)
        inner = short_run_axis(trace, rows, self.strides)
        return 1 if inner is None else trace.nest.space.sizes[inner]

    def _tidy(self, nest: Nest, fixed: tuple[str, ...]) -> tuple[Nest, tuple[str, ...]]:
        """Short axis names: ``i`` fixed (the same in all phases), ``r`` walked rows, ``c`` columns."""
        names = {a: f"i{n}" for n, a in enumerate(fixed)}
        names |= {a.name: f"r{n}" for n, a in enumerate(x for x in nest.space.rows if x.name not in fixed)}
        names |= {a.name: f"c{n}" for n, a in enumerate(nest.space.cols)}
        return rename_axes(nest, names), tuple(names[a] for a in fixed)

    def _phase(self, request: TileRequest, tile: Tile, rules: TileRules, partials: dict[Node, Partial]) -> PhasePlan:
        trace, space = request.trace, request.trace.nest.space
        by_name = {a.name: a for a in space.rows}
        fixed_axes = tuple(by_name[f] for f in request.fixed)
        loop = walk_order(trace, request.fixed, self.strides)
        size = 1
        for a in loop:
            size *= a.size
        chunks = ceil_div(size, tile.rows_per_chunk) if may_exceed(size, tile.rows_per_chunk) else 1
        return PhasePlan(trace, fixed_axes, loop, tile, self._stores(trace.roots, fixed_axes, chunks, partials), rules)

    def _stores(
        self, roots: Iterable[Root], fixed: tuple[Axis, ...], chunks: int, partials: dict[Node, Partial]
    ) -> tuple[tuple[Root, Node, Affine], ...]:
        """Where the roots of a phase go; column reductions that one program does not complete go to ``partials``."""
        stores: list[tuple[Root, Node, Affine]] = []
        for root in roots:
            if not root.by_rows:
                stores.extend(self._store(root))
                continue
            uid = next(self.uids)
            partial = make_partial(root, fixed, chunks, f"partial_{uid}", uid)
            if partial is None:
                index = root.anchor.placed(root.index)
                stores.append((root, root.anchor.node, combine(index, self.strides(root.anchor.node))))
            else:
                partials[root.anchor.node] = partial
                stores.append((root, partial.node, combine(partial.index, contiguous_strides(partial.node.shape))))
        return tuple(stores)

    def _store(self, root: Root) -> Iterable[tuple[Root, Node, Affine]]:
        """Where a map or row reduction goes; nowhere when only its own nest reads it."""
        node = root.anchor.node
        if not self.read_by.get(node):
            return []
        return [(root, node, combine(root.anchor.placed(root.index), self.strides(node)))]

    def _finishers(self, number: int, partials: dict[Node, Partial], forward: bool, key: str) -> list[KernelPlan]:
        if not partials:
            return []
        followers: dict[int, Nest] = {}
        summed: list[Trace] = []
        for other, group in enumerate(self.cover.groups):
            nest = self.cover.nests[group.nests[0]]
            if other == number or other in self.absorbed or len(group.nests) > 1 or group.dot is not None:
                continue
            if (nest.anchors[0].node in self.forward) != forward:
                continue
            if self.traces[group.nests[0]].loaded().isdisjoint(partials):
                continue
            if nest.flexible:
                followers[other] = nest
            elif not group.fixed[0] and (trace := self._summed(nest, partials)) is not None:
                summed.append(trace)
                self.absorbed.add(other)
        done = {n for n, p in partials.items() if any(p.node in t.loaded() for t in summed)}
        partials = {n: p for n, p in partials.items() if n not in done}
        follower_nests = {self.cover.groups[o].nests[0] for o in followers}
        needed = frozenset(n for n in partials if self.read_by.get(n, set()) - follower_nests)
        traces, left = finisher_nests(partials, list(followers.values()), needed, self.cover.materialised)
        self.absorbed |= {o for o, nest in followers.items() if nest not in left}
        kernels = [self._finisher_kernel(t, forward, key, self._force_store) for t in traces]
        return kernels + [self._finisher_kernel(t, forward, key, self._store) for t in summed]

    def _summed(self, nest: Nest, partials: dict[Node, Partial]) -> Trace | None:
        return summed_in_place(nest, partials, self.read_by, self.cover.materialised, self.device)

    def _finisher_kernel(self, trace: Trace, forward: bool, finishes: str, store: Store) -> KernelPlan:
        nest, _ = self._tidy(trace.nest, ())
        names = {old.name: new.name for old, new in zip(trace.nest.space.rows, nest.space.rows, strict=True)}
        names |= {old.name: new.name for old, new in zip(trace.nest.space.cols, nest.space.cols, strict=True)}
        trace = _rename_trace(trace, nest, names)
        choice = self._choose([TileRequest(trace, (), self.strides, 1, False)])
        tile, rules = choice.tiles[0], choice.rules[0]
        stores = tuple(s for r in nest.roots for s in store(r))
        phase = PhasePlan(trace, (), walk_order(trace, (), self.strides), tile, stores, rules)
        return KernelPlan((phase,), choice.num_warps, forward, choice.key, finishes)

    def _force_store(self, root: Root) -> list[tuple[Root, Node, Affine]]:
        return list(self._store(root)) or [
            (root, root.anchor.node, combine(root.anchor.placed(root.index), self.strides(root.anchor.node)))
        ]


def _rename_trace(trace: Trace, nest: Nest, names: dict[str, str]) -> Trace:
    """The same trace with other axis names (a trace with overrides cannot be traced again from its nest alone)."""

    def fix(ix: Affine) -> Affine:
        return Affine(tuple((names.get(n, n), s) for n, s in ix.terms), ix.const)

    new: dict[Inst, Inst] = {}
    for inst in trace.insts:
        new[inst] = replace(
            inst,
            axes=frozenset(names.get(a, a) for a in inst.axes),
            args=tuple(new[a] for a in inst.args),
            index=tuple(fix(i) for i in inst.index),
            guards=tuple(replace(g, index=fix(g.index)) for g in inst.guards),
        )
    roots = {root: new[trace.roots[old]] for old, root in zip(trace.nest.roots, nest.roots, strict=True)}
    return Trace(nest, tuple(new.values()), roots)
