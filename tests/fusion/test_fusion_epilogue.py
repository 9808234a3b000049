"""Which values a dot takes in, where it may not, and when that is worth it."""

from __future__ import annotations

import pytest

from fusion_graphs import DEVICE, arg, graph
from megafuse.core.device import DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.fusion.anchors import choose_anchors
from megafuse.fusion.epilogue import (
    LIBRARY,
    DotRule,
    Epilogue,
    consumers_of,
    epilogue_item,
    epilogues,
    product_axes,
    slower_by,
)
from megafuse.fusion.plan import Cover
from megafuse.fusion.planner import cover_options
from megafuse.ir.graph import Builder, Graph, Node
from megafuse.ir.trace import NestError
from megafuse.schedule.step import build_step
from megafuse.schedule.types import DotCall
from megafuse.select.choose import select

AUTO = DotRule(fuse=True)
BF16 = DType.BF16


def product(b: Builder, p: int = 2, m: int = 64, n: int = 96, k: int = 32, dtype: DType = BF16) -> tuple[Node, ...]:
    """(a, b, a @ b)."""
    left, right = arg(b, 0, p, m, k, dtype=dtype), arg(b, 1, p, k, n, dtype=dtype)
    return left, right, b.dot(left, right, dtype)


def relu(b: Builder, x: Node) -> Node:
    """Worked in fp32, rounded once."""
    return b.cast(b.map("maximum", b.cast(x, DType.F32), 0.0), x.dtype)


def options_of(made: Graph, dots: DotRule = AUTO, device: DeviceSpec = DEVICE) -> Cover:
    options = cover_options(made, {}, device, dots)
    assert len({o.name for o in options}) == len(options)
    chosen = select([o.name for o in options], {o.name: o.seconds for o in options}).chosen
    return next(o for o in options if o.name == chosen).cover()


def fused(cover: Cover) -> list[Node]:
    return [g.dot for g in cover.groups if g.dot is not None]


def activation() -> tuple[Graph, Node]:
    """``relu(a @ b)``, one output."""
    b = Builder()
    left, right, dot = product(b)
    return graph((left, right), relu(b, dot)), dot


def test_an_activation_is_taken_in_and_the_product_is_never_written():
    made, dot = activation()
    cover = options_of(made)
    assert fused(cover) == [dot]
    step = build_step(cover, DEVICE)
    assert not any(isinstance(c, DotCall) for c in step.forward) and len(step.kernels) == 1
    (kernel,) = step.kernels
    assert kernel.dot is not None and kernel.dot.node is dot
    assert kernel.reads == ("x0", "x1") and len(kernel.writes) == 1
    assert [b.shape for b in step.buffers if b.kind == "output"] == [(2, 64, 96)]


def test_the_library_multiplies_unless_asked_otherwise():
    made, _ = activation()
    assert fused(options_of(made, LIBRARY)) == []


def test_a_product_that_others_read_is_written_too():
    b = Builder()
    left, right, dot = product(b)
    made = Graph((left, right), (relu(b, dot), dot), 2)
    cover = options_of(made)
    assert fused(cover) == [dot]
    (kernel,) = build_step(cover, DEVICE).kernels
    assert len(kernel.writes) == 2


def test_a_residual_before_a_norm_is_given_memory():
    """The sum is not in memory by itself: a norm would compute it on the way."""
    b = Builder()
    left, right, dot = product(b, 1, 4096, 1024, 256)
    other = arg(b, 2, 1, 4096, 1024, dtype=BF16)
    total = b.cast(b.map("add", b.cast(dot, DType.F32), b.cast(other, DType.F32)), BF16)
    wide = b.cast(total, DType.F32)
    mean = b.map("mul", b.reduce("sum", wide, [2], keepdim=True), 1 / 1024)
    out = b.cast(b.map("sub", wide, mean), BF16)
    ends = epilogues_of(graph((left, right, other), out), dot)
    assert [len(e.ends) for e in ends] == [1]
    assert ends[0].ends == (total,), "the narrow value, not its wide copy"


