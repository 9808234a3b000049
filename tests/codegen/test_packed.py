"""Arithmetic of bf16 values in pairs: what is rewritten, and what must not be."""

from __future__ import annotations

from codegen_blocks import COL, TILE, Block, index
from megafuse.codegen.program import Axis, Compute, Convert, Load, Phase, Statement
from megafuse.codegen.triton.packed import pack
from megafuse.codegen.walk import statements
from megafuse.core.dtypes import DType

BF16, F32 = DType.BF16, DType.F32


def packed(build, row_tile: int = 2, width: int = 8) -> list[Statement]:
    block = Block()
    build(block)
    phase = Phase("p", (), (Axis("r", row_tile),), (Axis("c", width),), row_tile, row_tile, block.done(), (width,))
    return list(statements(pack(phase)))


def load(b: Block, name: str, level=TILE) -> None:
    """``name`` in fp32, loaded as bf16."""
    b.items.append(Load(f"{name}_v", name, index(r=8, c=1) if level is TILE else index(c=1), level, BF16))
    b.items.append(Convert(name, f"{name}_v", level, BF16, F32))


def rounded(b: Block, dst: str, src: str) -> None:
    b.items.append(Convert(dst, src, TILE, F32, F32, BF16))


def pairs(found: list[Statement]) -> list[Compute]:
    return [s for s in found if isinstance(s, Compute) and s.dtype is BF16]


def test_a_rounded_sum_of_loaded_values_is_one_packed_sum():
    def build(b):
        load(b, "x")
        load(b, "bias", COL)
        b.map("s", "add", "x", "bias")
        rounded(b, "z", "s")
        b.map("y", "exp", "z")
        b.store("y", index(r=8, c=1), "y", TILE, F32)

    found = packed(build)
    assert pairs(found) == [Compute("z_half", "add", ("x_v", "bias_v"), TILE, BF16, BF16)]
    assert [s.dst for s in found if isinstance(s, Convert)] == ["z"], "operands are not widened, the sum is"


def test_chains_of_rounded_arithmetic_stay_in_bf16():
    def build(b):
        load(b, "x")
        load(b, "y")
        b.map("p", "mul", "x", "y")
        rounded(b, "a", "p")
        b.map("q", "sub", "a", "y")
        b.store("out", index(r=8, c=1), "q", TILE, BF16)

    found = packed(build)
    assert [(s.fn, s.args) for s in pairs(found)] == [("mul", ("x_v", "y_v")), ("sub", ("a_half", "y_v"))]
    assert not [s for s in found if isinstance(s, Convert)]


def test_a_value_rounded_twice_is_rounded_once():
    def build(b):
        load(b, "x")
        b.map("e", "exp", "x")
        b.store("y", index(r=8, c=1), "e", TILE, BF16)
        rounded(b, "again", "e")
        b.map("z", "exp", "again")
        b.store("z", index(r=8, c=1), "z", TILE, F32)

    found = packed(build)
    assert [s.dst for s in found if isinstance(s, Convert) and s.src_dtype is F32] == ["e_out"]


def test_what_is_read_in_fp32_is_not_packed():
    def build(b):
        load(b, "x")
        load(b, "y")
        b.map("s", "add", "x", "y")
        rounded(b, "z", "s")
        b.map("both", "mul", "z", "s")  # the sum before rounding is needed too
        b.store("both", index(r=8, c=1), "both", TILE, F32)

    assert not pairs(packed(build))


def test_fp32_operands_and_other_functions_are_not_packed():
    def build(b):
        load(b, "x")
        b.map("e", "exp", "x")
        b.map("s", "add", "x", "e")
        rounded(b, "z", "s")
        b.map("d", "div", "z", "x")
        rounded(b, "w", "d")
        b.store("w", index(r=8, c=1), "w", TILE, F32)

    assert not pairs(packed(build))


def test_single_elements_are_not_paired():
    def build(b):
        load(b, "x")
        load(b, "y")
        b.map("s", "add", "x", "y")
        rounded(b, "z", "s")
        b.store("z", index(r=8, c=1), "z", TILE, F32)

    assert pairs(packed(build))
    assert not pairs(packed(build, row_tile=1, width=1))
