"""Loads by index in covers: one pass with what follows, which tables get memory, bytes of the rows read."""

from __future__ import annotations

import pytest

from fusion_graphs import arg, cover_of, graph, norm, step_of
from megafuse.core.dtypes import DType
from megafuse.fusion.anchors import choose_anchors
from megafuse.ir.graph import Builder, Graph, Node
from megafuse.ir.traffic import bytes_of, read_bytes
from megafuse.ir.types import Reduce
from megafuse.schedule.types import Launch

I64 = DType.I64


def rows_of(b: Builder, table: Node, index: Node) -> Node:
    """Rows of a matrix at an index of any shape."""
    places, (size, dim) = index.shape, table.shape
    wide = b.expand(b.reshape(table, (*(1 for _ in places), size, dim)), (*places, size, dim))
    at = b.expand(b.reshape(index, (*places, 1, 1)), (*places, 1, dim))
    return b.reshape(b.gather(wide, at, len(places)), (*places, dim))


def prologue(rows: int, batch: int = 64, tokens: int = 8, dim: int = 128) -> tuple[Graph, Node]:
    """Rows of a table, scaled, with positions added, normed; and the table."""
    b = Builder()
    table, index = arg(b, 0, rows, dim, role="param"), arg(b, 1, batch, tokens, dtype=I64)
    position = arg(b, 2, tokens, dim, role="param")
    found = rows_of(b, table, index)
    scaled = b.map("add", b.map("mul", found, 3.0), b.broadcast(position, found.shape))
    return graph([table, index, position], norm(b, scaled)), table


def test_rows_scale_sum_and_norm_are_one_nest_of_the_rows_alone() -> None:
    for rows in (700, 10**6):
        made, table = prologue(rows)
        (nest,) = cover_of(made).nests
        assert {r.anchor.node.op for r in nest.roots} == {"reduce", "map"}
        (kernel,) = step_of(made).kernels
        (phase,) = kernel.phases
        read = read_bytes(phase.trace)[table]
        assert read == min(64 * 8, rows) * 128 * 4
        assert kernel.dram_bytes == pytest.approx(read + 64 * 8 * (128 * 4 + 8), rel=0.02)


def test_short_rows_are_fetched_in_whole_sectors() -> None:
    for dim, fetched in ((1, 8), (3, 3 * 8 / 3), (8, 8), (64, 64)):
        b = Builder()
        table, index = arg(b, 0, 10**6, dim), arg(b, 1, 1000, dtype=I64)
        (kernel,) = step_of(graph([table, index], b.map("neg", rows_of(b, table, index)))).kernels
        assert bytes_of([table], [p.trace for p in kernel.phases]) == pytest.approx(1000 * fetched * 4, rel=1e-3)


def test_a_table_that_is_read_otherwise_too_counts_whole() -> None:
    b = Builder()
    table, index = arg(b, 0, 512, 128), arg(b, 1, 512, dtype=I64)
    made = graph([table, index], b.map("mul", rows_of(b, table, index), b.map("exp", table)))
    (kernel,) = step_of(made).kernels
    assert bytes_of([table], [p.trace for p in kernel.phases]) == 512 * 128 * 4


@pytest.mark.parametrize(("count", "stored"), [(20, False), (2000, True)])
def test_a_computed_table_gets_memory_where_more_is_read_than_there_is(count: int, stored: bool) -> None:
    b = Builder()
    x, index = arg(b, 0, 100, 64), arg(b, 1, count, dtype=I64)
    table = b.map("exp", x)
    made = graph([x, index], b.map("neg", rows_of(b, table, index)))
    assert (table in choose_anchors(made, {}).nodes) == stored
    assert len(cover_of(made).nests) == 1 + stored


def test_casts_and_gathers_of_a_table_never_get_memory() -> None:
    b = Builder()
    x, index = arg(b, 0, 100, 64), arg(b, 1, 2000, dtype=I64)
    made = graph([x, index], rows_of(b, rows_of(b, b.cast(x, DType.BF16), index), index))
    assert choose_anchors(made, {}).nodes == {made.outputs[0].args[0]}  # type: ignore[union-attr]


def test_what_cannot_be_read_by_index_gets_memory_at_the_start() -> None:
    b = Builder()
    x, y, index = arg(b, 0, 100, 64), arg(b, 1, 50, 64), arg(b, 2, 7, dtype=I64)
    table = b.concat([x, b.map("neg", y)], 0)
    made = graph([x, y, index], b.map("exp", rows_of(b, table, index)))
    assert any(table in {r.anchor.node for r in nest.roots} for nest in cover_of(made).nests)


def test_statistics_of_rows_are_read_by_index_beside_their_rows() -> None:
    """A norm of which few rows are read: its sums have memory, its rows are computed where they are read."""
    b = Builder()
    x, index = arg(b, 0, 4096, 128), arg(b, 1, 16, dtype=I64)
    made = graph([x, index], rows_of(b, norm(b, x), index))
    cover = cover_of(made)
    (stored,) = (r.anchor.node for n in cover.nests for r in n.roots if r.anchor.node.is_a(Reduce))
    step = step_of(made)
    assert len([c for c in step.forward if isinstance(c, Launch)]) == 2
    last = next(k for k in step.kernels if step.names[stored] not in k.writes)
    reads = read_bytes(last.phases[0].trace)
    assert reads[x] == 16 * 128 * 4 and reads[stored] == 16 * 32  # a number in a sector


def test_the_reason_why_a_table_and_its_reader_are_two_nests() -> None:
    b = Builder()
    x, index = arg(b, 0, 512, 64), arg(b, 1, 512, dtype=I64)
    table = b.map("exp", x)
    made = graph([x, index], table, b.map("neg", rows_of(b, table, index)))
    cover = cover_of(made)
    assert len(cover.nests) == 2
    (boundary,) = cover.boundaries
    assert "read along other axes by one than by the other" in boundary.reason
