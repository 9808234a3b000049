"""Details of dot kernels: which accesses go through descriptors, the order of tiles, refusals."""

from __future__ import annotations

import dataclasses

import pytest

from codegen_dots import PLAIN, Lay, Product, Tiling
from megafuse.codegen.dot_program import DotProgram
from megafuse.codegen.triton import print_kernel
from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError

BF16 = DType.BF16
TILING = Tiling(descriptors=True)


def described(product: Product, tiling: Tiling = TILING) -> set[str]:
    """Buffers that descriptors touch."""
    source = print_kernel(product.program(tiling))
    return {source.params[n][0] for n in source.aligned}


def test_what_lies_well_goes_through_descriptors():
    product = Product("d", BF16, (2, 64, 64, 64), a=Lay("rpc"), b=Lay("pcr"), residual=Lay("rpc"), bias=True)
    assert described(product) == {"a", "b", "residual", "y"}
    assert described(product, Tiling()) == set()


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"shape": (2, 64, 64, 36)}, {"y"}),  # rows of a and of b (turned) are no multiples of 16 bytes apart
        ({"shape": (2, 64, 36, 64)}, {"a", "b"}),
        ({"a": Lay(skip=4)}, {"b", "y"}),
        ({"a": Lay(skip=8)}, {"a", "b", "y"}),
        ({"a": Lay("rcp")}, {"b", "y"}),  # no stride is 1
        ({"out": Lay("pcr")}, {"a", "b", "y"}),
    ],
)
def test_what_does_not_goes_through_pointers(change: dict[str, object], left: set[str]):
    plain = Product("d", BF16, (2, 64, 64, 64), b=Lay("pcr"))
    assert described(dataclasses.replace(plain, **change)) == left  # type: ignore[arg-type]


def test_a_described_kernel_has_the_same_one_with_pointers_behind_it():
    source = print_kernel(Product("d", BF16, (2, 64, 64, 64)).program(TILING))
    assert "make_tensor_descriptor" in source.text and source.fallback is not None
    assert "descriptor" not in source.fallback.text and source.fallback.fallback is None
    assert source.fallback.params == source.params and source.fallback.grid == source.grid


def test_masks_stand_only_where_something_is_cut():
    whole = print_kernel(Product("d", DType.F32, (1, 64, 64, 64)).program(Tiling())).text
    assert "mask" not in whole and "problem" not in whole
    cut = print_kernel(Product("d", DType.F32, (1, 64, 64, 65)).program(Tiling())).text
    assert "mask=offs_k_a < 65, other=0.0" in cut and "offs_m <" not in cut


def test_offsets_of_large_buffers_take_64_bits():
    program = Product("d", BF16, (1, 64, 64, 64)).program(Tiling())
    wide = tuple(dataclasses.replace(p, wide=True) for p in program.params)
    text = print_kernel(dataclasses.replace(program, params=wide)).text
    assert "offs_m.to(tl.int64) * 64" in text and "offs_k_b.to(tl.int64) * 64" in text


def walk(program: DotProgram) -> list[tuple[int, int, int]]:
    """(problem, tile row, tile column) of every tile, from the printed text."""
    text = print_kernel(program).text
    lines = [line.strip() for line in text.splitlines()]
    start = next(n for n, line in enumerate(lines) if line.startswith("for tile"))
    stop = next(n for n, line in enumerate(lines) if line.startswith("pid_n"))
    found = []
    for tile in range(program.tiles):
        scope: dict[str, int] = {"tile": tile, "p": 0, "zero": 0}
        exec("\n".join(lines[start + 1 : stop + 1]), {"min": min}, scope)
        found.append((scope["p"], scope["pid_m"], scope["pid_n"]))
    return found


@pytest.mark.parametrize(
    "shape", [(1, 64, 64, 16), (3, 640, 320, 16), (2, 448, 192, 16), (1, 64, 640, 16), (2, 640, 64, 16)]
)
@pytest.mark.parametrize("group", [1, 2, 8])
def test_every_tile_is_walked_once(shape: tuple[int, int, int, int], group: int):
    program = Product("d", BF16, shape).program(dataclasses.replace(Tiling(), group=group))
    tiles = walk(program)
    expected = {(p, m, n) for p in range(shape[0]) for m in range(shape[1] // 64) for n in range(shape[2] // 64)}
    assert len(tiles) == len(expected) and set(tiles) == expected
    rows = {m for _, m, _ in tiles[: min(group, shape[1] // 64)]}
    assert len(rows) == min(group, shape[1] // 64), "a group walks its rows first"


def test_programs_that_make_no_sense_are_refused():
    program = Product("d", BF16, (1, 64, 64, 64), residual=PLAIN).program(Tiling())
    with pytest.raises(VerifyError, match="is not of powers of two from 16 on"):
        dataclasses.replace(program, block_k=8)
    with pytest.raises(VerifyError, match="2 parts of K=64 are not parts of its problems"):
        dataclasses.replace(program, splits=2)
    mixed = tuple(dataclasses.replace(p, dtype=DType.F16) if p.name == "b" else p for p in program.params)
    with pytest.raises(VerifyError, match="the operands of a dot differ in type"):
        dataclasses.replace(program, params=mixed)
    tall = dataclasses.replace(program.epilogue, rows_per_chunk=128)
    with pytest.raises(VerifyError, match="holds one tile of rows and of columns"):
        dataclasses.replace(program, epilogue=tall)
