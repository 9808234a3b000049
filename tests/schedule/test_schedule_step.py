"""Tiles, partials and their finishers, order of calls and life of buffers; generated texts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megafuse.codegen.host import print_host
from megafuse.codegen.lower import lower_kernel
from megafuse.codegen.triton import print_kernel
from megafuse.compiler.driver import compile_call
from megafuse.core.device import device_spec
from megafuse.core.dtypes import DType
from megafuse.fusion.initial import initial_nests
from megafuse.ir.graph import Builder, Graph
from megafuse.ir.index import Axis
from megafuse.ir.nest import Anchor
from megafuse.schedule.naming import Names
from megafuse.schedule.order import Work, order_work
from megafuse.schedule.partials import make_partial
from megafuse.schedule.tiling import next_power_of_two, split_columns
from megafuse.schedule.types import Alloc, DotCall, Free, Launch, Step
from schedule_graphs import arg, graph, mixed, norm, step_of

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


# --- tiles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n", [*range(1, 300, 7), 512, 640, 768, 1024, 1040, 1197, 1280, 1536, 2560, 2561, 3840, 5000, 8192]
)
def test_pieces_cover_the_columns(n: int) -> None:
    pieces = split_columns(n)
    assert all(p == next_power_of_two(p) for p in pieces)
    assert n <= sum(pieces) <= next_power_of_two(n)
    assert sum(pieces[:-1]) < n
    assert list(pieces) == sorted(pieces, reverse=True)


@pytest.mark.parametrize(("n", "padded"), [(1280, 1280), (2560, 2560), (1536, 1536), (1024, 1024), (1197, 1280)])
def test_widths_that_are_no_powers_of_two_are_not_padded_to_double(n: int, padded: int) -> None:
    assert sum(split_columns(n)) <= padded


# --- partials ---------------------------------------------------------------------------------------------------------


def test_one_program_needs_no_partials() -> None:
    b = Builder()
    nest = initial_nests(Anchor(b.reduce("sum", arg(b, 0, 64, 128), [0])), "n")[0]
    assert make_partial(nest.roots[0], (), 1, "p", 100) is None


def test_partials_lie_by_fixed_axis_then_chunk() -> None:
    b = Builder()
    nest = initial_nests(Anchor(b.reduce("sum", arg(b, 0, 64, 8, 128), [0, 1])), "n")[0]
    partial = make_partial(nest.roots[0], (Axis("n1", 8),), 5, "p", 100)
    assert partial is not None
    assert partial.node.shape == (8, 5, 128)
    assert partial.total.shape == (128,)
    assert [ix.terms for ix in partial.index] == [(("n1", 1),), (("chunk", 1),), (("n2", 1),)]


def colsum_step(rows: int = 65536) -> Step:
    """A column sum of a map, with a map of the sum."""
    b = Builder()
    x = arg(b, 0, rows, 256)
    return step_of(graph([x], b.map("exp", x), b.map("sqrt", b.map("abs", b.reduce("sum", b.map("exp", x), [0])))))


def test_a_column_sum_rides_along_and_its_follower_sums_the_partials() -> None:
    step = colsum_step()
    assert len(step.kernels) == 2
    first, finisher = step.kernels
    (partial,) = [b for b in step.buffers if b.name.startswith("partial")]
    assert partial.kind == "temp"
    assert partial.name in first.writes
    assert finisher.reads == (partial.name,)
    assert math.prod(partial.shape) * 8 <= 65536 * 256


def test_followers_stay_in_their_own_direction() -> None:
    """A value of backward that reads a forward column sum is no follower of its forward finisher."""
    b = Builder()
    x, tangent = arg(b, 0, 4096, 256), arg(b, 1, 256, role="tangent")
    total = b.reduce("sum", b.map("exp", x), [0])
    made = Graph((x, tangent), (b.map("sin", total), b.map("mul", total, tangent)), 1, (0,))
    step = step_of(made)
    forward = {c.kernel for c in step.forward if isinstance(c, Launch)}
    backward = {c.kernel for c in step.backward if isinstance(c, Launch)}
    assert forward
    assert backward
    assert not forward & backward


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [1024, 2560])
def test_a_pipelined_walk_without_column_sums_takes_two_rows_at_a_time(hidden: int) -> None:
    """Two norms of each row, with a bias for each of 16 positions, which programs keep while they walk."""

    def gated(z: Tensor, bias: Tensor, *norms: Tensor) -> Tensor:
        u, gate = (z + bias[:, None]).chunk(2, -1)
        normed = functional.layer_norm(u, (hidden,), *norms[:2])
        return normed * functional.silu(functional.layer_norm(gate, (hidden,), *norms[2:]))

    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    args = (tensor(16, 4096, 2 * hidden), tensor(16, 2 * hidden), *(tensor(hidden) for _ in range(4)))
    step = compile_call(gated, args, {}, device_spec(90)).step
    forward, backward = (p.tile for k in step.kernels[:2] for p in k.phases)
    assert (forward.row_tile, forward.num_stages) == (2, 4)
    assert (backward.row_tile, backward.num_stages) == (1, 3), "column sums fill the registers"


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 16), (torch.float32, 8)])
def test_rows_that_are_written_as_columns_come_in_runs_of_a_sector(dtype: torch.dtype, rows: int) -> None:
    """With single rows an MLP-Mixer block took longer than eager (record workloads_20261130T014608)."""
    x = torch.empty(8, 512, 1024, dtype=dtype, device="meta")
    step = compile_call(
        lambda v: functional.layer_norm(v, (1024,)).transpose(1, 2).contiguous(), (x,), {}, device_spec(90)
    ).step
    (tile,) = (p.tile for k in step.kernels for p in k.phases)
    assert tile.row_tile == rows


def peak(step: Step) -> int:
    """Most bytes of the step's own buffers alive at once in forward."""
    sizes = {b.name: math.prod(b.shape) * b.dtype.size for b in step.buffers}
    now = most = 0
    for call in step.forward:
        if isinstance(call, Alloc):
            now += sizes[call.buffer]
        elif isinstance(call, Free) and call.buffer in sizes:
            now -= sizes[call.buffer]
        most = max(most, now)
    return most