def epilogues_of(made: Graph, dot: Node) -> list[Epilogue]:
    return epilogues(made, choose_anchors(made, {}), dot, consumers_of(made))


def test_what_depends_on_the_product_in_another_way_stays_out():
    b = Builder()
    left, right, dot = product(b)
    wide = b.cast(dot, DType.F32)
    total = b.reduce("sum", wide, [2], keepdim=True)
    made = graph((left, right), b.cast(b.map("mul", wide, b.expand(total, dot.shape)), BF16))
    assert epilogues_of(made, dot) == []
    assert fused(options_of(made)) == []


@pytest.mark.parametrize("sizes", [{"dtype": DType.F64}, {"m": 1}, {"n": 1}])
def test_wide_types_and_single_rows_or_columns_are_left_to_the_library(sizes: dict[str, object]):
    b = Builder()
    left, right, dot = product(b, **sizes)  # type: ignore[arg-type]
    made = graph((left, right), relu(b, dot))
    assert epilogues_of(made, dot) == []


@pytest.mark.parametrize("perm", [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0)])
def test_rows_and_columns_are_those_of_the_product(perm: tuple[int, ...]):
    b = Builder()
    left, right, dot = product(b)
    out = relu(b, b.permute(dot, perm))
    made = graph((left, right), out)
    anchors = choose_anchors(made, {})
    item = epilogue_item(Epilogue(dot, (out,)), anchors, DEVICE, AUTO, True)
    groups = product_axes(item.trace, dot)
    assert [[a.size for a in axes] for axes in groups] == [[2], [64], [96]]
    assert item.nest.space.rows == (*groups[0], *groups[1]) and item.nest.space.cols == groups[2]


def test_a_reshape_that_cuts_rows_makes_two_axes_of_them():
    b = Builder()
    left, right, dot = product(b)
    out = relu(b, b.permute(b.reshape(dot, (2, 4, 16, 96)), (0, 2, 1, 3)))
    made = graph((left, right), out)
    item = epilogue_item(Epilogue(dot, (out,)), choose_anchors(made, {}), DEVICE, AUTO, True)
    assert [[a.size for a in axes] for axes in product_axes(item.trace, dot)] == [[2], [4, 16], [96]]


@pytest.mark.parametrize("part", [False, True])
def test_rows_in_another_order_and_parts_of_them_are_not_the_tiles(part: bool):
    b = Builder()
    left, right, dot = product(b)
    moved = b.slice(dot, (0, 8, 0), (2, 32, 96)) if part else b.slice(dot, (0, 63, 0), dot.shape, (1, -1, 1))
    made = graph((left, right), relu(b, moved))
    assert epilogues_of(made, dot) == []


def test_a_nest_that_does_not_read_the_product_has_no_rows_of_it():
    made, dot = activation()
    anchors = choose_anchors(made, {})
    item = epilogue_item(Epilogue(dot, (made.outputs[0],)), anchors, DEVICE, AUTO, True)  # type: ignore[arg-type]
    with pytest.raises(NestError, match=r"reads the product .* at 0 places"):
        product_axes(item.trace, dot.args[0])


def test_a_large_product_whose_epilogue_saves_little_stays_with_the_library():
    """2 K / 3 % of the time of a deep product are more than reading and writing its result costs."""
    b = Builder()
    left, right, dot = product(b, 1, 8192, 8192, 16384)
    made = graph((left, right), relu(b, dot))
    cover = options_of(made)
    assert fused(cover) == []
    assert any("is multiplied by the library" in d for d in cover.decisions)
    assert slower_by(dot, DEVICE) > 0


def summed(b: Builder, value: Node, axes: list[int]) -> Node:
    """A sum in fp32, rounded to bf16: the gradient of a bias."""
    return b.cast(b.reduce("sum", b.cast(value, DType.F32), axes), BF16)


