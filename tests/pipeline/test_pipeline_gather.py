"""Tables read by index through the whole pipeline: one pass with what follows, right by the rule, also out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafuse
from megafuse.api import engine_of
from megafuse.compiler import Compiled, compile_call
from megafuse.core.device import device_spec
from megafuse.explanation.eager import estimate_eager
from megafuse.fusion import epilogue
from megafuse.runtime.offline import compile_offline
from megafuse.schedule.types import KernelSchedule, Launch
from pipeline_helpers import check_few, compiled_of

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers from ``low`` to ``high`` - 1, with repeats, the same every time."""
    return torch.randint(low, high, shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def floats(*shape: int) -> Tensor:
    """Normal values; the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Prologue(nn.Module):
    """What stands before a network of tokens: a table, positions, a scale, a norm."""

    def __init__(self, rows: int, tokens: int, dim: int) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(rows, dim), nn.LayerNorm(dim)
        self.position = nn.Parameter(torch.randn(tokens, dim))

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.table(ids) * 3 + self.position)


class Tied(nn.Module):
    """A table that is read by index, and as the matrix of a product."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table, self.gate = nn.Embedding(rows, dim, padding_idx=1), nn.Embedding(rows, dim)

    def forward(self, ids: Tensor, other: Tensor) -> Tensor:
        h = F.silu(self.table(ids) + self.table(other)) * self.gate(ids)
        return F.rms_norm(h, h.shape[-1:]) @ self.table.weight.t()


def bag(w: Tensor, i: Tensor, scale: Tensor) -> Tensor:
    """Rows of a table, weighted and added up."""
    return F.layer_norm((F.embedding(i, w) * scale[..., None]).sum(1), w.shape[1:])


def forward_kernels(compiled: Compiled) -> list[KernelSchedule]:
    """The kernels of forward, in order."""
    return [compiled.step.kernels[c.kernel] for c in compiled.step.forward if isinstance(c, Launch)]


Case = tuple[Callable[..., Any], list[Tensor]]
CASES: dict[str, Callable[[], Case]] = {
    "bag": lambda: (bag, [floats(31, 20), ints(0, 31, 6, 5), floats(6, 5)]),
    "wide_bag": lambda: (bag, [floats(31, 20), ints(0, 31, 3, 700), floats(3, 700)]),
    "wide_rows": lambda: (lambda w, i: F.layer_norm(F.embedding(i, w), w.shape[1:]), [floats(5, 9000), ints(0, 5, 7)]),
    "one_column": lambda: (lambda w, i: torch.tanh(F.embedding(i, w)), [floats(13, 1), ints(0, 13, 17)]),
    "one_row": lambda: (lambda w, i: torch.tanh(w[i]), [floats(1, 33), ints(-1, 1, 17)]),
    "of_one": lambda: (lambda w, i: torch.tanh(F.embedding(i, w)), [floats(13, 33), torch.tensor(12)]),
    "i32": lambda: (lambda w, i: torch.tanh(w[i]) * 2, [floats(13, 33), ints(-13, 13, 4, 7, dtype=torch.int32)]),
    "columns": lambda: (lambda x, i, j: F.silu(x[:, i, j]).mean(1), [floats(9, 5, 6), ints(-5, 5, 9), ints(-6, 6, 9)]),
    "of_a_softmax": lambda: (lambda x, i: F.silu(x.softmax(-1).gather(1, i)), [floats(9, 30), ints(0, 30, 9, 70)]),
    "i32_one_place": lambda: (lambda x, i: x.exp().gather(1, i), [floats(9, 30), ints(0, 30, 9, 1, dtype=torch.int32)]),
    "few_of_a_map": lambda: (lambda x, i: F.silu(x * x.sigmoid())[i].mean(1), [floats(30, 9), ints(0, 30, 4)]),
    "many_of_a_concat": lambda: (lambda x, y, i: torch.cat([x, y])[i] * 2, [floats(3, 9), floats(2, 9), ints(0, 5, 9)]),
    "few_of_a_concat": lambda: (lambda x, y, i: torch.cat([x, y])[i] * 2, [floats(3, 9), floats(4, 9), ints(0, 7, 2)]),
    "of_a_padded_value": lambda: (lambda x, i: F.pad(x, (1, 2, 1, 1))[i].sin(), [floats(3, 9), ints(-5, 5, 4)]),
    "of_normed_rows": lambda: (lambda x, i: F.normalize(x)[i].sin(), [floats(12, 15), ints(-12, 12, 5)]),
    "of_a_product": lambda: (lambda x, w, i: F.gelu(x @ w)[:, i], [floats(9, 15), floats(15, 12), ints(-12, 12, 6)]),
    "into_a_product": lambda: (lambda x, w, i: F.relu(x[i] * 2) @ w, [floats(9, 15), floats(15, 12), ints(-9, 9, 21)]),
    "at_an_extreme": lambda: (lambda x, y: y[x.argmax(1)].sin(), [floats(9, 15), floats(15, 6)]),
    "strided": lambda: (lambda x, i: x.t().reshape(5, 3, 6)[i].sin(), [floats(6, 15), ints(-5, 5, 4)]),
    "positions": lambda: (
        lambda w, p, i: F.rms_norm(F.embedding(i, w) + F.embedding(torch.arange(i.shape[1]), p), (24,)),
        [floats(31, 24), floats(9, 24), ints(0, 31, 5, 7)],
    ),
    "of_a_ramp": lambda: (lambda x, i: x * torch.arange(10)[i], [floats(3, 15), ints(-10, 10, 15)]),
    "constant": lambda: (lambda x: x[torch.tensor([0, 2, 1, 1])].sin(), [floats(5, 9)]),
    "a_bias_by_distance": lambda: (
        lambda x, t, i: (x + t[i].permute(2, 0, 1)).softmax(-1),
        [floats(2, 3, 7, 7), floats(13, 3), ints(0, 13, 7, 7)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CASES)
def test_right_by_the_rule_with_nothing_but_scatters_left(name: str, dtype: str) -> None:
    fn, tensors = CASES[name]()
    args = [t.to(FLOATS[dtype]).requires_grad_() if t.is_floating_point() else t for t in tensors]
    try:
        fn(*args)
    except RuntimeError as error:
        pytest.skip(f"this release of PyTorch: {error}")
    fused = megafuse.fuse(fn, *args, target="interpret")
    assert all(e.reason.startswith("scatters by index") for e in compiled_of(fused).captured.support.opaque)
    check_few(fn, *args, fused=fused)


@pytest.mark.parametrize("dtype", FLOATS)
def test_table_scale_sum_and_norm_are_one_kernel(dtype: str) -> None:
    torch.manual_seed(0)
    module, ids = Prologue(31, 7, 24).to(FLOATS[dtype]), ints(0, 31, 5, 7)
    fused = megafuse.fuse(module, ids, target="interpret")
    assert len(forward_kernels(compiled_of(fused))) == 1
    check_few(module, ids, fused=fused)


def test_tied_tables() -> None:
    torch.manual_seed(0)
    module, args = Tied(31, 24), (ints(0, 31, 5, 7), ints(0, 31, 5, 7, dtype=torch.int32))
    fused = megafuse.fuse(module, *args, target="interpret")
    check_few(module, *args, fused=fused)


def test_rows_go_into_chains_and_epilogues_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the first product of a chain; and, from a table of biases, behind a product."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    fused = megafuse.fuse(net, ints(0, 50, 300), target="interpret")
    (kernel,) = forward_kernels(compiled_of(fused))
    assert kernel.chain is not None
    check_few(net, ints(0, 50, 300), fused=fused)

    def behind(x: Tensor, w: Tensor, t: Tensor, i: Tensor) -> Tensor:
        return F.gelu(x @ w + t[i])

    args = [t.bfloat16().requires_grad_() for t in (floats(128, 64), floats(64, 96) / 8, floats(9, 96))]
    monkeypatch.setattr(epilogue, "EFFICIENCY", 1.2)  # at sizes where the library's product is worth it, this is slow
    fused = megafuse.fuse(behind, *args, ints(-9, 9, 128), target="interpret", dots="auto", chains=False)
    (kernel,) = forward_kernels(compiled_of(fused))
    assert kernel.dot is not None
    check_few(behind, *args, ints(-9, 9, 128), fused=fused)


class Gated(nn.Module):
    """A gated block of rows that a reshape makes, of which some are read by index; the rows go out too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(50, 2), nn.Linear(50, 2, bias=False), nn.Linear(2, 50)
        self.register_buffer("chosen", torch.tensor([[-2], [-1]]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.reshape(2, 3, 50) * 2
        out = rows + self.down(F.silu(self.up(rows)) * self.gate(rows))
        return out[:, self.chosen].sigmoid(), rows


def test_values_that_get_memory_since_they_are_read_by_index_have_it_beside_chains_too() -> None:
    torch.manual_seed(0)
    module, x = Gated().half(), floats(5, 12, 1, 5).half().requires_grad_()
    fused = megafuse.fuse(module, x, target="interpret")
    assert compiled_of(fused).cover.chains
    check_few(module, x, fused=fused)


def test_rows_that_are_read_are_counted_not_the_table() -> None:
    sizes = {}
    for rows in (1000, 10**6):
        with torch.device("meta"):
            module, ids = Prologue(rows, 8, 128), torch.empty(64, 8, dtype=torch.int64)
        compiled = compile_call(module, (ids,), {}, device_spec(90))
        sizes[rows] = [k.dram_bytes for k in forward_kernels(compiled)]
    read_and_written = 64 * 8 * (2 * 128 * 4 + 8 + 2 * 4)
    assert sizes[1000] == sizes[10**6] == [pytest.approx(read_and_written, rel=0.02)]


def test_eager_is_charged_for_rows_too() -> None:
    table, ids = torch.empty(10**6, 64, device="meta"), torch.empty(100, dtype=torch.int64, device="meta")
    for read in (lambda w, i: F.embedding(i, w), lambda w, i: w.index_select(0, i), lambda w, i: w[i]):
        estimate = estimate_eager(read, [table, ids], device_spec(90))
        assert estimate is not None and estimate.dram_bytes == 100 * 8 + 2 * 100 * 64 * 4


def test_out_of_range_is_nan_and_no_other_row_changes() -> None:
    """Where the original raises: NaN for those rows alone, from either end for subscripts, never for embeddings."""
    table = floats(7, 5)
    calls: dict[str, tuple[Callable[..., Tensor], set[int]]] = {
        "embedding": (lambda w, i: F.embedding(i, w) * 2, set(range(7))),
        "index_select": (lambda w, i: w.index_select(0, i) * 2, set(range(7))),
        "gather": (lambda w, i: w.gather(0, i[:, None].expand(-1, 5)) * 2, set(range(7))),
        "subscript": (lambda w, i: w[i] * 2, set(range(-7, 7))),
    }
    asked = torch.tensor([3, -1, 6, 7, 0, -7, -8, 2**40, -(2**40)])
    for name, (fn, inside) in calls.items():
        fused = megafuse.fuse(fn, table, asked.clamp(0, 6), target="interpret")
        got = fused(table, asked)
        for row, i in zip(got, asked.tolist(), strict=True):
            want = 2 * table[i] if i in inside else torch.full((5,), torch.nan)
            assert torch.equal(row.nan_to_num(99.0), want.nan_to_num(99.0)), (name, i)
    counts = torch.arange(7)
    fused = megafuse.fuse(lambda x, t, i: x + t[i], floats(9), counts, asked.clamp(0, 6), target="interpret")
    assert torch.equal(fused(torch.zeros(9), counts, asked), torch.tensor([3.0, 6, 6, 0, 0, 0, 0, 0, 0]))


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_gradients_of_tables_skip_what_is_out_of_range(padding: int | None, dtype: torch.dtype) -> None:
    """PyTorch's kernel on GPUs writes wherever an id says."""
    torch.manual_seed(0)
    table = nn.Embedding(7, 5, padding_idx=padding)
    module = nn.Sequential(table, nn.Tanh())
    ids = torch.tensor([3, 1, 2, 6, 3, 0, 5], dtype=dtype)
    fused = megafuse.fuse(module, ids, target="interpret")
    bad = torch.tensor([3, 7, -1, 6, 3, 10**6, 5], dtype=dtype)
    good = torch.tensor([0, 3, 4, 6])
    out = fused(bad)
    assert out[[1, 2, 5]].isnan().all() and out[good].isfinite().all()
    out[good].sum().backward()
    found = table.weight.grad.clone()
    table.weight.grad = None
    module(bad[good]).sum().backward()
    torch.testing.assert_close(found, table.weight.grad)


def test_other_sizes_of_batches_and_tables_share_a_program() -> None:
    torch.manual_seed(0)

    def fn(t: Tensor, i: Tensor, x: Tensor) -> Tensor:
        return F.layer_norm(torch.cat([F.silu(t[i]) * 2, x], 1), (20,))

    def args(rows: int, batch: int) -> list[Tensor]:
        return [torch.randn(rows, 8, requires_grad=True), ints(-rows, rows, batch), torch.randn(batch, 12)]

    fused = megafuse.fuse(fn, *args(10, 5), target="interpret")
    for rows, batch in ((10, 5), (11, 5), (12, 7), (30, 9), (99, 40), (2, 64)):
        check_few(fn, *args(rows, batch), fused=fused)
    assert engine_of(fused).generations <= 3


def test_rows_of_an_open_width_share_a_program() -> None:
    """The stride of the table's rows is a sum of sizes."""

    def fn(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        return torch.cat([x, y], 1).tanh()[i].mul(2).sin()

    def args(width: int) -> list[Tensor]:
        return [floats(5, width).requires_grad_(), floats(5, 3).requires_grad_(), ints(-5, 5, 40)]

    fused = megafuse.fuse(fn, *args(6), target="interpret")
    for width in (6, 9, 12, 25):
        check_few(fn, *args(width), fused=fused)
    assert engine_of(fused).generations == 2


def test_an_empty_index_and_renormalised_rows_run_and_are_right() -> None:
    module = nn.Sequential(nn.Embedding(9, 5, max_norm=1.0), nn.Tanh())
    ids = ints(0, 9, 4, 3)
    fused = megafuse.fuse(module, ids, target="interpret")
    check_few(module, ids, fused=fused)
    assert fused(ids[:0]).shape == (0, 3, 5)


def test_sparse_gradients_run_the_original() -> None:
    module, ids = nn.Embedding(9, 5, sparse=True), ints(0, 9, 4)
    with pytest.warns(megafuse.NotFusedWarning, match="gives a sparse tensor"):
        fused = megafuse.fuse(module, ids, target="interpret")
    fused(ids).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.is_sparse


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_texts_compile_for_hopper_without_spills(dtype: str) -> None:
    pytest.importorskip("triton")
    kind = FLOATS[dtype]

    def empty(*shape: int, of: torch.dtype = kind) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta", requires_grad=of.is_floating_point)

    def compiled(fn: Callable[..., Any], *args: Tensor) -> None:
        for report in compile_offline(compile_call(fn, args, {}, device_spec(90)).artifact("triton").kernels):
            assert not report.error and not report.spills, report

    ids = empty(4096, 20, of=torch.int64)
    compiled(lambda w, i: F.rms_norm(F.embedding(i[:, 0], w), (1280,)), empty(50000, 1280), ids)
    compiled(lambda w, i: torch.tanh(F.embedding(i, w).sum(1)), empty(40_000_000, 64), ids.int())  # 64-bit addresses
    compiled(lambda x, i, j: torch.tanh(x[:, i, j]), empty(4096, 27, 27), *(empty(351, of=torch.int64),) * 2)
    compiled(lambda x, i: torch.tanh(x.gather(1, i)), empty(4096, 1000), ids)
