"""The work of planning: how it grows with the graph, and the short cuts that may not change a plan."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from fusion_graphs import DEVICE, arg, graph, mixed, norm
from megafuse.core.dependencies import Dependencies, members
from megafuse.core.dtypes import DType
from megafuse.fusion import cover, items, planner
from megafuse.fusion.anchors import Anchors, choose_anchors
from megafuse.fusion.cover import Search
from megafuse.fusion.group import group_items
from megafuse.fusion.items import Item, Items
from megafuse.fusion.units import number_units
from megafuse.ir.graph import Builder, Graph, contiguous_strides
from megafuse.ir.trace import Memory

BLOCKS = (6, 24)


def chain(blocks: int) -> Graph:
    """``blocks`` blocks ``x + silu(norm(x) @ v) @ w``."""
    b = Builder()
    x = arg(b, 0, 1, 64, 256)
    inputs = [x]
    for n in range(blocks):
        v, w = (arg(b, 2 * n + k, 1, 256, 256, role="param") for k in (1, 2))
        inputs += [v, w]
        hidden = b.dot(norm(b, x), v, DType.F32)
        update = b.dot(b.map("mul", hidden, b.map("sigmoid", hidden)), w, DType.F32)
        x = b.map("add", x, update)
    return graph(inputs, x)


def search_of(made: Graph) -> Search:
    """A search at its start."""
    return Search(made, choose_anchors(made, {}), Items(made, DEVICE))


def counted(monkeypatch: pytest.MonkeyPatch, made: Graph) -> Counter[str]:
    """How often the steps that planning consists of are taken for one graph."""
    counts: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        for owner, name in (
            (items, "merge_nests"),
            (items, "trace_nest"),
            (cover.Search, "_consider"),
            (planner, "group_items"),
        ):
            original = getattr(owner, name)

            def count(*args: object, _original=original, _name=name) -> object:  # type: ignore[no-untyped-def]
                counts[_name] += 1
                return _original(*args)

            patch.setattr(owner, name, count)
        planner.cover_options(made, {}, DEVICE)
    return counts


def test_work_grows_with_the_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (counted(monkeypatch, chain(n)) for n in BLOCKS)
    for step in ("merge_nests", "trace_nest", "_consider"):
        per_search = [c[step] / c["group_items"] if step == "_consider" else c[step] for c in (few, many)]
        assert per_search[1] <= 1.5 * BLOCKS[1] / BLOCKS[0] * per_search[0], (step, few, many)


class CheckedItems(Items):
    """Items that compare every gain with its bound."""

    found = 0

    def join(self, a: Item, b: Item, anchors: Anchors, materialised: Memory) -> tuple[float, Item] | None:
        join = super().join(a, b, anchors, materialised)
        if join is not None:
            self.found += 1
            assert join[0] <= self.most_saved(a, b)
        return join


@pytest.mark.parametrize("shape", [(8, 16, 64), (4096, 16, 256), (3, 5, 35)])
def test_no_join_saves_more_than_its_bound(shape: tuple[int, int, int]) -> None:
    b = Builder()
    x, gamma = arg(b, 0, *shape), arg(b, 1, shape[-1], role="param")
    y = b.map("add", b.map("mul", norm(b, mixed(b, norm(b, x))), gamma), x)
    sums = b.reduce("sum", y, [0, 1]), b.reduce("sum", b.map("mul", x, y), [0, 2]), b.reduce("max", y, [2])
    both = b.concat([y, b.map("exp", x)], 1)
    made = graph([x, gamma], y, *sums, both, b.map("mul", y, b.reshape(sums[2], (*shape[:2], 1))))
    known = CheckedItems(made, DEVICE)
    search = Search(made, choose_anchors(made, {}), known)
    for first, second in itertools.permutations(search.units, 2):
        known.join(first, second, search.anchors, search.materialised)
    assert known.found > 10
    search.run()


def reached(needs: dict[int, set[int]], start: int) -> set[int]:
    """All that ``start`` needs, directly or not."""
    seen: set[int] = set()
    stack = list(needs[start])
    while stack:
        one = stack.pop()
        if one not in seen:
            seen.add(one)
            stack.extend(needs[one])
    return seen


@pytest.mark.parametrize("seed", range(20))
def test_dependencies_are_those_of_the_contracted_graph(seed: int) -> None:
    rng = random.Random(seed)
    count = 12
    needs = [sum(1 << n for n in range(u) if rng.random() < 0.2) for u in range(count)]
    dependencies = Dependencies(tuple(needs))
    groups = [1 << u for u in range(count)]
    while True:
        plain = {g: {h for h in groups if h != g and any(needs[u] & h for u in members(g))} for g in groups}
        for g in groups:
            before = {h for h in groups if dependencies.before(g) & h} - {g}
            assert before == reached(plain, g), f"seed {seed}"
            after = {h for h in groups if dependencies.after(g) & h} - {g}
            assert after == {h for h in groups if g in reached(plain, h)}, f"seed {seed}"
            apart = {h for h in groups if dependencies.separated(g) & h}
            through = {h for h in groups if any(h in reached(plain, z) for z in plain[g])}
            through |= {h for h in groups if any(g in reached(plain, z) for z in plain[h])}
            assert apart == through, f"seed {seed}"
        joinable = [(g, h) for g, h in itertools.combinations(groups, 2) if not dependencies.separated(g) & h]
        if not joinable:
            break
        g, h = rng.choice(joinable)
        dependencies.join(g | h)
        groups = [k for k in groups if k not in (g, h)] + [g | h]


def test_grouping_leaves_the_search_as_it_is() -> None:
    b = Builder()
    x = arg(b, 0, 512, 16, 256)
    search = search_of(graph([x], norm(b, b.map("add", mixed(b, norm(b, x)), x))))
    found = search.run()
    before = [search.dependencies.before(search.units[i]) for i in found]
    groups = group_items(search, found, replace(DEVICE, block_bandwidth=1e15))
    assert len(groups) < len(found)
    assert [search.dependencies.before(search.units[i]) for i in found] == before


def test_an_item_is_made_again_only_where_memory_differs() -> None:
    b = Builder()
    x = arg(b, 0, 64, 256)
    double = b.map("add", x, x)
    total, other = b.reduce("sum", b.map("mul", double, x), [1]), b.reduce("max", x, [1])
    made = graph([x], total, other)
    known = Items(made, DEVICE)
    plain, stored = choose_anchors(made, {}), choose_anchors(made, {}, (double,))
    first, second = ({a.node: known.initial(a, c, c.materialised) for a in c.order} for c in (plain, stored))
    assert second[other] is first[other]
    assert second[total] is not first[total]
    assert double in second[total].trace.loaded()
    flipped = choose_anchors(made, {}, (double,))
    flipped.layout[double] = contiguous_strides(double.shape)[::-1]
    (anchor,) = (a for a in flipped.order if a.node is total)
    assert known.initial(anchor, flipped, flipped.materialised) is not second[total]


def test_what_a_unit_reads() -> None:
    b = Builder()
    x, w = arg(b, 0, 1, 16, 64), arg(b, 1, 1, 64, 64, role="param")
    y = b.dot(norm(b, x), w, DType.F32)
    made = graph([x, w], b.map("add", y, x))
    anchors = choose_anchors(made, {})
    units = number_units(made, anchors)
    of_op = {a.node.op: u for a, u in units.of_anchor.items() if a.node is not made.outputs[0]}
    last = units.of_anchor[anchors.order[-1]]
    (dot,) = set(range(len(units.needs))) - set(units.of_anchor.values())
    assert units.needs[of_op["reduce"]] == 0
    assert units.needs[of_op["map"]] == 1 << of_op["reduce"]
    assert units.needs[dot] == 1 << of_op["map"]
    assert units.needs[last] == 1 << dot