@pytest.mark.parametrize("axes", [[1], [0, 1]])
def test_sums_over_the_rows_of_a_value_leave_a_partial_result_per_tile(axes: list[int]):
    b = Builder()
    left, right, dot = product(b, 3, 4096, 512, 64)
    value = relu(b, dot)
    made = graph((left, right), value, summed(b, value, axes))
    cover = options_of(made)
    assert fused(cover) == [dot]
    step = build_step(cover, DEVICE)
    first, second = step.kernels
    partial = step.buffer(first.writes[1])
    tiles = 4096 // first.phases[0].tile.row_tile
    assert first.dot is not None and partial.dtype is DType.F32
    assert partial.shape == ((tiles, 3, 512) if axes == [1] else (3, tiles, 512))
    assert second.reads == (partial.name,), "the value itself is not read again"
    assert step.buffer(second.writes[0]).kind == "output"


def test_sums_of_one_tile_of_rows_are_whole():
    b = Builder()
    left, right, dot = product(b, 2, 16, 512, 64)
    value = relu(b, dot)
    made = graph((left, right), value, b.reduce("sum", b.cast(value, DType.F32), [1]))
    (kernel,) = build_step(options_of(made), DEVICE).kernels
    assert kernel.dot is not None and len(kernel.writes) == 2


@pytest.mark.parametrize("axes", [[2], [0], [1, 2]])
def test_sums_that_keep_rows_or_run_over_columns_stay_out(axes: list[int]):
    b = Builder()
    left, right, dot = product(b)
    value = relu(b, dot)
    made = graph((left, right), value, summed(b, value, axes))
    assert [e.ends for e in epilogues_of(made, dot)] == [(value,)]


def test_sums_over_part_of_the_rows_stay_out():
    """Rows that a reshape cuts in two are tiles of both parts."""
    b = Builder()
    left, right, dot = product(b)
    value = relu(b, dot)
    cut = b.reshape(value, (2, 4, 16, 96))
    made = graph((left, right), value, summed(b, cut, [2]))
    assert [e.ends for e in epilogues_of(made, dot)] == [(value,)]
    whole = graph((left, right), value, summed(b, cut, [1, 2]))
    assert [len(e.ends) for e in epilogues_of(whole, dot)] == [2, 1]


def test_a_sum_of_the_product_itself():
    b = Builder()
    left, right, dot = product(b, 1, 4096, 512, 64)
    made = Graph((left, right), (dot, summed(b, dot, [1])), 2)
    cover = options_of(made)
    assert fused(cover) == [dot]
    first, _ = build_step(cover, DEVICE).kernels
    assert len(first.writes) == 2, "the product and the partial sums"


def test_a_sum_that_another_end_needs_stays_out():
    """The product's own kernel cannot wait for the sum."""
    b = Builder()
    left, right, dot = product(b)
    total = b.reduce("sum", b.cast(dot, DType.F32), [1], keepdim=True)
    out = b.cast(b.map("sub", b.cast(dot, DType.F32), b.expand(total, dot.shape)), BF16)
    made = graph((left, right), out, relu(b, dot))
    assert all(out not in e.ends for e in epilogues_of(made, dot))
    options_of(made)


def test_partial_results_are_written_and_read_again():
    """The cost model sees what the sums take."""
    b = Builder()
    left, right, dot = product(b, 1, 4096, 512, 64)
    value = relu(b, dot)
    made = graph((left, right), value, b.reduce("sum", b.cast(value, DType.F32), [1]))
    anchors = choose_anchors(made, {})
    ends = [e.ends for e in epilogues_of(made, dot)]
    with_sum, without = (epilogue_item(Epilogue(dot, e), anchors, DEVICE, AUTO, True).cost for e in ends)
    assert with_sum.write_bytes - without.write_bytes == (2 * 4096 // 128 + 1) * 512 * 4
