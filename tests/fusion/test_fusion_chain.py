"""Which dots make a chain, what splits them, and what a chain is predicted to cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_graphs import DEVICE, arg, graph
from megafuse.core.dtypes import DType
from megafuse.fusion.anchors import choose_anchors
from megafuse.fusion.chain import Finder, make_chain, row_nests
from megafuse.fusion.chain_cost import chain_seconds, library_seconds
from megafuse.fusion.epilogue import DotRule
from megafuse.fusion.plan import Cover
from megafuse.fusion.planner import cover_options
from megafuse.ir.chain import RowDot, SumDot, Walk, external_reads, made_by
from megafuse.ir.graph import Builder, Graph, Node
from megafuse.schedule.step import build_step
from megafuse.schedule.types import DotCall, Launch

BF16, F32 = DType.BF16, DType.F32


def relu(b: Builder, x: Node) -> Node:
    """Worked in fp32, rounded once."""
    return b.cast(b.map("maximum", b.cast(x, F32), 0.0), x.dtype)


def layers(b: Builder, x: Node, *widths: int, first: int = 1) -> Node:
    """Rows through one matrix after the other, with maps between."""
    for number, width in enumerate(widths):
        weight = arg(b, first + number, 1, x.shape[2], width, role="param", dtype=x.dtype)
        x = b.dot(relu(b, x), weight, x.dtype)
    return x


def whole(*outputs: Node) -> Graph:
    found: dict[int, Node] = {}
    for out in outputs:
        stack = [out]
        while stack:
            node = stack.pop()
            if not node.args and node.op == "input":
                found[node.uid] = node
            stack.extend(node.args)
    return graph([found[uid] for uid in sorted(found)], *outputs)


def cover_of(made: Graph) -> Cover:
    return min(cover_options(made, {}, DEVICE, DotRule(chain=True)), key=lambda option: option.seconds).cover()


def widths_of(cover: Cover) -> list[list[int]]:
    """Columns of the dots of each chain."""
    return [[s.node.shape[2] for s in c.dots] for c in cover.chains]


def test_layers_are_one_chain_and_one_launch() -> None:
    b = Builder()
    made = whole(layers(b, arg(b, 0, 1, 4096, 64, dtype=BF16), 128, 100, 37))
    cover = cover_of(made)
    assert widths_of(cover) == [[128, 100, 37]]
    step = build_step(cover, DEVICE)
    assert sum(isinstance(c, Launch) for c in step.forward) == 1
    assert not any(isinstance(c, DotCall) for c in step.forward)
    assert len(step.buffers) == len(made.inputs) + 1, "nothing between the layers has memory"


def test_a_layer_that_is_too_wide_is_the_librarys() -> None:
    b = Builder()
    cover = cover_of(whole(layers(b, arg(b, 0, 1, 512, 64, dtype=BF16), 32, 64, 300, 64, 32)))
    assert widths_of(cover) == [[32, 64], [32]] or widths_of(cover) == [[32, 64]]


def test_what_needs_all_rows_splits_a_chain() -> None:
    b = Builder()
    hidden = layers(b, arg(b, 0, 1, 256, 32, dtype=F32), 32, 32)
    centred = b.map("sub", hidden, b.map("mul", b.reduce("sum", hidden, [1], keepdim=True), 1 / 256))
    made = whole(layers(b, centred, 32, 32, first=5))
    finder = Finder(made, choose_anchors(made, {}), Walk(1, 256))
    groups = [[m.node for m in c if isinstance(m.stage, RowDot)] for c in finder.components(True)]
    assert [len(g) for g in groups] == [2, 2]
    assert not set(groups[0]) & set(groups[1])


def test_a_matrix_that_depends_on_the_rows_is_none_for_a_chain() -> None:
    b = Builder()
    x = arg(b, 0, 1, 64, 64, dtype=BF16)
    first = b.dot(x, arg(b, 1, 1, 64, 64, role="param", dtype=BF16), BF16)
    second = b.dot(relu(b, x), relu(b, first), BF16)
    made = whole(second)
    finder = Finder(made, choose_anchors(made, {}), Walk(1, 64))
    assert finder.components(True) == []


def test_rows_are_told_from_columns_by_how_they_lie() -> None:
    """``x^T @ y`` of square matrices sums over the rows."""
    b = Builder()
    x, y = arg(b, 0, 1, 64, 64, dtype=BF16), arg(b, 1, 1, 64, 64, dtype=BF16)
    made = whole(b.dot(b.permute(x, (0, 2, 1)), y, BF16))
    finder = Finder(made, choose_anchors(made, {}), Walk(1, 64))
    (member,) = finder.members.values()
    assert isinstance(member.stage, SumDot) and member.sums


@pytest.mark.parametrize("shape", [(8, 4, 16), (32, 16), (1, 32, 1, 16), (32,)])
def test_row_values(shape: tuple[int, ...]) -> None:
    b = Builder()
    node = b.map("neg", arg(b, 0, *shape))
    (nest,) = row_nests(node, Walk(1, 32))
    assert nest.space.num_rows == 32
    assert not list(row_nests(node, Walk(1, 5)))


def test_what_is_made_in_place_is_not_read_from_memory() -> None:
    b = Builder()
    x = arg(b, 0, 1, 128, 16, dtype=BF16)
    made = whole(layers(b, x, 32, 8))
    anchors = choose_anchors(made, {})
    (component,) = Finder(made, anchors, Walk(1, 128)).components(True)
    chain = make_chain(Walk(1, 128), component, (), True)
    assert set(external_reads(chain, anchors.materialised)) == set(made.inputs)
    assert made_by(chain.stages[-1]) is made.outputs[0]


def test_the_price_of_a_chain() -> None:
    b = Builder()
    made = whole(layers(b, arg(b, 0, 1, 1 << 20, 128, dtype=BF16), 128, 128))
    anchors = choose_anchors(made, {})
    (component,) = Finder(made, anchors, Walk(1, 1 << 20)).components(True)
    chain = make_chain(Walk(1, 1 << 20), component, (), True)
    least = chain_seconds(chain, anchors.materialised, DEVICE, {made.outputs[0]})
    stored = chain_seconds(chain, anchors.materialised, DEVICE, {s.node for s in chain.dots})
    assert 2 * 2.0**28 / DEVICE.dram_bandwidth < least < stored
    assert least < library_seconds([s.node for s in chain.dots], DEVICE, False) * 2
    slow = replace(DEVICE, fp32_rate=DEVICE.fp32_rate / 100)
    assert chain_seconds(chain, anchors.materialised, slow, {made.outputs[0]}) > 5 * least


# --- several problems -------------------------------------------------------------------------------------------------


def several(b: Builder, x: Node, *widths: int, rows_first: bool = False) -> Node:
    """``[P, M, K]`` through a matrix of each problem after the other; what is between may lie as ``[M, P, K]``."""
    for number, width in enumerate(widths):
        weight = arg(b, 1 + number, x.shape[0], x.shape[2], width, role="param", dtype=x.dtype)
        if rows_first:
            x = b.permute(relu(b, b.permute(x, (1, 0, 2))), (1, 0, 2))
        x = b.dot(x if rows_first else relu(b, x), weight, x.dtype)
    return x


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize(("problems", "rows"), [(16, 200), (7, 2), (64, 64)])
def test_matrices_of_each_problem_are_one_chain(problems: int, rows: int, rows_first: bool) -> None:
    b = Builder()
    x = arg(b, 0, problems, rows, 64, dtype=BF16)
    cover = cover_of(whole(several(b, x, 64, 33, 64, rows_first=rows_first)))
    assert widths_of(cover) == [[64, 33, 64]], cover.decisions
    assert [c.walk for c in cover.chains] == [Walk(problems, rows)]
    step = build_step(cover, DEVICE)
    assert [type(c) for c in step.forward if isinstance(c, (Launch, DotCall))] == [Launch]
    (kernel,) = step.kernels
    assert all([a.size for a in p.fixed] == [problems] for p in kernel.phases)


def test_rows_are_found_as_dots_read_them() -> None:
    """``[16, 16, N]`` may have problems first, or rows."""
    b = Builder()
    x = b.dot(arg(b, 0, 16, 16, 8, dtype=BF16), arg(b, 1, 16, 8, 24, role="param", dtype=BF16), BF16)
    node = relu(b, b.permute(x, (1, 0, 2)))
    made = whole(b.dot(b.permute(node, (1, 0, 2)), arg(b, 2, 16, 24, 8, role="param", dtype=BF16), BF16))
    finder = Finder(made, choose_anchors(made, {}), Walk(16, 16))
    assert len(list(row_nests(node, finder.walk))) == 2
    assert finder.steps[node] == 16 * 24
    (component,) = finder.components(True)
    chain = make_chain(finder.walk, component, (), True)
    assert set(external_reads(chain, finder.memory)) == set(made.inputs)


def test_what_lies_the_other_way_round_is_read_from_memory() -> None:
    """Row 3 of problem 5 is no row 5 of problem 3."""
    b = Builder()
    x = b.dot(arg(b, 0, 16, 16, 8, dtype=BF16), arg(b, 1, 16, 8, 24, role="param", dtype=BF16), BF16)
    crossed = relu(b, b.permute(x, (1, 0, 2)))
    made = whole(b.dot(crossed, arg(b, 2, 16, 24, 8, role="param", dtype=BF16), BF16))
    finder = Finder(made, choose_anchors(made, {}), Walk(16, 16))
    assert finder.components(True) == []


def test_rows_that_all_problems_share_are_none_for_a_chain() -> None:
    b = Builder()
    x = b.expand(arg(b, 0, 1, 32, 8, dtype=BF16), (4, 32, 8))
    made = whole(b.dot(x, arg(b, 1, 4, 8, 8, role="param", dtype=BF16), BF16))
    assert not Finder(made, choose_anchors(made, {}), Walk(4, 32)).members


@pytest.mark.parametrize(("axes", "sums"), [((1,), True), ((0, 1), True), ((0,), False)])
def test_sums_over_the_rows_of_each_problem_or_of_all(axes: tuple[int, ...], sums: bool) -> None:
    b = Builder()
    node = b.reduce("sum", arg(b, 0, 4, 32, 8), list(axes))
    assert [n.roots[0].by_rows for n in row_nests(node, Walk(4, 32))] == [True] * sums


def test_a_device_that_problems_leave_idle_costs() -> None:
    """As many rows in few problems, each of few rows, and in one."""
    prices = []
    for problems, rows in ((1, 132 * 64), (2, 66 * 64), (132, 64), (133, 64)):
        b = Builder()
        made = whole(several(b, arg(b, 0, problems, rows, 128, dtype=BF16), 128, 128))
        anchors = choose_anchors(made, {})
        (component,) = Finder(made, anchors, Walk(problems, rows)).components(True)
        chain = make_chain(Walk(problems, rows), component, (), True)
        matrices = 128 * 128 * 2 * 2 * problems / DEVICE.dram_bandwidth
        prices.append(chain_seconds(chain, anchors.materialised, DEVICE, {made.outputs[0]}) - matrices)
    assert prices[:3] == pytest.approx([prices[0]] * 3, rel=0.02)
    assert prices[3] > 1.3 * prices[0], "a second wave for one problem"
