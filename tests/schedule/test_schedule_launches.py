"""Small kernels share a launch: which do, and that what they come to can run."""

from __future__ import annotations

import random

import pytest

from megafuse.codegen.lower import lower_kernel
from megafuse.compiler.variants import subjects
from megafuse.core.dtypes import DType
from megafuse.core.sizes import Dim, open_size
from megafuse.ir.graph import Builder, Graph, Node
from megafuse.schedule import launches
from megafuse.schedule.types import Alloc, DotCall, Free, KernelSchedule, Launch, Step
from schedule_graphs import arg, graph, norm, step_of


def norms(*shapes: tuple[int, ...]) -> Graph:
    """Independent norms, one for each shape."""
    b = Builder()
    inputs = [arg(b, n, *shape) for n, shape in enumerate(shapes)]
    return graph(inputs, *(norm(b, x) for x in inputs))


def parts(step: Step) -> list[int]:
    """How many small kernels each launch stands for."""
    return [len(k.phases) if k.apart else 1 for k in step.kernels]


def check_order(step: Step) -> None:
    """Every call finds its operands made, and every buffer is written."""
    alive = {b.name for b in step.buffers if b.kind in ("input", "tangent")}
    written = set(alive)
    for call in (*step.forward, *step.backward):
        match call:
            case Alloc(buffer):
                alive.add(buffer)
            case Free(buffer):
                alive.discard(buffer)
            case Launch(kernel, args):
                assert set(args) <= alive
                assert set(step.kernels[kernel].reads) <= written
                written |= set(step.kernels[kernel].writes)
            case DotCall(out, a, c):
                assert {out.buffer, a.buffer, c.buffer} <= alive
                assert {a.buffer, c.buffer} <= written
                written.add(out.buffer)
    assert written == {b.name for b in step.buffers}


def lowered(kernel: KernelSchedule, step: Step) -> tuple[tuple[int, int], list[int]]:
    """The grid of a shared kernel, and the programs of each part."""
    program = lower_kernel(kernel, {b.name: b for b in step.buffers}, step.names)
    return program.grid, [part.grid[0] * part.grid[1] for part in program.parts]  # type: ignore[union-attr]


def test_norms_of_different_sizes_share_a_launch() -> None:
    step = step_of(norms((64, 128), (32, 256), (17, 40), (1, 5)))
    assert parts(step) == [4]
    grid, own = lowered(step.kernels[0], step)
    assert grid == (sum(own), 1)
    assert all(own)
    check_order(step)


@pytest.mark.parametrize("rows", [8192, 8209])
def test_large_kernels_keep_launches_of_their_own(rows: int) -> None:
    assert parts(step_of(norms((rows, 1280), (rows, 1280)))) == [1, 1]
    assert sorted(parts(step_of(norms((rows, 1280), (64, 40), (64, 40))))) == [1, 2]


def test_much_arithmetic_on_little_memory_is_no_small_kernel() -> None:
    b = Builder()
    xs = [arg(b, n, 4096) for n in range(4)]

    def distances(x: Node, y: Node) -> Node:
        shape = (4096, 4096)
        across = b.expand(b.reshape(x, (4096, 1)), shape)
        along = b.expand(b.reshape(y, (1, 4096)), shape)
        return b.reduce("sum", b.map("exp", b.map("sub", across, along)), [1])

    assert parts(step_of(graph(xs, distances(*xs[:2]), distances(*xs[2:])))) == [1, 1]


def test_what_a_library_call_stands_between_keeps_its_launch() -> None:
    """norm -> dot -> norm, and a third norm that is independent of all: it goes with one of them."""
    b = Builder()
    x, w, other = arg(b, 0, 1, 64, 128), arg(b, 1, 1, 128, 4096), arg(b, 2, 40, 56)
    step = step_of(graph([x, w, other], norm(b, b.dot(norm(b, x), w, DType.F32)), norm(b, other)))
    assert sorted(parts(step)) == [1, 2]
    check_order(step)


