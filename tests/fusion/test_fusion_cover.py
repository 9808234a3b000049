"""What may share a nest, and why not; layouts; saving instead of recomputing; phases of one kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_graphs import DEVICE, arg, cover_of, graph, mixed, norm
from megafuse.core.dtypes import DType
from megafuse.fusion.align import SplitRequest, alignments
from megafuse.fusion.anchors import choose_anchors
from megafuse.fusion.cost import nest_cost, reduce_depth
from megafuse.fusion.initial import initial_nests
from megafuse.fusion.merge import merge_nests
from megafuse.fusion.planner import cover_options
from megafuse.fusion.recompute import recompute_candidates
from megafuse.ir.graph import Builder, Node, contiguous_strides
from megafuse.ir.nest import Anchor, Nest
from megafuse.ir.trace import Memory, NestError, Trace, trace_nest
from megafuse.ir.traffic import read_bytes
from megafuse.ir.types import Dot, TensorType


def memory(*nodes: Node) -> Memory:
    """Nodes in memory, all contiguous."""
    return Memory(nodes, nodes)


def traced(node: Node, prefix: str, inside: Memory, form: int = 0) -> Trace:
    """The initial nest of a value."""
    return trace_nest(initial_nests(Anchor(node), prefix)[form], inside)


def nests_of(b: Builder, *shape: int) -> tuple[Node, Node]:
    """An input of ``shape`` and a map of it."""
    x = arg(b, 0, *shape)
    return x, b.map("exp", x)


# --- forms of one value -----------------------------------------------------------------------------------------------


def test_a_map_has_its_trailing_dims_as_columns() -> None:
    b = Builder()
    _, y = nests_of(b, 64, 8, 1024)
    (nest,) = initial_nests(Anchor(y), "n")
    assert [a.size for a in nest.space.cols] == [1024]
    assert nest.flexible


def test_a_reduction_over_the_last_dim_has_one_form() -> None:
    b = Builder()
    (nest,) = initial_nests(Anchor(b.reduce("sum", arg(b, 0, 64, 128), [1])), "n")
    assert [a.size for a in nest.space.cols] == [128]
    assert not nest.roots[0].by_rows


def test_a_reduction_over_rows_has_two_forms() -> None:
    b = Builder()
    first, second = initial_nests(Anchor(b.reduce("sum", arg(b, 0, 64, 128), [0])), "n")
    assert first.roots[0].by_rows
    assert [a.size for a in first.space.cols] == [128]
    assert [a.size for a in second.space.cols] == [64]


# --- legality ---------------------------------------------------------------------------------------------------------


def merged(first: Node, second: Node, *inside: Node) -> Nest:
    """The first legal join of two values."""
    where = memory(first, second, *inside)
    return merge_nests(traced(first, "a", where), traced(second, "b", where), where)[0].nest


def test_a_reduction_joins_the_map_that_reads_it() -> None:
    b = Builder()
    x = arg(b, 0, 64, 128)
    total = b.reduce("sum", x, [1], keepdim=True)
    nest = merged(total.args[0], b.map("mul", x, total), x)
    assert len(nest.roots) == 2
    assert nest.space.num_rows == 64


def test_a_value_read_at_another_index_is_no_member() -> None:
    b = Builder()
    x = arg(b, 0, 64, 128)
    y = b.map("exp", x)
    flipped = b.map("mul", b.slice(y, (63, 0), (64, 128), (-1, 1)), x)
    with pytest.raises(NestError, match="other elements of"):
        merged(y, flipped, x)


def test_rows_and_columns_at_once() -> None:
    b = Builder()
    x = arg(b, 0, 16, 8, 32)
    by_columns = b.reduce("sum", x, [2])
    both = b.reduce("sum", x, [1, 2])
    with pytest.raises(NestError, match=r"rows and columns|runs over"):
        merged(by_columns, both, x)


def test_a_reshape_that_shares_no_factor_needs_memory() -> None:
    b = Builder()
    x = b.map("exp", arg(b, 0, 6, 35))
    y = b.map("neg", b.reshape(x, (14, 15)))
    with pytest.raises(NestError, match="does not follow") as caught:
        traced(y, "n", memory())
    assert caught.value.culprit is x
    traced(y, "n", memory(x))  # read by address


def test_a_join_through_a_dot_would_be_a_circle() -> None:
    b = Builder()
    x, w = arg(b, 0, 256, 512), arg(b, 1, 512, 512)
    y = b.map("exp", x)
    product = b.dot(b.reshape(y, (1, 256, 512)), b.reshape(w, (1, 512, 512)), DType.F32)
    z = b.map("add", b.reshape(product, (256, 512)), y)
    cover = cover_of(graph([x, w], z))
    assert len(cover.nests) == 2
    assert [edge.reason for edge in cover.boundaries] == [
        "something between them (a library call or another kernel) needs the first and is needed by the second"
    ]


def test_a_norm_behind_a_mix_needs_the_statistics_of_the_first() -> None:
    """The statistics of the first norm are one nest; all else is another, which reads x where the mix says."""
    b = Builder()
    x = arg(b, 0, 512, 16, 256)
    cover = cover_of(graph([x], norm(b, b.map("add", mixed(b, norm(b, x)), x))))
    assert [len(n.roots) for n in cover.nests] == [1, 2]
    assert len(cover.boundaries) == 1


# --- axes -------------------------------------------------------------------------------------------------------------


def test_equal_shapes_align() -> None:
    b = Builder()
    x, y = nests_of(b, 64, 128)
    where = memory(y)
    (found,) = alignments(traced(y, "a", where), traced(b.map("mul", y, x), "b", where))
    assert isinstance(found, Nest)
    assert {a.name for a in (*found.space.rows, *found.space.cols)} == {"a0", "a1"}


def test_a_coarser_axis_is_split() -> None:
    b = Builder()
    x, y = nests_of(b, 64, 1024)
    z = b.map("neg", b.reshape(y, (64, 8, 128)))
    where = memory(y)
    requests = list(alignments(traced(z, "a", where), traced(y, "b", where)))
    assert any(isinstance(r, SplitRequest) and r.inner in (8, 128) for r in requests)
    joined = merged(y, z, x)
    assert sorted(a.size for a in (*joined.space.rows, *joined.space.cols)) == [8, 64, 128]


def test_many_ways_to_split_end_soon() -> None:
    """Axes of many factors cut in every order: the same pair of nests is not tried twice."""
    b = Builder()
    x = arg(b, 0, 64, 32, 512)
    shuffled = b.reshape(b.permute(b.reshape(x, (64, 32, 16, 32)), (0, 3, 1, 2)), (64, 32, 512))
    cover = cover_of(graph([x], norm(b, b.map("add", shuffled, x))))
    assert len(cover.nests) <= 2


def test_a_reader_that_walks_fewer_axes_joins_what_it_reads() -> None:
    """The backward of a weight norm: two sums over rows, a map over the matrix, and one over the sums alone."""
    b = Builder()
    w, d, g = arg(b, 0, 128, 96), arg(b, 1, 128, 96), arg(b, 2, 128)
    squares = b.reduce("sum", b.map("mul", w, w), [1])
    total = b.reduce("sum", b.map("mul", d, w), [1])
    d_g = b.map("div", total, b.map("sqrt", squares))
    scale = b.reshape(b.map("div", b.map("mul", total, g), squares), (128, 1))
    d_w = b.map("sub", d, b.map("mul", w, b.expand(scale, (128, 96))))
    assert len(cover_of(graph([w, d, g], d_g, d_w)).groups) == 1


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_an_operand_of_a_batched_dot_is_written_transposed() -> None:
    """The value is [B, T, D]; the dot reads [T, B, D], so memory is [T, B, D]."""
    b = Builder()
    x, w = arg(b, 0, 96, 8, 64), arg(b, 1, 8, 64, 32)
    y = b.map("exp", x)
    made = graph([x, w], b.dot(b.permute(y, (1, 0, 2)), w, DType.F32))
    anchors = choose_anchors(made, {0: contiguous_strides((8, 96, 32))})
    assert anchors.layout[y] == (64, 96 * 64, 1)


def test_a_flipped_operand_is_copied() -> None:
    b = Builder()
    x, w = arg(b, 0, 1, 8, 64), arg(b, 1, 1, 64, 32)
    flipped = b.slice(x, (0, 7, 0), (1, 8, 64), (1, -1, 1))
    anchors = choose_anchors(graph([x, w], b.dot(flipped, w, DType.F32)), {})
    assert flipped in anchors.nodes


def test_outputs_choose_the_layout_before_dots() -> None:
    b = Builder()
    x, w = arg(b, 0, 96, 8, 64), arg(b, 1, 8, 64, 32)
    y = b.map("exp", x)
    made = graph([x, w], y, b.dot(b.permute(y, (1, 0, 2)), w, DType.F32))
    assert choose_anchors(made, {}).layout[y] == contiguous_strides((96, 8, 64))


# --- cost -------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_map() -> None:
    b = Builder()
    x, w = arg(b, 0, 64, 128), arg(b, 1, 128)
    y = b.map("mul", x, w)
    trace = traced(y, "n", memory())
    assert read_bytes(trace) == {x: 64 * 128 * 4, w: 128 * 4}
    assert nest_cost(trace, DEVICE).write_bytes == 64 * 128 * 4


def test_depth_of_dependent_reductions() -> None:
    b = Builder()
    x = arg(b, 0, 64, 128)
    centred = b.map("sub", x, b.reduce("sum", x, [1], keepdim=True))
    assert reduce_depth(traced(norm(b, centred), "n", memory())) == 2


def test_what_is_read_at_two_places_may_be_stored_instead() -> None:
    """A sum of many tensors, needed as it is and flipped, is worth memory; a product with one scalar is not."""
    b = Builder()
    parts = [arg(b, i, 256, 512) for i in range(6)]
    total = parts[0]
    for part in parts[1:]:
        total = b.map("add", total, part)
    flipped = b.slice(total, (255, 0), (256, 512), (-1, 1))
    y = b.map("mul", b.map("exp", total), b.map("exp", flipped))
    assert recompute_candidates([traced(y, "n", memory())]) == [total]
    z = b.map("mul", b.map("exp", parts[0]), b.slice(b.map("neg", parts[0]), (255, 0), (256, 512), (-1, 1)))
    assert recompute_candidates([traced(z, "m", memory())]) == []


# --- phases -----------------------------------------------------------------------------------------------------------


def test_phases_share_their_sample() -> None:
    """norm, mix, norm where cached reads cost next to nothing: phases of one kernel, each program one sample."""
    b = Builder()
    x = arg(b, 0, 512, 16, 256)
    device = replace(DEVICE, block_bandwidth=1e15)
    made = graph([x], norm(b, b.map("add", mixed(b, norm(b, x)), x)))
    cover = min(cover_options(made, {}, device), key=lambda option: option.seconds).cover()
    (group,) = cover.groups
    assert group.nests == (0, 1)
    assert group.blocks_per_sm in (1, 2, 4)
    fixed = [
        next(a.size for a in n.space.rows if a.name == f) for n, (f,) in zip(cover.nests, group.fixed, strict=True)
    ]
    assert fixed == [512, 512]


def test_no_dot_is_inside_a_nest() -> None:
    b = Builder()
    x, w = arg(b, 0, 1, 64, 32), arg(b, 1, 1, 32, 16)
    y = b.map("exp", b.dot(x, w, DType.F32))
    cover = cover_of(graph([x, w], y))
    assert all(not isinstance(a.value.attrs, Dot) for nest in cover.nests for a in nest.anchors)
    assert cover.layout[y] == contiguous_strides(y.shape)
    assert TensorType((1, 64, 16), DType.F32) == y.type
