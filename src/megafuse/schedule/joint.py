"""Finishers of different sizes as one kernel: their rows one after the other, each with its own part of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megafuse.core.sizes import is_open
from megafuse.ir.graph import Node
from megafuse.ir.index import ZERO, Affine, Axis, Guard, Index, axis_index, combine
from megafuse.ir.nest import Nest, Root, Space
from megafuse.ir.trace import Inst, Trace
from megafuse.schedule.partials import waits

ROW = "f0"
Strides = Callable[[Node], tuple[int, ...]]


@dataclass(frozen=True)
class Joint:
    """A kernel that does what several finishers do. ``stores``: (root, node written, element offset, where)."""

    trace: Trace
    stores: tuple[tuple[Root, Node, Affine, tuple[Guard, ...]], ...]


def join_finishers(traces: Sequence[Trace], strides: Strides) -> tuple[list[Joint], list[Trace]]:
    """Finishers that read and write their rows in order, joined where they add up as many partials; and the others.

    Those that wait for another call's result stay alone.
    """
    groups: dict[int, list[Trace]] = {}
    left: list[Trace] = []
    for trace in traces:
        if _is_flat(trace, strides) and not waits(trace):
            groups.setdefault(trace.nest.space.num_cols, []).append(trace)
        else:
            left.append(trace)
    left += [t for g in groups.values() if len(g) == 1 for t in g]
    return [_joined(g, strides) for g in groups.values() if len(g) > 1], left


def _is_flat(trace: Trace, strides: Strides) -> bool:
    """Every load and store moves through memory as the rows do (and through partials as the columns do)."""
    space = trace.nest.space
    if is_open(space.num_rows) or is_open(space.num_cols) or any(i.kind in ("iota", "inside") for i in trace.insts):
        return False
    row = dict(axis_index(space.rows).terms)
    col = {a.name: space.num_rows for a in space.cols}
    if len(col) != 1 or any(i.guards or i.lookups for i in trace.insts):
        return False
    places = [combine(i.index, strides(i.node)) for i in trace.loads() if i.axes]
    stored = [_target(r, strides) for r in trace.nest.roots]
    fits = all(not p.const and dict(p.terms) in (row, row | col) for p in places)
    return fits and all(dict(p.terms) == row for p in stored)


def _target(root: Root, strides: Strides) -> Affine:
    """Where the root's value goes; a part of a concat begins behind the parts before it."""
    return combine(root.anchor.placed(root.index), strides(root.anchor.node))


def _joined(traces: Sequence[Trace], strides: Strides) -> Joint:
    sizes = [t.nest.space.num_rows for t in traces]
    (col,) = traces[0].nest.space.cols
    space = Space((Axis(ROW, sum(sizes)),), (Axis("p", col.size),))
    insts: list[Inst] = []
    roots: dict[Root, Inst] = {}
    stores = []
    for at, trace in enumerate(traces):
        start = sum(sizes[:at])
        here = Affine(((ROW, 1),), -start)
        inside = (Guard(here, 0, sizes[at]),)
        new: dict[Inst, Inst] = {}
        for inst in trace.insts:
            new[inst] = _moved(inst, trace.nest.space, here, inside, [new[a] for a in inst.args])
            insts.append(new[inst])
        for root in trace.nest.roots:
            moved = Root(root.anchor, _flat(here, len(root.index)))
            roots[moved] = new[trace.roots[root]]
            target = Affine(here.terms, here.const + _target(root, strides).const)
            stores.append((moved, root.anchor.node, target, inside))
    return Joint(Trace(Nest(space, tuple(roots)), tuple(insts), roots), tuple(stores))


def _moved(inst: Inst, space: Space, here: Affine, inside: tuple[Guard, ...], args: list[Inst]) -> Inst:
    """An instance over the joint rows; what has one row of its own varies along them too."""
    names = space.row_names
    axes = frozenset({ROW if a in names else "p" for a in inst.axes})
    if any(ROW in a.axes for a in args) or (inst.kind == "load" and inst.axes):
        axes |= {ROW}
    if inst.kind != "load" or not inst.axes:
        index = _flat(here, len(inst.index)) if inst.index and inst.kind == "reduce" else inst.index
        return replace(inst, axes=axes, args=tuple(args), index=index)
    at = here
    if inst.axes & space.col_names:
        at = Affine((("p", math.prod(a.size for a in space.rows)), *here.terms), here.const)
    return replace(inst, axes=axes, index=_flat(at, len(inst.index)), guards=inside)


def _flat(at: Affine, rank: int) -> Index:
    """An index of contiguous memory by address."""
    return (*(ZERO for _ in range(rank - 1)), at) if rank else ()
