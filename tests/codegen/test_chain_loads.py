"""Where a chain's rows and matrices are loaded, in the Triton text."""

from __future__ import annotations

import pytest

from codegen_chains import Chain
from megafuse.codegen.triton.chain import print_chain
from megafuse.core.dtypes import DType


def lines(chain: Chain) -> list[str]:
    """The kernel's body."""
    text = print_chain(chain.program()).text
    return [line.strip() for line in text[text.rindex("def ") :].splitlines()]


def place(found: list[str], start: str) -> int:
    (at,) = [n for n, line in enumerate(found) if line.startswith(start)]
    return at


def early(**changes: bool) -> list[str]:
    """The walk over the tiles."""
    found = lines(Chain("c", DType.F16, 100, (16, 32, 16), 16, 48, early=True, **changes))
    return found[place(found, "for ") :]


@pytest.mark.parametrize("twice", [False, True])
def test_the_next_rows_are_loaded_when_the_present_ones_are_taken_over(twice: bool) -> None:
    walk = early(twice=twice)
    assert place(walk, "x_v1_f16 = x_v1_f16_ahead") < place(walk, "x_v1_f16_ahead = tl.load(")


def test_beside_several_sums_the_next_rows_are_loaded_before_the_last() -> None:
    walk = early(twice=True)
    assert place(walk, "acc1 = ") < place(walk, "x_v1_f16_ahead = tl.load(") < place(walk, "sums1 = ")
    walk = early()
    assert place(walk, "x_v1_f16_ahead = tl.load(") < place(walk, "acc0 = ")


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_program_of_one_tile_loads_so_many_matrices_and_their_rows_before_it_works(first: int) -> None:
    found = lines(Chain("c", DType.F16, 32, (16, 32, 16), 32, 32, turned=True, shares=2, first=first))
    work = place(found, "x_v1 = ")
    assert place(found, "x_v1_f16 = tl.load(") < work
    assert [name for name in ("w1", "w2") if place(found, f"{name} = tl.load(") < work] == ["w1", "w2"][:first]
