"""Indices of 2**31 elements and more are 64-bit numbers, where they can occur and nowhere else."""

from __future__ import annotations

import pytest

from codegen_blocks import F32, TILE, Block, index, param
from megafuse.codegen.program import Axis, Phase, TileProgram
from megafuse.codegen.triton import print_kernel
from megafuse.core.sizes import WIDE, Dim, open_size
from megafuse.runtime.offline import compile_offline


def copy(rows: int, cols: int, pieces: tuple[int, ...], grid: bool = False, wide: bool = False) -> TileProgram:
    """``y = x`` over ``rows`` x ``cols``, 4 rows a program."""
    b = Block()
    at = index(r=cols, c=1)
    b.load("x", "x", at, TILE, F32)
    b.store("y", at, "x", TILE, F32)
    phase = Phase("copy", (), (Axis("r", rows),), (Axis("c", cols),), 4, 4, b.done(), pieces, col_grid=grid)
    params = (param("x", F32, (rows, cols), wide=wide), param("y", F32, (rows, cols), True, wide))
    return TileProgram("copy", (), params, (phase,), 4)


def test_small_kernels_have_none() -> None:
    text = print_kernel(copy(1000, 64, (64,))).text
    assert "int64" not in text and "row * 64" in text


def test_offsets_of_large_buffers() -> None:
    """The row index itself is small: only its product with the stride is not."""
    text = print_kernel(copy(2**26, 64, (64,), wide=True)).text
    assert "chunk = tl.program_id(0)\n" in text and "row.to(tl.int64) * 64" in text


def test_many_rows() -> None:
    """The product of the program id and the rows of a program is past 32 bits already."""
    text = print_kernel(copy(WIDE, 2, (2,), wide=True)).text
    assert "chunk = tl.program_id(0).to(tl.int64)\n" in text and "row = chunk * 4" in text
    assert "to(tl.int64)\n" not in print_kernel(copy(WIDE - 4, 2, (2,), wide=True)).text


def test_many_columns() -> None:
    text = print_kernel(copy(4, 2**33, (1024,), grid=True, wide=True)).text
    assert "col = (tl.program_id(0) % 8388608).to(tl.int64) * 1024" in text


def test_more_column_blocks_than_the_second_grid_axis_takes() -> None:
    narrow, broad = (copy(64, n * 1024, (1024,), grid=True) for n in (65535, 65536))
    assert narrow.grid == (16, 65535) and broad.grid == (16 * 65536, 1)
    assert "chunk = tl.program_id(0)\n" in print_kernel(narrow).text
    text = print_kernel(broad).text
    assert "chunk = tl.program_id(0) // 65536\n" in text and "col = tl.program_id(0) % 65536 * 1024" in text.replace(
        "(tl.program_id(0) % 65536)", "tl.program_id(0) % 65536"
    )


@pytest.mark.parametrize("wide", [False, True])
def test_open_sizes_are_widened_in_their_class_alone(wide: bool) -> None:
    n = open_size(Dim("n", 64, wide))
    program = copy(n * 3, 64, (64,), wide=wide)
    source = print_kernel(program)
    assert source.dims == ("n",) and repr(source.grid) == "((n * 3 + 3) // 4, 1)"
    assert ("n = n.to(tl.int64)" in source.text) is wide and ("int64" in source.text) is wide
    assert "row < n * 3" in source.text
    assert source.at({"n": 5}).grid == (4, 1) and source.at({"n": 5}).sizes == (5,)


@pytest.mark.slow
def test_wide_texts_compile() -> None:
    pytest.importorskip("triton")
    open_rows = copy(open_size(Dim("n", 64, wide=True)), 64, (64,), wide=True)
    programs = [copy(WIDE, 2, (2,), wide=True), copy(4, 2**33, (1024,), grid=True, wide=True), open_rows]
    for report in compile_offline([print_kernel(p) for p in programs]):
        assert not report.error, report.error