def test_branches_do_not_pile_up_their_temporaries() -> None:
    """Four branches, each with a wide temporary: one of them is alive at a time."""
    b = Builder()
    x = arg(b, 0, 1, 128, 64)
    weights = [arg(b, 1 + i, 1, 64, 1024) for i in range(4)]
    backs = [arg(b, 5 + i, 1, 1024, 64) for i in range(4)]
    outs = [b.dot(b.dot(x, w, DType.F32), v, DType.F32) for w, v in zip(weights, backs, strict=True)]
    step = step_of(graph([x, *weights, *backs], *outs))
    assert peak(step) <= 128 * 1024 * 4 + 4 * 128 * 64 * 4


def test_every_buffer_is_allocated_before_use_and_freed_after() -> None:
    step = colsum_step()
    alive = {b.name for b in step.buffers if b.kind in ("input", "tangent")}
    for call in (*step.forward, *step.backward):
        match call:
            case Alloc(buffer):
                alive.add(buffer)
            case Free(buffer):
                alive.discard(buffer)
            case Launch(_, args):
                assert set(args) <= alive
            case DotCall(out, a, c):
                assert {out.buffer, a.buffer, c.buffer} <= alive
    assert alive == {b.name for b in step.buffers if b.kind in ("input", "output")}


def test_order_prefers_what_frees_most() -> None:
    b = Builder()
    x = arg(b, 0, 4)
    big, small = b.map("exp", x), b.map("sin", x)
    end_big, end_small = b.map("neg", big), b.map("neg", small)
    works = [Work((x,), (n,), True) for n in (big, small)]
    works += [Work((n,), (e,), True) for n, e in ((small, end_small), (big, end_big))]
    sizes = {x: 0, big: 1000, small: 10, end_big: 1, end_small: 1}
    order = [w.writes[0] for w in order_work(works, frozenset({x}), sizes)]
    assert order.index(end_small) < order.index(big)


def test_a_circle_is_noticed() -> None:
    b = Builder()
    x, y = arg(b, 0, 4), arg(b, 1, 4)
    with pytest.raises(AssertionError, match="circle"):
        order_work([Work((x,), (y,), True), Work((y,), (x,), True)], frozenset(), {x: 1, y: 1})


def test_names_are_identifiers_and_differ() -> None:
    b = Builder()
    x = arg(b, 0, 4)
    names = Names(frozenset({x}))
    found = [names.name(n) for n in (x, b.map("exp", x), b.map("exp", b.map("exp", x)), b.reduce("sum", x, [0]))]
    assert len(set(found)) == 4
    assert all(f.isidentifier() for f in found)


# --- texts ------------------------------------------------------------------------------------------------------------


def texts() -> dict[str, str]:
    """Kernels and launch code of two small steps."""
    b = Builder()
    x = arg(b, 0, 96, 8, 64, dtype=DType.BF16)
    w = arg(b, 1, 8, 64, 32, dtype=DType.BF16)
    wide = b.cast(x, DType.F32)
    y = b.cast(norm(b, b.map("add", mixed(b, wide), wide)), DType.BF16)
    step = step_of(graph([x, w], b.permute(b.dot(b.permute(y, (1, 0, 2)), w, DType.BF16), (1, 0, 2))))
    out = {"mixed_norm": step, "column_sum": colsum_step()}
    found = {}
    for name, made in out.items():
        buffers = {buffer.name: buffer for buffer in made.buffers}
        kernels = [print_kernel(lower_kernel(k, buffers, made.names)) for k in made.kernels]
        found[f"{name}_kernel.py"] = kernels[0].text
        if name == "mixed_norm":
            found[f"{name}_host.py"] = print_host(made, [k.entry for k in kernels]).text
    return found


@pytest.mark.parametrize("name", ["mixed_norm_kernel.py", "mixed_norm_host.py", "column_sum_kernel.py"])
def test_text_is_the_accepted_one(name: str) -> None:
    text, path = texts()[name], GOLDEN / name
    if os.environ.get("MEGAFUSE_ACCEPT_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text(), "accept with MEGAFUSE_ACCEPT_GOLDEN=1 after reading the difference"


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_texts_are_equal_in_every_process(seed: str) -> None:
    """Set order depends on PYTHONHASHSEED and on addresses; texts must not."""
    here = Path(__file__).resolve()
    code = "import test_schedule_step as t, json; print(json.dumps(t.texts()))"
    path = os.pathsep.join([str(here.parent), str(here.parents[2] / "src")])
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == texts()
