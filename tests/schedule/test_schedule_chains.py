"""Tiles of chains: what they must fit in, and how rows are spread."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from megafuse.compiler.driver import compile_call
from megafuse.compiler.engine import dot_rule
from megafuse.core.device import device_spec
from megafuse.core.dtypes import DType
from megafuse.ir.chain import Walk, block, turned, turned_rows
from megafuse.schedule.chain_tiling import (
    HELD_REGISTERS,
    LONGEST_WALK,
    Beside,
    ChainRequest,
    chain_rules,
    choose_chain_tile,
)

DEVICE = device_spec(90)


def request(rows: int, *widths: int, sums: bool = False, dtype: DType = DType.BF16) -> ChainRequest:
    edges = tuple(itertools.pairwise(widths))
    return ChainRequest(Walk(1, rows), widths, edges, edges if sums else (), dtype, dtype is DType.F32)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("width", [1, 16, 100, 128, 200, 256])
@pytest.mark.parametrize("rows", [2, 100, 5000, 1 << 20])
def test_every_tile_fits_and_covers_the_rows_once(rows: int, width: int, sums: bool) -> None:
    tile = choose_chain_tile(request(rows, width, width, width, sums=sums), DEVICE)
    programs = -(-rows // tile.rows_per_chunk)
    assert tile.rows_per_chunk % tile.rows == 0
    assert programs * tile.rows_per_chunk >= rows > (programs - 1) * tile.rows_per_chunk
    assert programs <= 2 * DEVICE.sms or tile.rows_per_chunk == LONGEST_WALK * tile.rows
    assert tile.rows * block(width) * 4 <= 64 * 4 * 32 * tile.num_warps, "a row value takes 64 registers of a thread"
    held = 2 * block(width) ** 2 * 2
    assert not tile.held or held <= DEVICE.shared_per_block


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("rows", [2, 33, 640, 5000])
@pytest.mark.parametrize("problems", [2, 3, 32, 50, 100, 132, 200, 5000])
def test_tiles_of_several_problems(problems: int, rows: int, sums: bool) -> None:
    asked = replace(request(rows, 128, 128, 128, sums=sums), walk=Walk(problems, rows))
    tile = choose_chain_tile(asked, DEVICE)
    assert chain_rules(asked, tile, DEVICE).problem(tile) == ""
    chunks = -(-rows // tile.rows_per_chunk)
    assert chunks * tile.rows_per_chunk >= rows > (chunks - 1) * tile.rows_per_chunk, "of each problem, once"
    longest = tile.rows_per_chunk == LONGEST_WALK * tile.rows
    assert chunks == 1 or chunks * problems <= 4 * DEVICE.sms or longest, "two waves, of two programs an SM"
    if problems * rows >= 132 * 64:
        assert chunks * problems >= DEVICE.sms // 2 - problems, "half of the device works, where rows are enough"


@pytest.mark.parametrize("tiles", [1, 7, 131, 132, 133, 200, 264, 265, 1000, 16384])
@pytest.mark.parametrize("at_once", [132, 264])
def test_programs_of_one_problem_run_at_once(tiles: int, at_once: int) -> None:
    assert Walk(1, tiles * 16).tiles_each(16, at_once) == -(-tiles // min(tiles, at_once))


def test_some_waves_end_earlier_than_one() -> None:
    assert Walk(32, 64 * 100).tiles_each(64, 132) == 25, "four programs of each problem, at once"
    assert Walk(72, 64 * 90).tiles_each(64, 132) == 30, "three of each problem in two waves: one wave would walk 90"
    assert Walk(72, 64).tiles_each(64, 132) == 1
    assert Walk(1000, 640).tiles_each(64, 132) == 10, "a program walks a problem"


def test_small_problems_are_spread_over_the_device() -> None:
    tiny = choose_chain_tile(request(16, 48, 64, 40, 24, dtype=DType.F32), DEVICE)
    assert (tiny.rows, tiny.rows_per_chunk) == (1, 1)
    few = choose_chain_tile(request(4096, 128, 128, 128), DEVICE)
    assert -(-4096 // few.rows_per_chunk) == 128


@pytest.mark.parametrize(("rows", "products", "shares"), [(256, 3, 3), (256, 1, 1), (4096, 3, 2), (65536, 3, 1)])
def test_idle_programs_share_tiles_and_their_sums(rows: int, products: int, shares: int) -> None:
    asked = replace(request(rows, *[128] * 4, sums=True), products=products, turned=True, turns=True)
    tile = choose_chain_tile(asked, DEVICE)
    assert tile.shares == shares
    assert chain_rules(asked, tile, DEVICE).problem(tile) == ""
    assert -(-rows // tile.rows_per_chunk) * shares <= DEVICE.sms


def test_matrices_beyond_shared_memory_are_read_for_each_tile() -> None:
    assert choose_chain_tile(request(1 << 20, *[128] * 5), DEVICE).held
    assert not choose_chain_tile(request(1 << 20, *[128] * 12), DEVICE).held


def test_an_sm_with_room_for_one_program_gets_a_larger_one() -> None:
    two = choose_chain_tile(request(1 << 20, *[128] * 4), DEVICE)
    one = choose_chain_tile(request(1 << 20, *[128] * 6), DEVICE)
    assert (two.rows, one.rows) == (64, 128)
    assert -(-(1 << 20) // two.rows_per_chunk) > DEVICE.sms >= -(-(1 << 20) // one.rows_per_chunk)


def test_sums_over_rows_take_tiles_of_columns_by_rows() -> None:
    asked = replace(request(1 << 20, 128, 128, 128, sums=True), turned=True)
    tile = choose_chain_tile(asked, DEVICE)
    assert (tile.rows, tile.num_warps, tile.turned) == (64, 8, True)
    narrow = choose_chain_tile(replace(asked, widths=(64, 64, 64), matrices=((64, 64), (64, 64))), DEVICE)
    assert (narrow.rows, narrow.num_warps) == (64, 4), "warps beyond the features would compute the same again"


def test_the_rows_of_the_next_tile_are_loaded_early_where_registers_hold_them() -> None:
    walk = request(1 << 20, 128, 128, 128)
    assert choose_chain_tile(replace(walk, loaded=256), DEVICE).early
    assert not choose_chain_tile(replace(walk, loaded=768), DEVICE).early
    assert not choose_chain_tile(replace(request(4096, 128, 128, 128), loaded=256), DEVICE).early, "no next tile"


@pytest.mark.parametrize(
    ("widths", "dtype", "expected"),
    [
        ([128, 128, 128], torch.bfloat16, True),
        ([64, 128, 64], torch.float16, True),
        ([128, 100, 128], torch.bfloat16, True),
        ([128, 32, 128], torch.bfloat16, False),
        ([128, 256, 128], torch.bfloat16, False),
        ([64, 64, 64], torch.float32, False),
    ],
)
def test_tiles_are_turned_only_where_all_lines_of_shared_memory_are_full(
    widths: list[int], dtype: torch.dtype, expected: bool
) -> None:
    layers = [layer for k, n in itertools.pairwise(widths) for layer in (nn.Linear(k, n), nn.ReLU())]
    module = nn.Sequential(*layers).to("meta", dtype)
    x = torch.empty(300, widths[0], dtype=dtype, device="meta", requires_grad=True)
    compiled = compile_call(module, (x,), {}, DEVICE, dots=dot_rule("library"))
    (chain,) = [c for c in compiled.cover.chains if not c.forward] or [None]
    assert chain is None or turned(chain, DEVICE) is expected
    assert chain is not None or not expected


@pytest.mark.parametrize(("sums", "programs"), [(False, 132), (True, 33)])
@pytest.mark.parametrize("rows", [40, 33 * 16 + 1, 33 * 32 + 1, 132 * 16, 132 * 16 + 1, 132 * 32, 132 * 32 + 1])
def test_narrow_tiles_are_for_few_rows(rows: int, sums: bool, programs: int) -> None:
    expected = next((n for n in (16, 32) if rows <= programs * n), 64)
    assert turned_rows(Walk(1, rows), sums, DEVICE) == expected
    assert turned_rows(Walk(1, rows), sums, replace(DEVICE, narrow_tiles=False)) == 64
    asked = replace(request(rows, 128, 128, 128, sums=sums), turned=True)
    tile = choose_chain_tile(asked, DEVICE)
    assert (tile.rows, tile.rows_per_chunk, tile.early) == (expected, max(expected, tile.rows_per_chunk), False)


def test_chains_of_few_rows_are_turned_without_sums_too() -> None:
    module = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)).half().to("meta").requires_grad_(False)
    for rows, expected in ((300, True), (132 * 32 + 1, False)):
        x = torch.empty(rows, 128, dtype=torch.float16, device="meta")
        (chain,) = compile_call(module, (x,), {}, DEVICE, dots=dot_rule("library")).cover.chains
        assert turned(chain, DEVICE) is expected
        assert not turned(chain, replace(DEVICE, narrow_tiles=False))


@pytest.mark.parametrize("rows", [100, 8449, 65536, 100_001, 1 << 20])
@pytest.mark.parametrize("widths", [(128, 128), (128, 256), (16, 16)])
def test_sums_alone_are_loaded_ahead_by_as_many_programs_as_other_chains_with_sums(
    rows: int, widths: tuple[int, int]
) -> None:
    loaded = 2 * sum(map(block, widths))
    asked = ChainRequest(Walk(1, rows), widths, (), (widths,), DType.F16, False, loaded, products=1, streamed=True)
    tile = choose_chain_tile(asked, DEVICE)
    assert chain_rules(asked, tile, DEVICE).problem(tile) == ""
    assert tile.num_stages * tile.rows * loaded <= DEVICE.shared_per_block
    assert (tile.num_stages > 1) == (rows > tile.rows * DEVICE.sms)
    held = replace(request(rows, 128, 128, 128, sums=True), turned=True)
    same = choose_chain_tile(held, DEVICE)
    assert same.rows < 64 or same.rows_per_chunk == tile.rows_per_chunk


# --- what programs of one tile load first -----------------------------------------------------------------------------


AT_ONCE = replace(DEVICE, stores_at_once=True)


def backward(layers: int, rows: int, width: int = 128) -> ChainRequest:
    """The backward of an MLP of equal layers whose activations come from memory: a sum and a product for each."""
    asked = request(rows, *(width,) * (layers + 1), sums=True)
    operands = [layers + (n + 1 == layers) for n in range(layers)]  # of all layers; the input with the last matrix
    beside = tuple(Beside(n * width, (n - 1) * width, 2 * width * n) for n in operands)
    return replace(asked, beside=beside, loaded=2 * width * (layers + 1), turned=True, turns=True, products=layers)


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("rows", [64, 256, 4096, 8192])
def test_what_is_loaded_first_fits_beside_the_operands_and_a_stored_sum(layers: int, rows: int) -> None:
    asked = backward(layers, rows)
    tile = choose_chain_tile(asked, AT_ONCE)
    assert chain_rules(asked, tile, DEVICE).problem(tile) == ""
    assert tile.rows_per_chunk == tile.rows
    held = tile.first * 128 * 128 * 2
    if tile.first:
        there = asked.beside[tile.first - 1]
        needs = max(2 * tile.rows * there.most, 2 * tile.rows * there.after + 4 * 128 * 128)
        assert held + needs <= DEVICE.shared_per_block


def test_three_layers_are_loaded_whole_and_of_five_as_many_as_fit() -> None:
    assert choose_chain_tile(backward(3, 4096), AT_ONCE).first == 3
    assert 0 < choose_chain_tile(backward(5, 4096), AT_ONCE).first < 5
    assert choose_chain_tile(replace(backward(3, 4096), dtype=DType.F32, plain=True, turned=False), AT_ONCE).first == 0
    assert choose_chain_tile(backward(3, 1 << 20), AT_ONCE).first == 0, "it walks"


def test_matrices_that_wait_in_registers_are_fewer() -> None:
    """Registers hold them beside rows, a product in fp32 and a sum."""
    assert 0 < choose_chain_tile(backward(5, 4096), DEVICE).first < choose_chain_tile(backward(5, 4096), AT_ONCE).first
    for asked in (backward(layers, rows) for layers in (1, 2, 3, 5) for rows in (64, 256, 4096)):
        tile = choose_chain_tile(asked, DEVICE)
        if tile.first:
            held = (
                tile.first * 128 * 128 * 2 + tile.rows * (asked.beside[tile.first - 1].rows + 4 * 128) + 4 * 128 * 128
            )
            assert held / 4 / (32 * tile.num_warps) <= HELD_REGISTERS


def test_matrices_that_are_loaded_first_are_there() -> None:
    asked = backward(3, 4096)
    tile = choose_chain_tile(asked, AT_ONCE)
    rules = chain_rules(asked, tile, DEVICE)
    for wrong in ({"first": 4}, {"first": -1}, {"held": False}, {"rows_per_chunk": 2 * tile.rows, "shares": 1}):
        assert "first" in rules.problem(replace(tile, **wrong)), wrong
    for other, device in ((asked, replace(AT_ONCE, loads_first=False)), (replace(asked, plain=True), AT_ONCE)):
        assert "first" in chain_rules(other, tile, device).problem(tile)