def test_a_launch_has_so_many_parts_buffers_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    many = launches.MOST_PARTS + 8
    assert parts(step_of(norms(*[(16, 16 + n) for n in range(many)]))) == [launches.MOST_PARTS, 8]
    assert parts(step_of(norms(*[(2048, 256)] * 9))) == [8, 1]  # 2 MiB written by each
    monkeypatch.setattr(launches, "MOST_BUFFERS", 6)
    assert parts(step_of(norms(*[(16, 16 + n) for n in range(5)]))) == [3, 2]


def test_directions_do_not_mix() -> None:
    b = Builder()
    x, tangent = arg(b, 0, 64, 40), arg(b, 1, 32, 56, role="tangent")
    step = step_of(Graph((x, tangent), (norm(b, x), norm(b, tangent)), 1, (0,)))
    assert parts(step) == [1, 1]
    assert len([c for c in step.forward if isinstance(c, Launch)]) == 1


def sums(rows: int, cols: int, count: int) -> Graph:
    """Independent norms, and column sums of them that leave partial sums."""
    b = Builder()
    xs = [arg(b, n, rows, cols + n) for n in range(count)]
    made = [norm(b, x) for x in xs]
    return graph(xs, *made, *(b.reduce("sum", y, [0]) for y in made))


def test_finishers_share_a_launch_where_their_kernels_do() -> None:
    step = step_of(sums(2048, 64, 3))
    assert parts(step) == [3, 3]
    assert not subjects(step)  # a launch that is shared is not tuned
    check_order(step)


def test_finishers_of_kernels_that_are_tuned_share_a_launch_but_to_be_measured() -> None:
    made = sums(65536, 256, 2)
    step = step_of(made)
    assert parts(step) == [1, 1, 2]
    check_order(step)
    alone = step_of(made, finishers_alone=True)
    assert parts(alone) == [1, 1, 1, 1]
    keys = {k.key for k in step.kernels if k.key}
    assert {s.key for s in subjects(step)} == keys
    assert {k.finishes for k in alone.kernels if k.finishes} == keys == {k.key for k in alone.kernels if not k.finishes}


def test_large_finishers_share_a_launch_up_to_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a shared kernel are kernels like others where they do not fit."""
    small = launches.is_small
    monkeypatch.setattr(
        launches, "is_small", lambda w, kernel, device: not kernel.finishes and small(w, kernel, device)
    )
    assert parts(step_of(sums(2048, 64, 2))) == [2, 2]
    monkeypatch.setattr(launches, "MOST_SUMMED", 0)
    step = step_of(sums(2048, 64, 2))
    assert parts(step) == [2, 1, 1]
    assert all(k.key and not k.finishes for k in step.kernels[1:])


def test_open_sizes_keep_launches_of_their_own() -> None:
    n = open_size(Dim("n", 64))
    assert parts(step_of(norms((n, 128), (n, 40)))) == [1, 1]
    assert sorted(parts(step_of(norms((n, 128), (n, 40), (16, 40), (8, 24))))) == [1, 1, 2]


@pytest.mark.parametrize("seed", range(30))
def test_shared_launches_can_be_put_in_order(seed: int) -> None:
    """Random graphs of small norms, sums and products whose kernels depend on one another in all ways."""
    rng = random.Random(seed)
    b = Builder()
    xs = [arg(b, n, 1, 32, rng.choice((16, 24))) for n in range(3)]
    ws = {k: arg(b, 3 + k, 1, k, 16, role="param") for k in (16, 24)}
    values = list(xs)
    for _ in range(12):
        x = rng.choice(values)
        values.append(
            rng.choice((lambda v: norm(b, v), lambda v: b.dot(v, ws[v.shape[2]], DType.F32), lambda v: column(b, v)))(x)
        )
    step = step_of(graph([*xs, *ws.values()], *values[3:]))
    check_order(step)


def column(b: Builder, x: Node) -> Node:
    """``x`` over its column sums: readers wait for all rows."""
    total = b.map("add", b.reduce("sum", b.map("mul", x, x), [1], keepdim=True), 1.0)
    return b.map("div", x, b.expand(total, x.shape))
