"""Tables read by index inside kernels on a GPU: right by the rule, out of range, and beyond 2^31 elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafuse
from megafuse.api import engine_of
from megafuse.validate import CheckOptions, check

pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
OPTIONS = CheckOptions(seeds=2, small_seeds=1, repeats=2)


def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers from ``low`` to ``high`` - 1, with repeats."""
    return torch.randint(low, high, shape, dtype=dtype, device="cuda")


class Prologue(nn.Module):
    """A table, positions, a scale, a norm."""

    def __init__(self, rows: int, tokens: int, dim: int) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(rows, dim, padding_idx=0), nn.LayerNorm(dim)
        self.position = nn.Parameter(torch.randn(tokens, dim))

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.table(ids) * 3 + self.position)


# (rows of the table, tokens, width, batch): whole and odd tiles, single columns, rows wider than a tile
SHAPES = [(1000, 16, 256, 64), (50000, 64, 1280, 32), (11, 3, 77, 5), (7, 5, 1, 9), (300, 2, 20000, 7), (1, 1, 33, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=["i64", "i32"])
def test_table_scale_sum_and_norm(shape: tuple[int, ...], dtype: str, kind: torch.dtype) -> None:
    rows, tokens, dim, batch = shape
    torch.manual_seed(0)
    module, ids = Prologue(rows, tokens, dim).to("cuda", DTYPES[dtype]), ints(0, rows, batch, tokens, dtype=kind)
    assert_right(module, ids)


def bag(w: Tensor, i: Tensor, scale: Tensor) -> Tensor:
    """Rows of a table, weighted and added up."""
    return F.layer_norm((F.embedding(i, w) * scale[..., None]).sum(1), w.shape[1:])


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "bag": (lambda w, s, i: bag(w, i, s), [(5000, 64), (512, 20)], [(0, 5000, 512, 20)]),
    "columns": (lambda x, i, j: F.silu(x[:, i, j]), [(700, 27, 27)], [(-27, 27, 351), (-27, 27, 351)]),
    "apart": (lambda x, i, j: F.silu(x[i, :, j]), [(70, 33, 27)], [(-70, 70, 100), (-27, 27, 100)]),
    "of_a_computed_value": (lambda x, i: F.silu(x * x.sigmoid())[i], [(50, 99)], [(-50, 50, 3000)]),
    "few_of_a_computed_value": (lambda x, i: F.silu(x * x.sigmoid())[i], [(3000, 99)], [(-3000, 3000, 50)]),
    "of_a_concat": (lambda x, y, i: torch.cat([x, y])[i] * 2, [(60, 99), (40, 99)], [(-100, 100, 3000)]),
    "of_a_product": (lambda x, w, i: F.gelu(x @ w)[:, i], [(300, 64), (64, 96)], [(-96, 96, 40)]),
    "into_a_product": (lambda x, w, i: F.relu(x[i] * 2) @ w, [(900, 64), (64, 96)], [(-900, 900, 512)]),
    "read_through_a_concat": (
        lambda x, w, i: F.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0] * F.embedding(i, w),
        [(64, 16, 64), (9, 32)],
        [(0, 9, 64, 16)],
    ),
    "bias_by_distance": (
        lambda x, t, i: (x + t[i].permute(2, 0, 1)).softmax(-1),
        [(8, 4, 49, 49), (169, 4)],
        [(0, 169, 49, 49)],
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, dtype: str) -> None:
    fn, shapes, indices = FUNCTIONS[name]
    torch.manual_seed(0)
    tensors = [torch.randn(s, device="cuda").div_(2).to(DTYPES[dtype]).requires_grad_() for s in shapes]
    assert_right(fn, *tensors, *(ints(*index) for index in indices))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_in_no_fixed_order_are_right_too(dtype: str) -> None:
    """``index_add`` and ``scatter_add`` are PyTorch's: right by the rule, and repeatable where that is asked for."""
    torch.manual_seed(0)
    x = torch.randn(300, 100, device="cuda").to(DTYPES[dtype]).requires_grad_()

    def fn(x: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x.index_select(1, i)), torch.tanh(x.gather(1, j))

    args = (x, ints(0, 100, 40), ints(0, 100, 300, 40))
    torch.use_deterministic_algorithms(True)
    try:
        assert_right(fn, *args)
    finally:
        torch.use_deterministic_algorithms(False)


