"""The whole pipeline on a GPU: the block at named, odd and random shapes, and every workload, by the rule."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import megafuse
from megafuse.api import engine_of
from megafuse.validate import CheckOptions, check
from megafuse.workloads import get, names

RANK_MIXER = Path(__file__).resolve().parents[2] / "rank_mixer"
if str(RANK_MIXER) not in sys.path:
    sys.path.insert(0, str(RANK_MIXER))

from rank_mixer_src.block import RankMixerBlock  # noqa: E402

pytestmark = pytest.mark.gpu

Shape = tuple[int, int, int, int]  # B, T, D, k
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES: tuple[Shape, ...] = (
    (4, 16, 128, 2), (1, 8, 64, 2), (7, 12, 96, 3), (33, 24, 264, 2), (129, 16, 1040, 2),
    (64, 64, 64, 3), (3, 40, 1280, 3), (1024, 8, 1280, 2),
    (256, 32, 512, 2), (1024, 16, 256, 2), (1024, 64, 1280, 2), (1024, 64, 1280, 3),
    (5, 9, 81, 3), (17, 11, 77, 2), (2, 63, 1197, 3),
)  # fmt: skip
DRAWN = 40
MOST_ELEMENTS = 8 * 2**20  # B * T * D of a drawn shape: the oracle holds some hundred bytes an element and factor of k
DRAW = int(os.environ.get("MEGAFUSE_SHAPE_SEED") or random.SystemRandom().randrange(2**31))
LARGE = 4 * 2**20


def drawn_shapes(seed: int) -> list[Shape]:
    """Shapes from the workload's ranges: 1<=B<=1024, 8<=T<=64, 64<=D<=1280 with D % T == 0, k in {2, 3}."""
    rng = random.Random(seed)
    found: list[Shape] = []
    while len(found) < DRAWN:
        tokens = rng.randint(8, 64)
        dim = tokens * rng.randint(-(-64 // tokens), 1280 // tokens)
        most = min(1024, MOST_ELEMENTS // (tokens * dim))
        found.append((rng.randint(1, most), tokens, dim, rng.choice([2, 3])))
    return found


@functools.lru_cache(maxsize=1)
def shapes_of_this_run() -> list[Shape]:
    """Drawn when first asked for, and printed: ids of tests must be equal in all processes, shapes need not be."""
    print(f"shapes drawn by MEGAFUSE_SHAPE_SEED={DRAW}")
    return drawn_shapes(DRAW)


def options(elements: int) -> CheckOptions:
    """Few draws for large tensors: one has elements enough for every statistic of the rule."""
    if elements >= LARGE:
        return CheckOptions(seeds=1, small_seeds=0, repeats=1, first_seed=1)  # odd draws have poisoned memory
    return CheckOptions(seeds=2, small_seeds=1, repeats=2)


def alone() -> FileLock:
    """One large check at a time: the oracle of one takes a good part of a GPU's memory."""
    return FileLock(Path(tempfile.gettempdir()) / "megafuse_large_check.lock")


def check_block(shape: Shape, dtype: torch.dtype) -> None:
    """The block at ``shape``: kernels were generated, results are right by the rule, repeats are bitwise equal."""
    batch, tokens, dim, k = shape
    torch.manual_seed(0)
    block = RankMixerBlock(tokens, dim, k, device="cuda", dtype=dtype)
    with torch.no_grad():
        for norm in (block.norm0, block.norm1, block.norm2):
            norm.gamma.add_(torch.randn_like(norm.gamma) * 0.1)
            norm.beta.add_(torch.randn_like(norm.beta) * 0.1)
    x = torch.randn(batch, tokens, dim, device="cuda", dtype=dtype, requires_grad=True)
    elements = max(x.numel(), block.ffn.w1.numel())
    with alone() if elements >= LARGE else contextlib.nullcontext():
        assert_right(block, (x,), options(elements))
        del block, x
        torch.cuda.empty_cache()


def assert_right(module: torch.nn.Module, inputs: tuple[Any, ...], chosen: CheckOptions) -> None:
    """Fuse, look for generated kernels, check."""
    torch.cuda.empty_cache()
    fused = megafuse.fuse(module, *inputs, target="cuda")
    (bound,) = engine_of(fused).bindings
    assert bound.compiled is not None
    assert bound.compiled.step.kernels
    report = check(module, *inputs, fused=fused, options=chosen)
    assert not report.determinism, report.determinism
    report.raise_if_failed()


@pytest.mark.timeout(900)  # large shapes wait for each other
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=["x".join(map(str, s)) for s in SHAPES])
def test_block_at_named_shapes(shape: Shape, dtype: str) -> None:
    check_block(shape, DTYPES[dtype])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(DRAWN))
def test_block_at_drawn_shapes(number: int) -> None:
    """The dtype goes round with the number."""
    shape = shapes_of_this_run()[number]
    dtype = list(DTYPES)[number % len(DTYPES)]
    print(f"shape {number} of MEGAFUSE_SHAPE_SEED={DRAW}: (B, T, D, k) = {shape} in {dtype}")
    try:
        check_block(shape, DTYPES[dtype])
    except Exception as error:
        error.args = (f"MEGAFUSE_SHAPE_SEED={DRAW}, shape {number}: {shape} in {dtype}\n{error}",)
        raise


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("size", ["small", "odd"])
@pytest.mark.parametrize("name", names())
def test_workload(name: str, size: str, dtype: str) -> None:
    """Five draws, as a user's check makes: small norms enlarge the errors of a few."""
    module, inputs = get(name).make(size, dtype=DTYPES[dtype], device="cuda")
    assert_right(module, inputs, CheckOptions(seeds=5, small_seeds=1, repeats=2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_the_block_copies_nothing(dtype: str) -> None:
    """Operands of products are read as they lie, and gradients are handed over."""
    module, (x,) = get("rank_mixer_block").make("odd", dtype=DTYPES[dtype], device="cuda")
    fused, tangent = megafuse.fuse(module, x, target="cuda"), torch.randn_like(x)

    def step() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        fused(x).backward(tangent)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    ran = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    odd = [n for n in ran if any(word in n.lower() for word in ("copy", "memcpy", "clone", "elementwise"))]
    assert ran
    assert odd == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_less_itself_is_zero(dtype: str) -> None:
    """Contracted, fma(x, w, -round(x * w)), it would be the rounding error of the product."""
    x, w = (torch.randn(999, device="cuda", dtype=DTYPES[dtype], requires_grad=True) for _ in range(2))

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x * w
        return product - product.view(-1), product + (-product)

    for out in megafuse.fuse(fn, x, w, target="cuda")(x, w):
        assert torch.equal(out, torch.zeros_like(out)) and not out.signbit().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 2), (300, 77), (64, 4096)])
def test_extremes_are_found_again_in_backward(shape: tuple[int, int], dtype: str) -> None:
    """Backward computes the values again, and must find the one that forward took for the extreme."""
    x, w, y = (torch.randn(shape, device="cuda", dtype=DTYPES[dtype], requires_grad=True) for _ in range(3))

    def fn(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = x * w + y.sigmoid() * w
        return value.amax(-1), value.amin(0)

    fused = megafuse.fuse(fn, x, w, y, target="cuda")
    check(fn, x, w, y, fused=fused, options=options(0)).raise_if_failed()


def test_a_second_batch_size_gets_its_own_binding() -> None:
    module, (x,) = get("rank_mixer_block").make("small", dtype=torch.bfloat16, device="cuda")
    fused = megafuse.fuse(module, x, target="cuda")
    other = torch.randn(11, *x.shape[1:], device="cuda", dtype=x.dtype, requires_grad=True)
    check(module, other, fused=fused, options=options(0)).raise_if_failed()
    assert len(engine_of(fused).bindings) == 2
