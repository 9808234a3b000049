"""Sums over rows that a chain leaves out: kernels of their own where they pay, right by the rule; their finishers."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import megafuse
from megafuse.compiler import Compiled, compile_call
from megafuse.core.device import device_spec
from megafuse.core.dtypes import DType
from megafuse.fusion import chain_search, planner
from megafuse.fusion.epilogue import DotRule
from megafuse.ir.chain import Chain, only_sums
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.index import Affine, Axis
from megafuse.ir.nest import Anchor, Nest, Root, Space
from megafuse.ir.trace import Memory, trace_nest
from megafuse.ir.types import Input, Reduce, TensorType
from megafuse.schedule.choice import tile_rules
from megafuse.schedule.tiling import ADDED, ADDING_WARPS, FULL_GRID, MIN_ROW_RUN, TileRequest, choose_tile
from megafuse.schedule.types import DotCall, KernelSchedule
from pipeline_helpers import check_few, compiled_of


def mlp(*widths: int) -> nn.Sequential:
    layers = [layer for k, n in itertools.pairwise(widths) for layer in (nn.Linear(k, n), nn.Softplus())]
    return nn.Sequential(*layers[:-1])


def planned(rows: int, *widths: int, dtype: torch.dtype = torch.float16, grad: bool = True) -> Compiled:
    x = torch.empty(rows, widths[0], dtype=dtype, device="meta", requires_grad=grad)
    return compile_call(mlp(*widths).to("meta", dtype), (x,), {}, device_spec(90), dots=DotRule(chain=True))


def alone(compiled: Compiled) -> list[Chain]:
    return [c for c in compiled.cover.chains if only_sums(c)]


def finishers(compiled: Compiled) -> list[KernelSchedule]:
    """The kernels that read partial sums."""
    partial = {b.name for b in compiled.step.buffers if b.name.startswith("partial")}
    return [k for k in compiled.step.kernels if partial.intersection(k.reads)]


@pytest.mark.parametrize("rows", [20000, 65536, 100_001])
def test_sums_that_a_chain_cannot_hold_need_no_library(rows: int) -> None:
    compiled = planned(rows, 128, 128, 128, 128, grad=False)
    (chain,) = alone(compiled)
    assert len(chain.dots) == 1
    assert not any(isinstance(c, DotCall) for c in compiled.step.backward)
    (tile,) = [
        k.chain.tile for k in compiled.step.kernels if k.chain and not k.chain.rules.turns and k.chain.rules.sums
    ]
    assert tile.num_stages == 4 and not tile.early
    (said,) = [d for d in compiled.cover.decisions if "kernels that do nothing else" in d]
    assert repr(chain.dots[0].node) in said


@pytest.mark.parametrize("rows", [65536, 100_001])
def test_all_sums_of_a_step_are_added_up_in_one_launch(rows: int) -> None:
    compiled = planned(rows, 128, 128, 128, 128, grad=False)
    (kernel,) = finishers(compiled)
    assert kernel.apart and kernel.num_warps == ADDING_WARPS
    counts = {b.shape[0] for b in compiled.step.buffers if b.name in kernel.reads}
    assert len(counts) == 1, "as many programs leave sums in either kernel"


@pytest.mark.parametrize(("rows", "expected"), [(65536, True), (8192, False)])
def test_sums_start_where_the_chain_before_left_off_if_the_cache_does_not_hold_all(rows: int, expected: bool) -> None:
    compiled = planned(rows, 128, 128, 128, 128)
    assert [k.last_first for k in compiled.step.kernels if k.chain] == [False, False, expected]


def test_deeper_networks_put_as_many_sums_into_a_kernel_as_it_holds() -> None:
    assert [len(c.dots) for c in alone(planned(65536, *[128] * 6))] == [2, 1]


def test_sums_stay_with_the_library_where_they_do_not_fit_or_are_of_fp32() -> None:
    assert not alone(planned(65536, 64, 64, 64, 64, dtype=torch.float32))
    for chain in alone(planned(65536, 256, 256, 256, 128)):
        assert all(s.node.shape[1] * s.node.shape[2] <= 256 * 128 for s in chain.dots)


def test_sums_stay_with_the_library_where_that_is_predicted_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_search, "library_seconds", lambda *args: 0.0)
    compiled = planned(65536, 128, 128, 128, 128)
    assert not alone(compiled)
    assert sum(isinstance(c, DotCall) for c in compiled.step.backward) == 1


def test_sums_of_rows_that_are_no_whole_accesses_stay_with_the_library() -> None:
    assert alone(planned(65536, 128, 128, 128, 128))
    assert not alone(planned(65536, 125, 125, 125, 125))


@pytest.mark.parametrize("rows", [65536, 65535])
def test_values_lie_by_rows_where_their_columns_would_not_start_at_whole_accesses(rows: int) -> None:
    compiled = planned(rows, 128, 128, 128, 128, grad=False)
    (chain,) = alone(compiled)
    (kernel,) = [k for k in compiled.step.kernels if k.chain and k.chain.rules.streamed]
    made = [b for b in compiled.step.buffers if b.name in kernel.reads and b.kind == "temp"]
    assert [b.strides for b in made] == [(1, rows) if rows % 8 == 0 else (128, 1)]
    assert chain.rows == rows


@pytest.mark.parametrize(("rows", "widths"), [(150, (24, 40, 24)), (128, (16, 16, 16, 16)), (77, (32, 8, 64, 72))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_alone_are_right(
    rows: int, widths: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they cost, and although a chain could hold them all."""
    monkeypatch.setattr(chain_search, "library_seconds", lambda *args: 1.0)
    monkeypatch.setattr(chain_search, "_fitting", lambda sums: min(1, len(sums)))
    monkeypatch.setattr(chain_search, "ROWS_AT_ONCE", 0.25)  # so that programs walk
    monkeypatch.setattr(planner, "WORTH_CHAINING", -float("inf"))
    torch.manual_seed(rows)
    module = mlp(*widths).to(dtype)
    x: Tensor = torch.randn(rows, widths[0], dtype=dtype, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret")
    assert len(alone(compiled_of(fused))) >= len(widths) - 2
    check_few(module, x, fused=fused)


@pytest.mark.parametrize("rows", [4096, 20000, 65536, 100_001])
def test_what_adds_up_partial_sums_has_tall_tiles_and_few_warps(rows: int) -> None:
    """So tall that threads have their accesses, unless programs would be too few; a sector of rows at least."""
    for kernel in finishers(planned(rows, 128, 128, 128, 128)):
        assert kernel.num_warps <= ADDING_WARPS
        for phase in kernel.phases:
            space, rows_of_tile = phase.trace.nest.space, phase.tile.row_tile
            loaded = rows_of_tile * space.num_cols * len(phase.trace.loads())
            assert loaded <= ADDED and rows_of_tile >= MIN_ROW_RUN
            few = space.num_rows < 2 * FULL_GRID * rows_of_tile
            assert few or rows_of_tile == MIN_ROW_RUN or 2 * loaded > ADDED


def products(x: Tensor, *matrices: Tensor) -> tuple[Tensor, ...]:
    return tuple(x @ m for m in matrices)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((64, 16384, 128), torch.bfloat16), ((65536, 64), torch.float32), ((300, 24), torch.bfloat16)],
)
def test_sums_of_several_problems_of_fp32_and_of_few_rows_have_ordinary_tiles(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Loaded ahead as if there were one problem they left 1 GiB of partial sums."""
    width = shape[-1]
    x = torch.empty(shape, dtype=dtype, device="meta")
    matrices = [
        torch.empty(*shape[:-2], width, width, dtype=dtype, device="meta", requires_grad=True) for _ in range(3)
    ]
    step = compile_call(products, (x, *matrices), {}, device_spec(90), dots=DotRule(chain=True)).step
    assert not any(k.chain.rules.streamed for k in step.kernels if k.chain is not None)
    partial = [math.prod(b.shape) * b.dtype.size for b in step.buffers if b.name.startswith("partial")]
    assert sum(partial) <= 64 * 2**20


def normed(*widths: int) -> nn.Sequential:
    layers = [weight_norm(nn.Linear(k, n, bias=False)) for k, n in itertools.pairwise(widths)]
    return nn.Sequential(*(m for layer in layers for m in (layer, nn.Softplus())))


def normed_plan(rows: int, *widths: int) -> Compiled:
    x = torch.empty(rows, widths[0], dtype=torch.float16, device="meta", requires_grad=True)
    return compile_call(normed(*widths).to("meta", torch.float16), (x,), {}, device_spec(90), dots=DotRule(chain=True))


def added_while_loading(compiled: Compiled) -> list[int]:
    """How many parts the sums have that are made while they are loaded."""
    return [i.parts for k in compiled.step.kernels for p in k.phases for i in p.trace.loads() if i.parts > 1]


@pytest.mark.parametrize("rows", [4096, 5000])
def test_backward_of_a_norm_adds_up_the_sums_that_it_reads(rows: int) -> None:
    compiled = normed_plan(rows, 128, 128, 96, 128)
    (kernel,) = finishers(compiled)
    chunks = {b.shape[0] for b in compiled.step.buffers if b.name.startswith("partial")}
    assert set(added_while_loading(compiled)) == chunks and len(added_while_loading(compiled)) == 3
    assert kernel.apart
    kinds = {b.name: b.kind for b in compiled.step.buffers}
    assert {kinds[name] for name in kernel.writes} == {"grad"}, "no sum is stored but to return it"


def test_sums_whose_rows_exceed_the_registers_are_added_up_first() -> None:
    assert len(added_while_loading(normed_plan(4096, 64, 256, 64))) == 2
    compiled = normed_plan(100_001, 64, 256, 64)
    (load,) = [i for k in compiled.step.kernels for p in k.phases for i in p.trace.loads() if i.parts > 1]
    assert (load.parts, load.node.shape[-1]) == (131, 64), "rows of 256 such sums have a kernel that adds up"


def test_sums_that_others_read_too_are_added_up_first() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.sum(0)
        return nn.functional.softmax(total, -1), nn.functional.softmax(total, 0)

    x = torch.empty(20000, 64, 16, device="meta")
    for outputs, expected in ((both, False), (lambda x: both(x)[0], True)):
        compiled = compile_call(outputs, (x,), {}, device_spec(90))
        assert finishers(compiled)
        assert bool(added_while_loading(compiled)) == expected


@pytest.mark.parametrize(("rows", "cols"), [(65536, 64), (4096, 64)])
def test_sums_that_every_row_needs_are_added_up_once(rows: int, cols: int) -> None:
    def centred(x: Tensor) -> Tensor:
        return nn.functional.softmax(x - x.mean(0, keepdim=True), -1)

    compiled = compile_call(centred, (torch.empty(rows, cols, device="meta"),), {}, device_spec(90))
    assert finishers(compiled) and not added_while_loading(compiled)


def test_other_values_are_loaded_before_sums_are_made() -> None:
    """No compiler moves a load before the exchange between threads that a sum ends with."""
    compiled = normed_plan(4096, 128, 128, 128, 128)
    (text,) = [k.text for k in compiled.artifact("triton").kernels if "_parts = tl.load" in k.text]
    for part in text.split("# Programs ")[1:]:
        loads = re.findall(r"^ +(\w+) = tl\.load\(", part, re.MULTILINE)
        assert len(loads) == 4 and loads[-1].endswith("_parts")


@pytest.mark.parametrize(("rows", "widths"), [(150, (24, 40, 24)), (300, (33, 20, 17, 9)), (257, (128, 64, 3))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norms_that_add_up_what_they_read_are_right(rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    module = normed(*widths).to(dtype)
    x: Tensor = torch.randn(rows, widths[0], dtype=dtype, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret")
    assert added_while_loading(compiled_of(fused))
    check_few(module, x, fused=fused)


@pytest.mark.parametrize("dim", [0, 1])
def test_sums_that_lie_across_the_rows_are_added_up_first(dim: int) -> None:
    """A row of them would touch as many sectors as it has columns."""

    def normal(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return (x @ (v / v.norm(dim=dim, keepdim=True))) @ w

    half = {"dtype": torch.float16, "device": "meta", "requires_grad": True}
    x, v, w = torch.empty(4096, 128, **half), torch.empty(128, 128, **half), torch.empty(128, 128, **half)
    compiled = compile_call(normal, (x, v, w), {}, device_spec(90), dots=DotRule(chain=True))
    sums = [(i, p.trace) for k in compiled.step.kernels for p in k.phases for i in p.trace.loads() if i.parts > 1]
    assert bool(sums) == (dim == 1)


def test_parts_whose_number_is_open_are_added_up_first() -> None:
    """Of sums large enough that programs share them in every call."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * nn.functional.softmax(self.bias, -1)).relu()

    torch.manual_seed(3)
    module = Scaled()
    fused = megafuse.fuse(module, torch.randn(20000, 16, 8), target="interpret")
    for rows in (20000, 30000, 40001):
        check_few(module, torch.randn(rows, 16, 8), fused=fused)


@pytest.mark.parametrize("cols", [96, 300, 1280, 1500])
@pytest.mark.parametrize("parts", [2, 3, 16])
def test_tiles_of_sums_made_while_loading_are_legal(cols: int, parts: int) -> None:
    """Columns that are cut into several pieces, too."""
    shape = (parts, 40, cols)
    source = Node(0, Input("parts", 0, contiguous_strides(shape), "partial"), (), TensorType(shape, DType.F32))
    total = Node(1, Reduce("sum", (0,)), (source,), TensorType((40, cols), DType.F32))
    norm = Node(2, Reduce("sum", (1,)), (total,), TensorType((40,), DType.F32))
    nest = Nest(Space((Axis("r", 40),), (Axis("c", cols),)), (Root(Anchor(norm), (Affine((("r", 1),)),)),))
    trace = trace_nest(nest, Memory([source], [source]), summed=frozenset([source]))
    assert [i.parts for i in trace.loads()] == [parts]
    request = TileRequest(trace, (), lambda node: contiguous_strides(node.shape), 1, False)
    tile = choose_tile(request, device_spec(90))
    assert not tile_rules(request, tile).problem(tile)
