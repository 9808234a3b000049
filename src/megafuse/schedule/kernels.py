"""Kernel schedules of a cover: tiles, partials and finishers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import ceil_div, may_exceed, typical
from megafuse.fusion.plan import Cover, KernelGroup
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.index import Affine, Axis, Index, combine
from megafuse.ir.nest import Anchor, Nest, Root, rename_axes
from megafuse.ir.trace import Inst, Trace, trace_nest
from megafuse.ir.types import Concat, Dot, Opaque
from megafuse.ir.views import memory_of
from megafuse.schedule.choice import Choice, Known, choose_tiles, nothing_known
from megafuse.schedule.dot_tiling import choose_dot_tile
from megafuse.schedule.hoisting import hoisting_axes
from megafuse.schedule.partials import CHUNK, Partial, finisher_nests, make_partial
from megafuse.schedule.tiling import TileRequest, tile_loads
from megafuse.schedule.types import DotTile, Tile, TileRules

SHORT_RUN = 128  # bytes: shorter contiguous runs waste parts of the sectors they fetch


@dataclass(frozen=True)
class PhasePlan:
    """A phase before buffers have names. ``stores``: (root, node written, element offset)."""

    trace: Trace
    fixed: tuple[Axis, ...]
    loop: tuple[Axis, ...]
    tile: Tile
    stores: tuple[tuple[Root, Node, Affine], ...]
    rules: TileRules | None


@dataclass(frozen=True)
class DotPlan:
    """The product of a kernel; ``operands``: the values with memory that it multiplies."""

    node: Node
    operands: tuple[Node, ...]
    tile: DotTile


@dataclass(frozen=True)
class KernelPlan:
    """A kernel before buffers have names. ``key``, ``finishes``: see ``KernelSchedule``."""

    phases: tuple[PhasePlan, ...]
    num_warps: int
    forward: bool
    key: str
    finishes: str = ""
    dot: DotPlan | None = None

    @property
    def num_stages(self) -> int:
        """Depth of the software pipeline of the row loops, or of the loop over K."""
        return max(p.tile.num_stages for p in self.phases)

    @property
    def reads(self) -> tuple[Node, ...]:
        """Nodes loaded, in order of first load; what an earlier phase of the kernel wrote is not among them."""
        own = {*self.writes, *([self.dot.node] if self.dot else [])}
        loads = (i.node for p in self.phases for i in p.trace.loads())
        operands = self.dot.operands if self.dot else ()
        return tuple(n for n in dict.fromkeys((*operands, *loads)) if n not in own)

    @property
    def writes(self) -> tuple[Node, ...]:
        """Nodes written, in order."""
        return tuple(dict.fromkeys(n for p in self.phases for _, n, _ in p.stores))


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
        self.read_by = self._readers()

    def run(self) -> list[KernelPlan]:
        """All kernels, finishers right after the kernel whose partials they sum."""
        out: list[KernelPlan] = []
        for number, group in enumerate(self.cover.groups):
            if number not in self.absorbed:
                out.extend(self._group(number, group))
        return out

    def strides(self, node: Node) -> tuple[int, ...]:
        """Strides of a value in memory."""
        return self.layout.get(node) or contiguous_strides(node.shape)

    def _readers(self) -> dict[Node, set[object]]:
        """Who reads each materialised value: nest numbers, and "call" for library calls and outputs."""
        readers: dict[Node, set[object]] = {}
        products = {g.nests[0]: g.dot for g in self.cover.groups if g.dot is not None}
        for number, trace in enumerate(self.traces):
            for node in trace.loaded() - {products.get(number)}:
                readers.setdefault(node, set()).add(number)
        from_calls = [a for n in self.cover.graph.nodes if n.is_a(Dot, Opaque) for a in n.args]
        for node in (*from_calls, *(n for n in self.cover.graph.outputs if n is not None)):
            readers.setdefault(memory_of(node, self.cover.materialised), set()).add("call")
        return readers

    def _dot(self, group: KernelGroup, dot: Node) -> KernelPlan:
        """A generated product with its epilogue."""
        nest, fixed = self._tidy(self.cover.nests[group.nests[0]], group.fixed[0])
        trace = trace_nest(nest, self.cover.materialised)
        (product,) = (i for i in trace.loads() if i.node is dot)
        if self.read_by.get(dot):  # it is written too
            trace = replace(trace, roots={Root(Anchor(dot), product.index): product, **trace.roots})
        tiled = {load.node for load in trace.loads() if load.axes == product.axes and load is not product}
        problems, rows, cols = dot.shape
        tile = choose_dot_tile(
            (problems, rows, cols, dot.args[0].shape[-1]), dot.dtype, self.device, len(tiled) + 1, self.cover.tf32
        )
        loop = tuple(a for a in nest.space.rows if a.name not in fixed)
        held = Tile(
            row_tile=tile.rows,
            rows_per_chunk=tile.rows,
            pieces=(tile.cols // tile.parts,),
            col_grid=True,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            why=f"{tile.parts} pieces of the product's tiles; {tile.why}",
        )
        stores = tuple(s for root in trace.roots for s in self._store(root))
        phase = PhasePlan(trace, tuple(a for a in nest.space.rows if a.name in fixed), loop, held, stores, None)
        operands = tuple(dict.fromkeys(memory_of(a, self.cover.materialised) for a in dot.args))
        return KernelPlan((phase,), tile.num_warps, dot in self.forward, "", dot=DotPlan(dot, operands, tile))

    def _group(self, number: int, group: KernelGroup) -> list[KernelPlan]:
        if group.dot is not None:
            return [self._dot(group, group.dot)]
        chosen = [(self.cover.nests[n], f) for n, f in zip(group.nests, group.fixed, strict=True)]
        if len(chosen) == 1 and not chosen[0][1]:
            trace = self.traces[group.nests[0]]
            walked = self._short_run_axis(trace, set(trace.nest.space.row_names))
            chosen = [(chosen[0][0], hoisting_axes(trace, self.device, walked))]
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

    def _choose(self, requests: list[TileRequest], blocks_per_sm: int = 0) -> Choice:
        choice = choose_tiles(requests, self.device, self.known, lambda r: bool(self._store(r)), blocks_per_sm)
        if choice.problem:
            self.problems.append((choice.key, choice.problem))
        return choice

    def _chunk_unit(self, trace: Trace, fixed: tuple[str, ...]) -> int:
        """Rows over which a gather completes the sectors that it fetches: one program should walk them all."""
        rows = trace.nest.space.row_names - set(fixed)
        inner = self._short_run_axis(trace, set(rows))
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
        loop = self._walk_order(trace, [a for a in space.rows if a.name not in request.fixed])
        size = 1
        for a in loop:
            size *= a.size
        chunks = ceil_div(size, tile.rows_per_chunk) if may_exceed(size, tile.rows_per_chunk) else 1
        stores: list[tuple[Root, Node, Affine]] = []
        for root in trace.nest.roots:
            if not root.by_rows:
                stores.extend(self._store(root))
                continue
            uid = next(self.uids)
            partial = make_partial(root, fixed_axes, chunks, f"partial_{uid}", uid)
            if partial is None:
                stores.append((root, root.anchor.node, combine(root.index, self.strides(root.anchor.node))))
            else:
                partials[root.anchor.node] = partial
                stores.append((root, partial.node, combine(partial.index, contiguous_strides(partial.node.shape))))
        return PhasePlan(trace, fixed_axes, loop, tile, tuple(stores), rules)

    def _store(self, root: Root) -> Iterable[tuple[Root, Node, Affine]]:
        """Where a map or row reduction goes; nowhere when only its own nest reads it."""
        node = root.anchor.node
        if not self.read_by.get(node):
            return []
        index: Index = root.index
        if root.anchor.part is not None:
            assert isinstance(node.attrs, Concat)
            axis = node.attrs.axis
            start = sum(p.shape[axis] for p in node.args[: root.anchor.part])
            index = tuple(ix.shift(start) if d == axis else ix for d, ix in enumerate(index))
        return [(root, node, combine(index, self.strides(node)))]

    def _walk_order(self, trace: Trace, rows: list[Axis]) -> tuple[Axis, ...]:
        """Loop rows, outermost first.

        A gather in short runs wants the row axis that continues its runs innermost, so that neighbours share the
        sectors they fetch. Otherwise the largest value touched decides: largest memory step outermost.
        """
        names = {a.name for a in rows}
        touched = [(i.node, i.index) for i in trace.loads()] + [(r.anchor.value, r.index) for r in trace.nest.roots]
        node, index = max(touched, key=lambda t: (len(_axes(t[1]) & names), typical(t[0].type.numel)))
        step = dict(combine(index, self.strides(node)).terms)
        order = sorted(rows, key=lambda a: -abs(typical(step.get(a.name, 0))))
        inner = self._short_run_axis(trace, names)
        return tuple(sorted(order, key=lambda a: a.name == inner))

    def _short_run_axis(self, trace: Trace, rows: set[str]) -> str | None:
        """The row axis next to the columns in the memory of the largest load whose contiguous runs are short."""
        cols = trace.nest.space.col_names
        best: tuple[int, str] | None = None
        for load in tile_loads(trace):
            if not load.axes & rows:
                continue
            sizes = trace.nest.space.sizes
            terms = sorted(combine(load.index, self.strides(load.node)).terms, key=lambda t: abs(typical(t[1])))
            run = 1
            for name, stride in terms:
                if stride not in (run, -run) or name not in (*cols, *rows):
                    break
                if name in rows:
                    numel = typical(load.node.type.numel)
                    if 1 < typical(run) < SHORT_RUN / load.dtype.size and (best is None or numel > best[0]):
                        best = (numel, name)
                    break
                run *= sizes[name]
        return None if best is None else best[1]

    def _finishers(self, number: int, partials: dict[Node, Partial], forward: bool, key: str) -> list[KernelPlan]:
        if not partials:
            return []
        followers: dict[int, Nest] = {}
        for other, group in enumerate(self.cover.groups):
            nest = self.cover.nests[group.nests[0]]
            if other == number or other in self.absorbed or len(group.nests) > 1 or not nest.flexible:
                continue
            if (nest.anchors[0].node in self.forward) != forward:
                continue
            if not self.traces[group.nests[0]].loaded().isdisjoint(partials):
                followers[other] = nest
        follower_nests = {self.cover.groups[o].nests[0] for o in followers}
        needed = frozenset(n for n in partials if self.read_by.get(n, set()) - follower_nests)
        traces, left = finisher_nests(partials, list(followers.values()), needed, self.cover.materialised)
        self.absorbed |= {o for o, nest in followers.items() if nest not in left}
        return [self._finisher_kernel(t, forward, key) for t in traces]

    def _finisher_kernel(self, trace: Trace, forward: bool, finishes: str) -> KernelPlan:
        nest, _ = self._tidy(trace.nest, ())
        names = {old.name: new.name for old, new in zip(trace.nest.space.rows, nest.space.rows, strict=True)}
        names |= {old.name: new.name for old, new in zip(trace.nest.space.cols, nest.space.cols, strict=True)}
        trace = _rename_trace(trace, nest, names)
        choice = self._choose([TileRequest(trace, (), self.strides, 1, False)])
        tile, rules = choice.tiles[0], choice.rules[0]
        stores = tuple(s for r in nest.roots for s in self._force_store(r))
        phase = PhasePlan(trace, (), self._walk_order(trace, list(nest.space.rows)), tile, stores, rules)
        return KernelPlan((phase,), choice.num_warps, forward, choice.key, finishes)

    def _force_store(self, root: Root) -> list[tuple[Root, Node, Affine]]:
        return list(self._store(root)) or [
            (root, root.anchor.node, combine(root.index, self.strides(root.anchor.node)))
        ]


def _axes(index: Index) -> frozenset[str]:
    return frozenset().union(*(ix.axes for ix in index)) if index else frozenset()


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


__all__ = ["CHUNK", "KernelMaker", "KernelPlan", "PhasePlan"]