def assert_right(fn: Callable[..., Any], *args: Tensor) -> None:
    """Kernels were generated, gathers are none of the library's, results are right by the rule."""
    fused = megafuse.fuse(fn, *args, target="cuda")
    (bound,) = engine_of(fused).bindings
    assert bound.compiled is not None and bound.compiled.step.kernels
    assert all(e.reason.startswith("scatters by index") for e in bound.compiled.captured.support.opaque)
    report = check(fn, *args, fused=fused, options=OPTIONS)
    assert not report.determinism, report.determinism
    report.raise_if_failed()


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_range_is_nan_and_the_device_goes_on(dtype: str) -> None:
    table = torch.randn(700, 50, device="cuda", dtype=DTYPES[dtype])
    good = ints(0, 700, 4096)
    fused = megafuse.fuse(lambda w, i: F.embedding(i, w) * 2, table, good, target="cuda")
    for bad in (-1, 700, 2**40, -(2**62)):
        asked = good.clone()
        asked[::7] = bad
        got = fused(table, asked)
        torch.cuda.synchronize()
        assert bool(got[::7].isnan().all())
        rest = torch.arange(4096, device="cuda") % 7 != 0
        assert torch.equal(got[rest], table[good[rest]] * 2)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=["i64", "i32"])
def test_a_table_beyond_2_to_the_31_elements(kind: torch.dtype) -> None:
    """Rows at both ends; the table holds its row numbers, and no gradient is asked for."""
    dim = 64
    rows = 2**31 // dim + 1000
    if torch.cuda.mem_get_info()[0] < 3 * rows * dim:
        pytest.skip("needs 6.5 GB of free memory")
    table = torch.empty(rows, dim, dtype=torch.uint8, device="cuda")
    for byte in range(4):
        table[:, byte] = (torch.arange(rows, device="cuda") >> (8 * byte)) & 255
    ids = torch.cat([ints(0, rows, 2000, dtype=kind), torch.arange(rows - 50, rows, dtype=kind, device="cuda")])
    weight = torch.ones(dim, device="cuda")

    def fn(t: Tensor, i: Tensor, w: Tensor) -> Tensor:
        return t[i].float() * w

    fused = megafuse.fuse(fn, table, ids, weight, target="cuda")
    got = fused(table, ids, weight).long()
    assert torch.equal(sum(got[:, byte] << (8 * byte) for byte in range(4)), ids.long())


def test_other_batches_share_a_program() -> None:
    torch.manual_seed(0)
    module = Prologue(5000, 16, 256).to("cuda", torch.bfloat16)
    fused = megafuse.fuse(module, ints(0, 5000, 64, 16), target="cuda")
    for batch in (64, 100, 333, 1024, 7):
        check(module, ints(0, 5000, batch, 16), fused=fused, options=OPTIONS).raise_if_failed()
    assert engine_of(fused).generations <= 3


def test_replayed_as_a_cuda_graph() -> None:
    torch.manual_seed(0)
    module, ids = Prologue(5000, 16, 256).to("cuda", torch.bfloat16), ints(0, 5000, 64, 16)
    fused = megafuse.fuse(module, ids, target="cuda", cuda_graph=True)
    for _ in range(3):
        other = ints(0, 5000, 64, 16)
        torch.testing.assert_close(fused(other), module(other), rtol=2e-2, atol=2e-2)
    check(module, ids, fused=fused, options=OPTIONS).raise_if_failed()


@pytest.mark.parametrize("padding", [None, 7])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("count", [7, 5000])
def test_gradients_of_tables_skip_what_is_out_of_range(count: int, by_frequency: bool, padding: int | None) -> None:
    """PyTorch's kernels (one for few ids, one for many) write wherever an id says."""
    torch.manual_seed(0)
    table = nn.Embedding(50, 32, padding_idx=padding, scale_grad_by_freq=by_frequency, device="cuda")
    module = nn.Sequential(table, nn.Tanh())
    ids = ints(0, 50, count)
    fused = megafuse.fuse(module, ids)
    bad = ids.clone()
    bad[1], bad[3], bad[5] = 50, -1, 10**6
    good = torch.tensor([n for n in range(count) if n not in (1, 3, 5)], device="cuda")
    fused(bad)[good].sum().backward()
    found = table.weight.grad.clone()
    table.weight.grad = None
    module(bad[good]).sum().backward()
    torch.testing.assert_close(found, table.weight.grad)
