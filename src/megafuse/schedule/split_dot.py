"""Products in parts of K, for shapes with too few tiles to fill the device: sums over each part, and their total.

``part[s] = sum over k in part s of a[:, k] b[k, :]`` in fp32, then ``dot = round(sum over s of part[s])``, in the order
of s. The number of parts is planned, so results repeat bit by bit.
"""

from __future__ import annotations

from megafuse.core.device import DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.core.sizes import ceil_div
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.index import ZERO, Affine, Axis, combine
from megafuse.ir.nest import Anchor, Nest, Root, Space
from megafuse.ir.trace import Inst, Memory, Trace, trace_nest
from megafuse.ir.types import Cast, Input, Reduce, TensorType
from megafuse.schedule.dot_tiling import choose_dot_tile
from megafuse.schedule.kernel_plan import DotPlan, KernelPlan, PhasePlan
from megafuse.schedule.types import DotTile, Tile


def split_kernel(
    dot: Node, splits: int, operands: tuple[Node, ...], uid: int, forward: bool, device: DeviceSpec
) -> tuple[KernelPlan, Node]:
    """The kernel that multiplies, and the value ``[parts, P, M, N]`` that it writes. At most ``splits`` parts."""
    problems, rows, cols = dot.shape
    inner = dot.args[0].shape[-1]
    tile = choose_dot_tile((splits * problems, rows, cols, ceil_div(inner, splits)), dot.dtype, device, 2)
    span = ceil_div(ceil_div(inner, splits), tile.depth) * tile.depth
    splits = ceil_div(inner, span)
    shape = (splits, *dot.shape)
    node = Input(f"partial_{uid}", -1, contiguous_strides(shape), "partial")
    sums = Node(uid, node, (), TensorType(shape, DType.F32), dot.origin)
    fixed, loop, column = (Axis("i0", splits), Axis("i1", problems)), Axis("r0", rows), Axis("c0", cols)
    part, *index = (_index(axis) for axis in (*fixed, loop, column))
    inst = Inst("load", dot, DType.F32, frozenset().union(*(ix.axes for ix in index)), index=tuple(index))
    root = Root(Anchor(dot), inst.index)
    trace = Trace(Nest(Space((*fixed, loop), (column,)), (root,)), (inst,), {root: inst})
    stores = ((root, sums, combine((part, *index), contiguous_strides(shape))),)
    phase = PhasePlan(trace, fixed, (loop,), _held(tile), stores, None)
    return KernelPlan((phase,), tile.num_warps, forward, "", dot=DotPlan(dot, operands, tile, splits)), sums


def split_finisher(dot: Node, sums: Node, uid: int, materialised: Memory) -> Trace:
    """The nest that adds up the parts and rounds the total: rows are the product's elements, columns its parts."""
    total = Node(sums.uid + 1, Reduce("sum", (0,)), (sums,), TensorType(dot.shape, DType.F32), dot.origin)
    rounded = total if dot.dtype is DType.F32 else Node(uid, Cast(), (total,), dot.type, dot.origin)
    axes = tuple(Axis(f"f{d}", n) for d, n in enumerate(dot.shape))
    root = Root(Anchor(dot), tuple(map(_index, axes)))
    space = Space(tuple(a for a in axes if a.size != 1), (Axis("p", sums.shape[0]),))
    return trace_nest(Nest(space, (root,)), materialised.replace((dot,), (sums,)), {dot: rounded})


def _held(tile: DotTile) -> Tile:
    why = f"parts of K; {tile.why}"
    pieces = (tile.cols // tile.parts,)
    warps, stages = tile.num_warps, tile.num_stages
    return Tile(tile.rows, tile.rows, pieces, col_grid=True, num_warps=warps, num_stages=stages, why=why)


def _index(axis: Axis) -> Affine:
    return Affine(((axis.name, 1),)) if axis.size != 1 else ZERO
