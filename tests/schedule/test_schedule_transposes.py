"""Tiles of values that are read along rows in one place and along columns in another."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megafuse.compiler import Compiled, compile_call
from megafuse.core.device import device_spec
from megafuse.schedule.types import PhaseSchedule

DEVICE = device_spec(90)
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def compiled(fn: object, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Compiled:
    tensors = [torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in shapes]
    return compile_call(fn, tuple(tensors), {}, DEVICE)  # type: ignore[arg-type]


def phases(made: Compiled) -> list[PhaseSchedule]:
    return [p for k in made.step.kernels for p in k.phases]


def mixed(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return y * x.t() + z


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 777), (3, 1 << 20), (1 << 20, 2), (33, 65), (1, 5000), (7, 7)])
def test_tiles_without_reductions_are_square_as_far_as_the_value_is(shape: tuple[int, int], dtype: str) -> None:
    made = compiled(mixed, shape[::-1], shape, shape, dtype=TYPES[dtype])
    for phase in phases(made):
        tile = phase.tile
        assert tile.row_tile * sum(tile.pieces) >= min(2048, math.prod(shape)), "no tile is tiny"
        if min(shape) > 500:
            assert (tile.row_tile, tile.pieces) == (32, (64,))


def normed(x: Tensor, y: Tensor) -> Tensor:
    return functional.layer_norm(x + y.transpose(1, 2), x.shape[-1:])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [64, 512, 1024, 2048])
def test_rows_make_a_sector_or_a_part_of_one(width: int, dtype: str) -> None:
    """What a warp reads along the rows comes in runs of a quarter of a sector (32 bytes) at least."""
    made = compiled(normed, (64, 256, width), (64, width, 256), dtype=TYPES[dtype])
    reducing = [p.tile.row_tile for p in phases(made) if any(i.kind == "reduce" for i in p.trace.insts)]
    assert reducing and all(rows * TYPES[dtype].itemsize >= 8 for rows in reducing)


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 130, 131, 132, 133, 260, 264, 266, 300, 1000, 1057])
@pytest.mark.parametrize("width", [1280, 2560, 4096])
def test_tiles_of_the_heuristic_are_legal_for_few_rows(rows: int, width: int) -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        h = functional.layer_norm(x, (width,), a, b)
        return functional.layer_norm(functional.silu(h) + x, (width,), c, d)

    made = compiled(fn, (rows, width), *[(width,)] * 4)
    for phase in phases(made):
        assert phase.rules is None or phase.rules.problem(phase.tile) == ""
        covered = math.prod(a.size for a in phase.loop)
        assert phase.tile.rows_per_chunk >= phase.tile.row_tile * phase.tile.abreast or covered == 1
