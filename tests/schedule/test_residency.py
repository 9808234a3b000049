"""Walks that several programs share, so that what a gather fetches is still in the L2 cache when it is wanted again."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megafuse.core.device import DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Graph
from megafuse.schedule.residency import BLOCK_SHARE, row_bytes, sharers, short_run_axis
from megafuse.schedule.step import build_step
from megafuse.schedule.types import PhaseSchedule
from schedule_graphs import DEVICE, arg, cover_of, graph, mixed, norm


def gathered(batch: int, tokens: int, dim: int, *, sums: bool) -> Graph:
    """A norm of mixed tokens beside them; with ``sums`` the gradient of a gain over all rows too."""
    b = Builder()
    x = arg(b, 0, batch, tokens, dim, dtype=DType.F32)
    moved = mixed(b, x)
    out = norm(b, b.map("add", moved, x))
    outputs = [out, b.reduce("sum", b.map("mul", out, moved), [0, 1])] if sums else [out]
    return graph([x], *outputs)


def gathering(made: Graph, device: DeviceSpec = DEVICE) -> PhaseSchedule:
    """The phase that reads mixed tokens."""
    step = build_step(cover_of(made), device)
    phases = [p for k in step.kernels for p in k.phases if any(len(i.index) == 3 for i in p.trace.loads())]
    (phase,) = [p for p in phases if sum(i.node.type.rank == 3 for i in p.trace.loads()) > 1]
    return phase


def programs(phase: PhaseSchedule) -> int:
    loop = math.prod(a.size for a in phase.loop)
    return math.prod(a.size for a in phase.fixed) * math.ceil(loop / phase.tile.rows_per_chunk)


@pytest.mark.parametrize("tokens", [48, 63, 64])
def test_programs_with_column_sums_take_some_rows_of_every_block(tokens: int) -> None:
    phase = gathering(gathered(4096, tokens, 20 * tokens, sums=True))
    (shared,) = phase.fixed
    assert shared.size > 1 and tokens % shared.size == 0
    rows = tokens // shared.size  # of a block, for one program
    assert [a.size for a in phase.loop] == [4096, rows]
    assert phase.tile.rows_per_chunk > rows  # programs go on to further blocks: partial sums stay few
    block = tokens * row_bytes(phase.trace)
    assert block * programs(phase) / shared.size <= DEVICE.l2_bytes or shared.size == tokens


def test_blocks_that_fit_the_cache_are_not_shared() -> None:
    assert gathering(gathered(8, 64, 1280, sums=True)).fixed == ()


def test_plain_rows_are_not_shared() -> None:
    b = Builder()
    x, g = arg(b, 0, 1024, 64, 1280), arg(b, 1, 1024, 64, 1280)
    out = norm(b, x)
    step = build_step(cover_of(graph([x, g], out, b.reduce("sum", b.map("mul", out, g), [0, 1]))), DEVICE)
    assert all(p.fixed == () for k in step.kernels for p in k.phases)


@pytest.mark.parametrize("cache", [2**16, 2**20, 2**24, 2**28])
def test_the_smaller_the_cache_the_more_share(cache: int) -> None:
    trace = gathering(gathered(8, 48, 960, sums=True)).trace
    axis = short_run_axis(trace, trace.nest.space.row_names, lambda n: (48 * 960, 960, 1)[3 - n.type.rank :])
    assert axis is not None
    size = trace.nest.space.sizes[axis]
    number = sharers(trace, axis, 4, replace(DEVICE, l2_bytes=cache))
    wanted = min(4, trace.nest.space.num_rows // size) * size * row_bytes(trace) / (BLOCK_SHARE * cache)
    assert size % number == 0
    assert number == size or number >= wanted
    assert not any(size % n == 0 for n in range(math.ceil(wanted), number))  # no fewer would do
    assert size // sharers(trace, axis, 4, replace(DEVICE, l2_bytes=cache), least=7) >= 7
