"""Column reductions in fixed order: one partial per program, and a finisher that sums them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.core.sizes import is_open, typical
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.index import Affine, Axis, Index, combine
from megafuse.ir.nest import Anchor, Nest, Root, Space, rename_axes
from megafuse.ir.trace import Inst, Memory, NestError, Trace, trace_nest
from megafuse.ir.traffic import elements
from megafuse.ir.types import Cast, Input, Reduce, TensorType
from megafuse.schedule.tiling import fits_whole

CHUNK = "chunk"


@dataclass(frozen=True)
class Partial:
    """Partials of one sum over rows: ``node`` stands for the buffer, ``total`` for the sum over its leading dims.

    ``index`` is where a program stores its partial of a column reduction, over the dims of ``node``. The total of a dot
    is rounded to the dot's type.
    """

    node: Node
    total: Node
    index: Index

    @property
    def sums(self) -> Reduce:
        """What makes the total of the partials."""
        total = self.total if self.total.is_a(Reduce) else self.total.args[0]
        assert isinstance(total.attrs, Reduce)
        return total.attrs


def make_partial(root: Root, fixed: Sequence[Axis], num_chunks: int, name: str, uid: int) -> Partial | None:
    """The partials that ``root`` needs, or None when each result is complete in one program.

    Dims: fixed axes that the root reduces, then chunks, then the result's own dims.
    """
    node = root.anchor.node
    attrs = node.attrs
    assert isinstance(attrs, Reduce)
    outer = [a for a in fixed if a.name in root.reduced_axes]
    if num_chunks != 1:
        outer.append(Axis(CHUNK, num_chunks))
    if not outer:
        return None
    shape = tuple(a.size for a in outer) + node.shape
    source = Node(uid, Input(name, -1, contiguous_strides(shape), "partial"), (), TensorType(shape, node.dtype))
    axes = tuple(range(len(outer)))
    total = Node(uid + 1, Reduce(attrs.fn, axes), (source,), node.type, node.origin)
    return Partial(source, total, (*(Affine(((a.name, 1),)) for a in outer), *root.index))


def dot_partial(dot: Node, num_chunks: int, name: str, uid: int) -> Partial:
    """The partials of a dot that contracts rows: fp32 sums ``[chunks, 1, K, N]``, added up and then rounded."""
    shape = (num_chunks, *dot.shape)
    source = Node(uid, Input(name, -1, contiguous_strides(shape), "partial"), (), TensorType(shape, DType.F32))
    total = Node(uid + 1, Reduce("sum", (0,)), (source,), TensorType(dot.shape, DType.F32), dot.origin)
    if dot.dtype is not DType.F32:
        total = Node(uid + 2, Cast(), (total,), dot.type, dot.origin)
    return Partial(source, total, ())


def finisher_nests(
    partials: Mapping[Node, Partial], followers: Sequence[Nest], needed: frozenset[Node], materialised: Memory
) -> tuple[list[Trace], list[Nest]]:
    """Nests that sum partials, together with the followers that want nothing else.

    ``needed``: reductions that others read too, so that the sum itself must be stored. Followers with the same shape
    and the same number of partials share a nest.

    Returns:
        (finishers, followers that could not join one).
    """
    overrides = {n: p.total for n, p in partials.items()}
    sources = materialised.replace(overrides, (p.node for p in partials.values()))
    made: list[Trace] = []
    left: list[Nest] = []
    waiting = set(needed)
    for nest in followers:
        trace = _finish(nest, partials, sources, overrides)
        if trace is None:
            left.append(nest)
            waiting |= trace_nest(nest, materialised).loaded() & set(partials)
        else:
            made.append(trace)
    made.extend(_plain_finisher(n, partials[n], sources) for n in partials if n in waiting)
    return _join_equal(made, sources, overrides), left


def _finish(
    nest: Nest, partials: Mapping[Node, Partial], sources: Memory, overrides: Mapping[Node, Node]
) -> Trace | None:
    """The follower over (its own axes) x (partials), or None when it is not that simple."""
    if not nest.flexible:
        return None
    reads = trace_nest(nest, sources.replace((), partials)).loaded()
    summed = [n for n in reads if n in partials]
    counts = {_count(partials[n]) for n in summed}
    elements = typical(nest.space.num_rows * nest.space.num_cols)
    if len(counts) != 1 or elements > sum(typical(n.type.numel) for n in summed):
        return None  # a larger follower would add the same partials up again and again
    rows = (*nest.space.rows, *nest.space.cols)
    space = Space(rows, (Axis("p", counts.pop()),))
    try:
        trace = trace_nest(Nest(space, nest.roots), sources, overrides)
    except NestError:
        return None
    return trace if trace.nest.space.rows == rows or trace.nest.space.num_rows == space.num_rows else None


def summed_in_place(
    nest: Nest,
    partials: Mapping[Node, Partial],
    read_by: Mapping[Node, Collection[object]],
    materialised: Memory,
    device: DeviceSpec,
) -> Trace | None:
    """The follower of a finisher, with sums over its columns, as one kernel that adds partials up as it loads them.

    None where others read the sums too, where it would add up partials twice, where a row of them exceeds the
    registers or does not lie in one piece, and where its rows are so few that sums of their own programs and a second
    launch are faster. Nor where sizes are open.
    """
    reads = trace_nest(nest, materialised).loaded() & partials.keys()
    sizes = (*nest.space.sizes.values(), *(n for read in reads for n in partials[read].node.shape))
    if any(map(is_open, sizes)) or any(r.by_rows for r in nest.roots):
        return None
    known = {n: partials[n] for n in reads if len(read_by.get(n, ())) == 1 and partials[n].sums.fn == "sum"}
    if not reads or known.keys() != reads:
        return None
    overrides = {n: p.total for n, p in known.items()}
    sources = materialised.replace(overrides, (p.node for p in known.values()))
    try:
        trace = trace_nest(nest, sources, overrides, frozenset(p.node for p in known.values()))
    except NestError:
        return None
    sums = [i for i in trace.loads() if i.parts > 1]
    walked = {a.name for a in trace.nest.space.rows if a.size > 1}
    own = all(walked <= i.axes and elements(i, trace.nest.space) == i.node.type.numel for i in sums)
    once = own and len(sums) == len(reads)
    if not once or not fits_whole(trace) or not all(_in_rows(i, trace) for i in sums):
        return None
    seconds = sum(i.node.type.nbytes for i in sums) / device.l2_bandwidth
    idle = max(1.0, device.sms / trace.nest.space.num_rows)
    return trace if idle * seconds <= seconds + device.launch_seconds else None


def _in_rows(load: Inst, trace: Trace) -> bool:
    """Neighbours in memory are columns."""
    terms = combine(load.index, contiguous_strides(load.node.shape)).terms
    return any(step == 1 and name in trace.nest.space.col_names for name, step in terms)


def _plain_finisher(node: Node, partial: Partial, sources: Memory) -> Trace:
    """A nest that stores the total itself."""
    rows = tuple(Axis(f"f{d}", n) for d, n in enumerate(node.shape) if n != 1)
    index = tuple(Affine(((f"f{d}", 1),)) if n != 1 else Affine(()) for d, n in enumerate(node.shape))
    space = Space(rows, (Axis("p", _count(partial)),))
    return trace_nest(Nest(space, (Root(Anchor(node), index, index),)), sources, {node: partial.total})


def _count(partial: Partial) -> int:
    return math.prod(partial.node.shape[a] for a in partial.sums.axes)


def waits(trace: Trace) -> bool:
    """Whether a finisher reads another call's result: that may wait for what another finisher of the kernel makes."""
    return any(not n.is_a(Input) for n in trace.loaded())


def _join_equal(traces: list[Trace], sources: Memory, overrides: Mapping[Node, Node]) -> list[Trace]:
    """Put finishers over equal spaces into one nest each, but for those that wait for another call's result."""
    groups: dict[tuple[object, ...], list[Nest]] = {}
    for number, trace in enumerate(traces):
        space = trace.nest.space
        alone = (number,) if waits(trace) else ()
        key: tuple[object, ...] = (alone, tuple(a.size for a in space.rows), tuple(a.size for a in space.cols))
        names = {a.name: f"f{n}" for n, a in enumerate(space.rows)} | {
            a.name: f"p{n}" for n, a in enumerate(space.cols)
        }
        groups.setdefault(key, []).append(rename_axes(trace.nest, names))
    out = []
    for nests in groups.values():
        roots = tuple(r for n in nests for r in n.roots)
        out.append(trace_nest(Nest(nests[0].space, roots), sources, overrides))
    return out
