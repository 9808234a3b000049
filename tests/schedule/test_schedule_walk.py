"""How programs walk rows: two abreast where one alone waits, and in pieces whose tail folds inside threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megafuse.compiler import Compiled, compile_call
from megafuse.core.device import device_spec
from megafuse.ir.ops import MAP_FNS
from megafuse.schedule.row_walk import BRANCHING, pieces_of_accesses
from megafuse.schedule.types import KernelSchedule, PhaseSchedule, Tile
from megafuse.workloads import get

DEVICE = device_spec(90)


@pytest.mark.parametrize(
    ("cols", "warps", "each", "pieces"),
    [
        (2560, 8, 8, (2048, 512)),
        (1280, 4, 8, (1024, 256)),
        (1280, 2, 8, (512, 512, 256)),
        (2560, 4, 8, (1024, 1024, 512)),
        (2560, 8, 4, (1024, 1024, 512)),
        (1304, 2, 8, ()),  # the tail would be as wide as the others: equal pieces are one exchange too
        (1096, 4, 8, (1024, 128)),  # at least one element a thread
        (1280, 1, 8, ()),  # no tail
        (4096, 8, 8, ()),
        (1024, 8, 8, ()),  # less than an access for each thread
        (1197, 4, 8, ()),  # no whole accesses
        (1284, 4, 8, ()),
        (1284, 4, 4, ()),
        (8200, 1, 8, ()),  # too many pieces
    ],
)
def test_pieces_are_accesses_of_16_bytes_and_a_tail(cols: int, warps: int, each: int, pieces: tuple[int, ...]) -> None:
    assert pieces_of_accesses(cols, warps, each) == pieces


def test_pieces_of_accesses_cover_the_columns() -> None:
    found = 0
    for cols in range(8, 9000, 8):
        for warps in (1, 2, 4, 8, 16):
            pieces = pieces_of_accesses(cols, warps, 8)
            if pieces:
                found += 1
                assert sum(pieces[:-1]) < cols <= sum(pieces)
                assert set(pieces[:-1]) == {256 * warps}
                assert 32 * warps <= pieces[-1] < 256 * warps
    assert found > 1000


def compiled(fn: object, *tensors: Tensor) -> Compiled:
    return compile_call(fn, tensors, {}, DEVICE)  # type: ignore[arg-type]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def block(batch: int, tokens: int = 64, dim: int = 1280) -> Compiled:
    module = get("rank_mixer_block").module(
        {"batch": batch, "tokens": tokens, "dim": dim, "k": 2}, device="meta", perturb=0
    )
    return compiled(module.to(torch.bfloat16), meta(batch, tokens, dim))


def reductions(phase: PhaseSchedule) -> int:
    return sum(1 for i in phase.trace.insts if i.kind == "reduce")


def walks(made: Compiled) -> list[tuple[KernelSchedule, PhaseSchedule]]:
    """Kernels that walk whole rows of a large value."""
    found = [(k, p) for k in made.step.kernels for p in k.phases if p.rules and p.rules.walked and reductions(p)]
    return [(k, p) for k, p in found if p.rules and p.rules.over_cols and p.trace.nest.space.num_cols > 512]


def short(tile: Tile) -> tuple[int, int, tuple[int, ...], int]:
    return tile.num_warps, tile.num_stages, tile.pieces, tile.abreast


def test_the_block_has_the_tiles_that_were_the_fastest() -> None:
    """The production step, in its order: what is measured to be fastest of rows abreast, pieces, warps and stages."""
    tiles = [p.tile for _, p in walks(block(1024))]
    assert [short(t) for t in tiles] == [
        (2, 1, (512, 512, 256), 2),  # gather of norm1's rows in short runs: no loop, many programs
        (4, 4, (512,) * 5, 1),  # two norms and a gate, no sums: tiles of two rows
        (2, 3, (512, 512, 256), 1),  # backward of a norm: several programs an SM
        (8, 3, (2048, 512), 2),  # backward of two norms and a gate: one program an SM
        (4, 1, (256,) * 5, 1),  # backward through the mix: gathers are not pipelined
        (2, 3, (512, 512, 256), 1),
    ]
    assert (tiles[0].rows_per_chunk, tiles[1].row_tile) == (2, 2)
    assert all(t.row_tile == 1 for t in tiles if t is not tiles[1])


def test_an_odd_number_of_rows_is_walked_one_at_a_time() -> None:
    even, odd = ([p for _, p in walks(block(n))] for n in (254, 255))
    for made in (even, odd):
        assert all(p.loop[-1].size % p.tile.abreast == 0 for p in made)
    by_batch = [[p.tile.abreast for p in made if p.loop[-1].size in (254, 255)] for made in (even, odd)]
    assert 2 in by_batch[0]
    assert set(by_batch[1]) == {1}
    assert 2 in [p.tile.abreast for p in odd], "the rows of a sample are still even"


def test_sums_of_one_norm_over_wide_rows_leave_few_programs_an_sm() -> None:
    for width, expected in ((1280, 1), (2560, 2), (4096, 2)):
        (tile,) = (
            p.tile
            for _, p in walks(compiled(nn.LayerNorm(width, device="meta", dtype=torch.bfloat16), meta(65536, width)))
        )
        assert tile.abreast == expected, width


def gate_tile(width: int, dtype: torch.dtype, kept: torch.dtype | None = None) -> Tile:
    """The tile that two norms and a gate have in backward; ``kept``: the type of the gradient that leaves it."""

    def gated(z: Tensor, *norms: Tensor) -> Tensor:
        u, gate = z.to(dtype).chunk(2, -1)
        normed = functional.layer_norm(u, (width,), *norms[:2])
        return normed * functional.silu(functional.layer_norm(gate, (width,), *norms[2:]))

    made = compiled(gated, meta(65536, 2 * width, dtype=kept or dtype), *(meta(width, dtype=dtype) for _ in range(4)))
    (tile,) = (p.tile for _, p in walks(made))
    return tile


@pytest.mark.parametrize(
    ("width", "dtype", "expected"),
    [
        (2560, torch.bfloat16, (8, 3, (2048, 512), 2)),
        (2560, torch.float16, (8, 3, (2048, 512), 2)),
        (2560, torch.float32, (8, 3, (512,) * 5, 1)),  # 16-bit values alone
        (3072, torch.bfloat16, (8, 3, (2048, 1024), 1)),  # registers hold one row
        (8192, torch.bfloat16, (16, 1, (8192,), 1)),  # threads of 16 warps have half of them
    ],
)
def test_rows_abreast_fit_the_registers(
    width: int, dtype: torch.dtype, expected: tuple[int, int, tuple[int, ...], int]
) -> None:
    assert short(gate_tile(width, dtype)) == expected


def test_pieces_of_accesses_are_for_rows_of_16_bits_alone() -> None:
    """Beside wider values, Triton would give each its own layout."""
    assert gate_tile(2560, torch.bfloat16, kept=torch.float32).pieces == (512,) * 5


def test_gathers_of_whole_runs_are_walked_as_they_were() -> None:
    """Two rows of them have no sectors in common: 8 tokens leave runs of 320 bytes, 64 of 40."""
    for tokens, expected in ((64, 2), (8, 1)):
        gather = walks(block(1024, tokens))[0][1]
        assert (gather.tile.num_stages, gather.tile.abreast) == (1, expected), tokens


def test_functions_with_branches_are_functions() -> None:
    assert set(MAP_FNS) >= BRANCHING
