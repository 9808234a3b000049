"""The rewrite engine and the soundness of every rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from ir_graphs import argument, graph_of, random_graphs, random_inputs, seeded_graph
from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError
from megafuse.ir.graph import Builder, Graph, Node
from megafuse.ir.interpret import Mode, evaluate
from megafuse.ir.printer import format_graph
from megafuse.ir.rewrite import rewrite, rule
from megafuse.ir.rules import SIMPLIFY, embeds, simplify
from megafuse.ir.rules_concat import CONCAT_RULES
from megafuse.ir.rules_moves import representable
from megafuse.ir.types import Cast, Concat, Const, Expand, Input, Map, Origin, Reduce, Reshape, Slice
from megafuse.ir.verify import verify

ALL = (*SIMPLIFY, *CONCAT_RULES)
EXACT = [r for r in ALL if not r.differs]


def same(graph: Graph, other: Graph, mode: Mode, rtol: float) -> None:
    """Both graphs give equal outputs; with ``rtol`` 0, to the bit, signs of zeros included."""
    inputs = random_inputs(graph)
    for want, got in zip(evaluate(graph, inputs, mode=mode), evaluate(other, inputs, mode=mode), strict=True):
        assert want is not None and got is not None and want.dtype == got.dtype and want.shape == got.shape
        wide, new = want.astype(np.float64), got.astype(np.float64)
        np.testing.assert_allclose(new, wide, rtol=rtol, atol=rtol)
        if not rtol:
            np.testing.assert_array_equal(np.signbit(new[~np.isnan(new)]), np.signbit(wide[~np.isnan(new)]))


def check_rules(graph: Graph, fired: set[str]) -> None:
    """All rules keep the value in exact arithmetic; those that claim to be exact keep every bit."""
    verify(graph)
    new = rewrite(graph, ALL, "test", trace=lambda name, old, new: fired.add(name))
    verify(new)
    assert [n.type for n in new.inputs] == [n.type for n in graph.inputs]
    same(graph, new, "f64", 1e-12)
    exact = rewrite(graph, EXACT, "test")
    verify(exact)
    same(graph, exact, "native", 0)
    same(graph, exact, "f64", 0)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(random_graphs())
def test_rules_keep_the_value(graph: Graph) -> None:
    check_rules(graph, set())


def test_rules_keep_the_value_of_seeded_graphs() -> None:
    """Seeded graphs do not change with the library that draws them, and between them make every rule fire."""
    fired: set[str] = set()
    for seed in range(250):
        check_rules(seeded_graph(seed), fired)
    assert {r.name for r in ALL} - fired == set()


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(random_graphs())
def test_simplify_is_idempotent_and_deterministic(graph: Graph) -> None:
    once = simplify(graph)
    assert format_graph(simplify(graph)) == format_graph(once)
    assert format_graph(simplify(once)) == format_graph(once)


def simplified(b: Builder, node: Node, *inputs: Node) -> Node:
    """The simplified form of one value."""
    out = simplify(graph_of(node, inputs=inputs)).outputs[0]
    assert out is not None
    return out


def test_identities() -> None:
    b = Builder()
    x = argument(b, (4, 3))
    for node in (b.map("mul", x, 1.0), b.map("div", x, 1.0), b.map("sub", x, 0.0), b.map("add", x, -0.0)):
        assert simplified(b, node, x).is_a(Input)
    for node in (b.map("add", x, 0.0), b.map("sub", x, -0.0), b.map("sub", 0.0, x), b.map("div", 1.0, x)):
        assert simplified(b, node, x).is_a(Map)


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F64])
def test_differences_of_a_value_with_itself_are_no_differences(dtype: DType) -> None:
    b = Builder()
    x, y = argument(b, (6,), dtype), argument(b, (6,), dtype, 1)
    for node in (b.map("sub", x, x), b.map("add", x, b.map("neg", x)), b.map("add", b.map("neg", x), x)):
        graph = simplify(graph_of(node, inputs=[x]))
        (out,) = graph.outputs
        assert out is not None and out.attrs == Map("mul") and out.args[0].attrs == Map("abs")
        special = np.array([0.0, -0.0, 3.0, -5.0, np.inf, np.nan])
        (got,) = evaluate(graph, [special.astype(random_inputs(graph)[0].dtype)], mode="native")
        assert got is not None
        np.testing.assert_array_equal(got.astype(np.float64), [0, 0, 0, 0, np.nan, np.nan])
        assert not np.signbit(got[:4].astype(np.float64)).any()
    product, turned = b.map("mul", x, y), b.map("mul", y, x)
    for node in (b.map("sub", product, turned), b.map("add", b.map("neg", product), turned)):
        assert simplified(b, node, x, y).attrs == Map("mul") and simplified(b, node, x, y).args[0].attrs == Map("abs")
    for node in (b.map("sub", x, y), b.map("add", x, x), b.map("sub", x, b.map("neg", x))):
        assert simplified(b, node, x, y).attrs == node.attrs


def test_division_by_powers_of_two_only() -> None:
    b = Builder()
    x = argument(b, (4,))
    assert simplified(b, b.map("div", x, -8.0), x).attrs == Map("mul")
    for c in (3.0, 0.0, float("inf"), 2.0**-127):
        assert simplified(b, b.map("div", x, c), x).attrs == Map("div")


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
@pytest.mark.parametrize("through_fp32", [False, True])
def test_backward_of_split_is_a_concat(order: tuple[int, ...], through_fp32: bool) -> None:
    b = Builder()
    xs = [argument(b, (2, n), DType.BF16, i) for i, n in enumerate((3, 1, 4))]
    pads = [b.pad(x, (0, lo), (2, 8)) for x, lo in zip(xs, (0, 3, 4), strict=True)]
    total = pads[order[0]]
    for i in order[1:]:
        if through_fp32:
            wide = b.map("add", b.cast(total, DType.F32), b.cast(pads[i], DType.F32))
            total = b.cast(wide, DType.BF16)
        else:
            total = b.map("add", total, pads[i])
    out = simplified(b, total, *xs)
    if order == (0, 1, 2) or not through_fp32:
        assert out.attrs == Concat(1) and [a.attrs for a in out.args] == [x.attrs for x in xs]


def test_pads_that_overlap_stay() -> None:
    b = Builder()
    x, y = argument(b, (3,), position=0), argument(b, (3,), position=1)
    out = simplified(b, b.map("add", b.pad(x, (0,), (5,)), b.pad(y, (2,), (5,))), x, y)
    assert out.attrs == Map("add")


def test_split_then_concat_is_the_value() -> None:
    b = Builder()
    x = argument(b, (4, 6))
    parts = [b.slice(x, (0, 2 * i), (4, 2)) for i in range(3)]
    assert simplified(b, b.concat(parts, 1), x).is_a(Input)
    assert simplified(b, b.concat([parts[0], parts[2]], 1), x).is_a(Concat)
    assert simplified(b, b.concat(parts[:2], 1), x).attrs == Slice((0, 0), (1, 1))


def test_keepdim_reductions_merge() -> None:
    b = Builder()
    x = argument(b, (4, 6, 5))
    out = simplified(b, b.reduce("sum", b.reduce("sum", x, [2], keepdim=True), [0], keepdim=True), x)
    assert out.is_a(Reshape) and out.args[0].attrs == Reduce("sum", (0, 2))
    low = argument(b, (4, 6), DType.BF16)
    twice = b.reduce("sum", b.reduce("sum", low, [1]), [0])
    assert simplified(b, twice, low).args[0].is_a(Reduce), "a 16-bit sum rounds in between"


def test_widening_casts_vanish_and_rounding_casts_stay() -> None:
    b = Builder()
    low, x = argument(b, (4,), DType.BF16, 0), argument(b, (4,), DType.F32, 1)
    assert simplified(b, b.cast(b.cast(low, DType.F32), DType.BF16), low).is_a(Input)
    kept = simplify(graph_of(b.cast(b.cast(x, DType.BF16), DType.F32), inputs=[low, x])).outputs[0]
    assert kept is not None and kept.is_a(Cast) and kept.args[0].is_a(Cast)
    assert not embeds(DType.I32, DType.F32) and embeds(DType.U8, DType.BF16) and not embeds(DType.F16, DType.BF16)


def test_constants_do_not_move() -> None:
    b = Builder()
    x = argument(b, (4, 3))
    ones = b.permute(b.expand(b.reshape(b.const(2.0, DType.F32), (1, 1)), (3, 4)), (1, 0))
    out = simplified(b, b.map("mul", x, ones), x)
    assert out.args[1].is_a(Const)
    flat = simplified(b, b.reshape(ones, (12,)), x)
    assert flat.is_a(Expand) and flat.args[0].args[0].is_a(Const)


def test_a_constant_that_its_type_rounds_stays_a_tensor() -> None:
    b = Builder()
    x = argument(b, (4,), DType.BF16)
    tenth = b.broadcast(b.const(0.1, DType.BF16), (4,))
    assert simplified(b, b.map("mul", x, tenth), x).args[1].is_a(Expand)
    assert not representable(0.1, DType.BF16) and representable(0.5, DType.F16) and not representable(1e6, DType.F16)


def test_unused_nodes_go_and_inputs_stay() -> None:
    b = Builder()
    x, y = argument(b, (4,), position=0), argument(b, (4,), position=1)
    b.map("exp", y)
    new = simplify(graph_of(b.map("exp", x), inputs=[x, y]))
    assert len(new.inputs) == 2 and len(new.nodes) == 3


def test_origins_survive() -> None:
    b = Builder()
    x = argument(b, (4,))
    b.origin = Origin("block.py", 31)
    new = simplify(graph_of(b.map("exp", b.map("mul", x, 1.0)), inputs=[x]))
    assert new.outputs[0] is not None and new.outputs[0].origin == Origin("block.py", 31)


def test_a_rule_that_changes_the_type_is_caught() -> None:
    @rule(Map)
    def bad(b: Builder, node: Node) -> Node:
        return b.cast(node.args[0], DType.BF16)

    b = Builder()
    x = argument(b, (4,))
    with pytest.raises(VerifyError, match="rule bad"):
        rewrite(graph_of(b.map("exp", x), inputs=[x]), [bad], "test")


def test_rules_without_end_are_caught() -> None:
    @rule(Map)
    def more(b: Builder, node: Node) -> Node:
        return b.map("mul", b.map("mul", node.args[0], node.args[0]), 2.0)

    b = Builder()
    x = argument(b, (4,))
    with pytest.raises(VerifyError, match="without end: more"):
        rewrite(graph_of(b.map("exp", x), inputs=[x]), [more], "test")


def test_two_rules_that_undo_each_other_stop() -> None:
    @rule(Map)
    def swap(b: Builder, node: Node) -> Node:
        return b.map("add", *node.args[::-1])

    b = Builder()
    x, y = argument(b, (4,), position=0), argument(b, (4,), position=1)
    new = rewrite(graph_of(b.map("add", x, y), inputs=[x, y]), [swap], "test")
    same(graph_of(b.map("add", x, y), inputs=[x, y]), new, "native", 0)


def test_slice_of_expand_slices_the_small_value() -> None:
    b = Builder()
    x = argument(b, (1, 5))
    graph = graph_of(b.slice(b.expand(x, (4, 5)), (2, 3), (2, 2), (1, -1)), inputs=[x])
    new = simplify(graph)
    out = new.outputs[0]
    assert out is not None
    assert out.is_a(Expand)
    assert out.args[0].attrs == Slice((0, 3), (1, -1))
    same(graph, new, "native", 0)


def test_additions_of_dense_values_keep_their_order() -> None:
    b = Builder()
    x, y, z = argument(b, (4,), position=0), argument(b, (4,), position=1), argument(b, (2,), position=2)
    low, high = b.pad(z, (0,), (4,)), b.pad(z, (2,), (4,))
    total = b.map("add", b.map("add", b.map("add", x, low), y), high)
    graph = graph_of(b.map("add", total, b.map("add", y, low)), inputs=[x, y, z])
    new = simplify(graph)
    assert not any(n.is_a(Concat) for n in new.nodes)
    same(graph, new, "native", 0)
    one_dense = graph_of(b.map("add", b.map("add", x, low), high), inputs=[x, y, z])
    assert any(n.is_a(Concat) for n in simplify(one_dense).nodes)


def test_values_that_python_holds_equal_are_different_nodes() -> None:
    b = Builder()
    x = argument(b, (2,))
    assert b.pad(x, (1,), (3,), 0.0) is not b.pad(x, (1,), (3,), -0.0)
    assert b.const(0.0, DType.F32) is not b.const(-0.0, DType.F32)
