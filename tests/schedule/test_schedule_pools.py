"""Which buffers share an allocation, and where they lie in it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megafuse.compiler import compile_call
from megafuse.core.device import device_spec
from megafuse.core.dtypes import DType
from megafuse.schedule.pools import ALIGNMENT, LIMIT, TWIN_LIMIT, with_pools
from megafuse.schedule.types import Alloc, Buffer, DotCall, Free, KernelSchedule, Launch, OpaqueCall, Step, View
from megafuse.workloads.rank_mixer_block import RankMixerBlock

F32, BF16 = DType.F32, DType.BF16


def made(*buffers: Buffer, forward=(), backward=(), writes=(), outputs=(), grads=()) -> Step:
    kernel = KernelSchedule("k", (), (), tuple(writes), num_warps=4, num_stages=1, dram_bytes=0)
    allocs = tuple(Alloc(b.name) for b in buffers if b.kind != "input")
    saved = tuple(b.name for b in buffers if b.kind == "saved")
    return with_pools(Step(buffers, (kernel,), (*allocs, *forward), tuple(backward), outputs, grads, saved))


def buffer(name: str, n: int, kind: str = "temp", dtype: DType = F32) -> Buffer:
    return Buffer(name, (n,), (1,), dtype, kind)


def test_small_temporaries_share_a_pool_in_aligned_places() -> None:
    (pool,) = made(buffer("a", 33), buffer("b", 5), buffer("c", 64, dtype=BF16)).pools
    assert pool.kind == "forward"
    assert pool.places == {"b": 0, "c": 128, "a": 256}
    assert pool.nbytes == 512
    assert made(buffer("a", 33)).pools == (), "nothing is gained by a pool of one"


def test_the_smallest_come_first_up_to_the_limit() -> None:
    half = LIMIT // 8
    dying = [part for n in ("x", "y", "big") for part in (Launch(0, (n,)), Free(n))]
    buffers = buffer("big", half + 1), buffer("x", half), buffer("y", half), buffer("empty", 0)
    (pool,) = made(*buffers, forward=dying).pools
    assert sorted(pool.places) == ["x", "y"]
    assert pool.nbytes == LIMIT


def test_large_ones_that_live_between_the_same_calls_share_one() -> None:
    large = LIMIT // 4 + 1
    names = ("x", "y", "z", "later", "small", "small2")
    call = Launch(0, names)
    dying = [call, Free("x"), Free("y"), Free("z"), Free("small"), call, Free("later"), Free("small2")]
    buffers = [buffer(n, 1 if n.startswith("small") else large) for n in names]
    (pool,) = made(*buffers, forward=dying).pools
    assert sorted(pool.places) == ["small", "x", "y", "z"]
    assert pool.nbytes == 3 * (4 * large + ALIGNMENT - 4) + ALIGNMENT
    third = [buffer(n, 1 if n.startswith("small") else TWIN_LIMIT // 12) for n in ("x", "y", "z", "small")]
    (pool,) = made(*third, forward=dying).pools
    assert sorted(pool.places) == ["small", "x", "y"], "as many as the limit allows"


def test_what_others_touch_or_see_stays_an_allocation_of_its_own() -> None:
    names = ("dot_in", "dot_out", "bias", "opaque_in", "output", "plain", "plain2")
    views = {n: View(n, (1, 8, 8), (64, 8, 1)) for n in names}
    calls = [DotCall(views["dot_out"], views["dot_in"], views["dot_in"], View("bias", (8,), (1,))),
             OpaqueCall(0, (views["opaque_in"],), ("made",))]  # fmt: skip
    step = made(*(buffer(n, 64) for n in names), forward=calls, outputs=(View("output", (64,), (1,)),))
    (pool,) = step.pools
    assert sorted(pool.places) == ["plain", "plain2"]


def test_saved_buffers_share_one_unless_backward_writes_or_returns_them() -> None:
    names = ("p", "q", "over", "grad", "read_by_dot")
    view = View("read_by_dot", (1, 8, 8), (64, 8, 1))
    step = made(
        *(buffer(n, 64, "saved") for n in names),
        backward=(Launch(0, ("p", "q", "over")), DotCall(View("p2", (1, 8, 8), (64, 8, 1)), view, view)),
        writes=("over",),
        grads=(View("grad", (64,), (1,)),),
    )
    (pool,) = step.pools
    assert (pool.kind, sorted(pool.places)) == ("saved", ["p", "q"])


@pytest.mark.parametrize("shape", [(4, 8, 64), (3, 6, 42)])
def test_places_of_a_step_never_overlap(shape: tuple[int, int, int]) -> None:
    batch, tokens, dim = shape
    module = RankMixerBlock(tokens, dim, 2).bfloat16()
    x = torch.randn(batch, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    step = compile_call(module, (x,), {}, device_spec(90)).step
    assert {p.kind for p in step.pools} >= {"backward", "saved"}
    buffers = {b.name: b for b in step.buffers}
    for pool in step.pools:
        spans = []
        for name, start in pool.places.items():
            b = buffers[name]
            last = sum((n - 1) * s for n, s in zip(b.shape, b.strides, strict=True))
            spans.append((start, start + (last + 1) * b.dtype.size))
            assert start % ALIGNMENT == 0
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert spans[-1][1] <= pool.nbytes <= LIMIT
    saved = next(p for p in step.pools if p.kind == "saved")
    assert set(saved.places) <= set(step.saved)
