"""Details of the printed text: offsets, literals, hoisting, names, refusals; and the small tools below the printers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from codegen_blocks import COL, ROW, SCALAR, TILE, Block, index, param
from codegen_joint import joint_sums
from codegen_joint import reloaded as reloaded_case
from codegen_programs import cases
from megafuse.codegen.affine import Run, bounds, needed, runs
from megafuse.codegen.names import Namer
from megafuse.codegen.numpy import print_kernel as print_numpy
from megafuse.codegen.program import Axis, ColReduce, Convert, Guard, Param, Phase, TileProgram
from megafuse.codegen.triton import print_kernel as print_triton
from megafuse.codegen.triton.values import literal
from megafuse.codegen.writer import Writer
from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError

F32 = DType.F32


def one_phase(block: Block, params: tuple[Param, ...], **changes: object) -> TileProgram:
    phase = Phase("p", (), (Axis("r", 8),), (Axis("c", 64),), 2, 4, block.done(), (64,))
    return TileProgram("k", ("A kernel.",), params, (dataclasses.replace(phase, **changes),), 1)  # type: ignore[arg-type]


def copy(at=None, dtype=F32, **changes):
    block = Block()
    at = at or index(r=64, c=1)
    block.load("x", "x", at, TILE, dtype)
    block.store("y", at, "x", TILE, dtype)
    params = (param("x", dtype, (8, 64)), param("y", dtype, (8, 64), True))
    return one_phase(block, params, **changes)


def test_wide_buffers_have_64_bit_offsets_where_terms_are_large():
    at = index(r=2**30, c=1)
    program = copy(at)
    params = (dataclasses.replace(program.params[0], wide=True), program.params[1])
    text = print_triton(dataclasses.replace(program, params=params)).text
    assert "tl.load(x_ptr + row.to(tl.int64) * 1073741824 + col)" in text
    assert "tl.store(y_ptr + row * 1073741824 + col, x)" in text


def test_masks_stand_only_where_they_matter():
    assert "mask" not in print_triton(copy()).text
    assert "row_mask = row < 8" in print_triton(copy(rows_per_chunk=6)).text
    ragged = print_triton(copy(cols=(Axis("c", 60),))).text
    assert "mask=col_mask, other=0.0" in ragged
    assert "row_mask" not in ragged


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows_per_chunk": 3}, "p: chunks of 3 rows cut tiles of 2 rows"),
        ({"row_tile": 3, "rows_per_chunk": 3}, "p: tile sizes \\[3\\] are not powers of two"),
        ({"pieces": (48, 16)}, "p: tile sizes \\[48\\]"),
        ({"col_block": 24, "pieces": (32,)}, "p: tile sizes \\[24\\]"),
        ({"row_tile": 0}, "p: tile sizes \\[0\\]"),
    ],
)
def test_tiles_are_powers_of_two_and_chunks_whole_tiles(changes: dict[str, Any], message: str):
    with pytest.raises(VerifyError, match=message):
        copy(**changes)


def test_one_chunk_walks_from_row_zero():
    text = print_triton(copy(rows_per_chunk=8)).text
    assert "row = first_row + tl.arange(0, 2)[:, None]" in text
    assert "program_id" not in text


def test_column_values_are_computed_before_the_row_loop():
    block = Block()
    block.load("g", "g", index(c=1), COL, DType.BF16)
    block.load("x", "x", index(r=64, c=1), TILE, F32)
    block.map("y", "mul", "x", "g")
    block.store("y", index(r=64, c=1), "y", TILE, F32)
    params = (param("g", DType.BF16, (64,)), param("x", F32, (8, 64)), param("y", F32, (8, 64), True))
    text = print_triton(one_phase(block, params)).text
    assert text.index("g_ptr + col") < text.index("for first_row") < text.index("x_ptr + row")


def test_column_values_are_loaded_again_where_registers_are_short():
    hoisted, reloaded = (print_triton(case.program).text for case in (cases(F32)[4], reloaded_case(F32)))
    assert hoisted.index("tl.load(gamma_ptr") < hoisted.index("for first_row") < hoisted.index("tl.load(x_ptr")
    assert reloaded.index("for first_row") < reloaded.index("tl.load(gamma_ptr")


@pytest.mark.parametrize(
    ("count", "cols", "pieces", "calls"),
    [
        (1, 64, (64,), ["s1 = tl.sum(x, 1, keep_dims=True)"]),
        (2, 64, (64,), ["s1, s2 = tl.reduce((x, x2), 1, _sum2, keep_dims=True)"]),
        (
            3,
            96,
            (64, 32),
            [
                "s1_part, s2_part, s3_part = tl.reduce((x_0, x2_0, x3_0), 1, _sum3, keep_dims=True)",
                "s1_part_v2, s2_part_v2, s3_part_v2 = tl.reduce((x_1, x2_1, x3_1), 1, _sum3, keep_dims=True)",
                "s1 = s1_part + s1_part_v2",
                "s3 = s3_part + s3_part_v2",
            ],
        ),
        (
            2,
            96,
            (32, 32, 32),
            [
                "x_all = x_0 + x_1 + x_2",
                "x2_all = x2_0 + x2_1 + x2_2",
                "s1, s2 = tl.reduce((x_all, x2_all), 1, _sum2, keep_dims=True)",
            ],
        ),
        (9, 64, (64,), ["s7, s8 = tl.reduce(", "_sum8, keep_dims=True)", "s9 = tl.sum(x9, 1, keep_dims=True)"]),
    ],
)
def test_sums_side_by_side_are_one_reduction(count, cols, pieces, calls):
    text = print_triton(side_by_side(count, cols, pieces)).text
    assert [call for call in calls if call not in text] == []
    assert text.count("tl.reduce(") == (0 if count == 1 else len(pieces) if len(set(pieces)) > 1 else 1)
    assert text.count("tl.sum(") == (count in (1, 9))
    assert text.count("def _sum") == (count > 1)


def side_by_side(count, cols, pieces, fn="sum", dtype=F32):
    """``count`` reductions, of ``x``, ``x * x`` and so on."""
    block = Block()
    powers = [block.load("x", "x", index(r=cols, c=1), TILE, dtype)]
    for n in range(2, count + 1):
        powers.append(block.map(f"x{n}", "mul", powers[-1], "x", arg=dtype, out=dtype))
    for n, power in enumerate(powers, 1):
        block.reduce(f"s{n}", fn, power, TILE, dtype)
    for n in range(1, count + 1):
        block.store("y", index(n - 1, r=count), f"s{n}", ROW, dtype)
    params = (param("x", dtype, (8, cols)), param("y", dtype, (8, count), True))
    return one_phase(block, params, cols=(Axis("c", cols),), pieces=pieces)


def test_many_sums_go_by_short_names_first():
    text = print_triton(joint_sums(F32, 9, 37, (32, 8)).program).text
    assert "part, part_v2, part_v3, part_v4, part_v5, part_v6, part_v7, part_v8 = tl.reduce(" in text
    assert "sum_x = part + part_v9\n" in text and "sum_x8 = part_v8 + part_v16\n" in text


def test_only_sums_of_one_type_are_done_together():
    assert "(x, x2), " not in print_triton(side_by_side(2, 64, (64,), "max")).text
    assert "(x, x2), " not in print_triton(side_by_side(2, 64, (64,), "sum", DType.I8)).text
    assert "(x, x2), 1, _sum2" in print_triton(side_by_side(2, 64, (64,), "sum", DType.I64)).text


def test_a_sum_that_needs_another_is_not_joined_with_it():
    text = print_triton(cases(F32)[0].program).text  # the variance needs the mean
    assert text.count("tl.sum(") == 4 and "tl.reduce(" not in text


def through(dtype, middle, **changes):
    block = Block()
    block.load("x", "x", index(r=64, c=1), TILE, dtype)
    block.items.append(Convert("y", "x", TILE, F32, F32, middle))
    block.store("y", index(r=64, c=1), "y", TILE, F32)
    return one_phase(block, (param("x", dtype, (8, 64)), param("y", F32, (8, 64), True)), **changes)


def test_roundings_on_the_way():
    text = print_triton(through(F32, DType.BF16, pieces=(32, 32))).text
    assert text.count("def _round_bf16(x):") == 1
    assert "y_0 = _round_bf16(x_0)\n" in text and "y_1 = _round_bf16(x_1)\n" in text
    text = print_triton(through(F32, DType.F16)).text
    assert "y = _round_f16(x)\n" in text, "in assembly: LLVM would fuse the product before with the sum after"
    text = print_numpy(through(F32, DType.BF16)).text
    assert "y = x.astype(ml_dtypes.bfloat16).astype(np.float32)\n" in text
    assert "_round_bf16" not in print_triton(copy(dtype=DType.BF16)).text, "a store rounds as it converts"


def test_strides_that_run_together_need_no_division():
    cols = (Axis("t", 4), Axis("d", 16))
    assert "//" not in print_triton(copy(index(r=64, t=16, d=1), cols=cols)).text
    gathered = print_triton(copy(index(r=64, t=1, d=4), cols=cols)).text
    assert "t = col // 16\n" in gathered
    assert "d = col % 16\n" in gathered


def test_values_named_like_pieces_stay_apart():
    block = Block()
    block.load("x", "x", index(r=64, c=1), TILE, F32)
    block.map("x_0", "neg", "x")
    block.map("for", "add", "x_0", "x")
    block.store("x", index(r=64, c=1), "for", TILE, F32)
    program = one_phase(block, (param("x", F32, (8, 64), True),), pieces=(32, 32))
    text = print_triton(program).text
    assert "x_0_0 = x_0 * -1.0\n" in text
    assert "for_0 = x_0_0 + x_0\n" in text
    compile(text, "k", "exec")
    compile(print_numpy(program).text, "k", "exec")


@pytest.mark.parametrize(
    ("value", "dtype", "beside", "text"),
    [
        (0.1, F32, False, "0.1"),
        (math.inf, F32, False, 'float("inf")'),
        (math.nan, F32, True, 'float("nan")'),
        (1e-40, F32, True, "tl.full((), 1e-40, tl.float32)"),
        (0.1, DType.F64, True, "tl.full((), 0.1, tl.float64)"),
        (0.5, DType.F64, True, "0.5"),
        (0.5, DType.F64, False, "tl.full((), 0.5, tl.float64)"),
        (1e300, DType.F64, True, "tl.full((), 1e+300, tl.float64)"),
        (3, DType.I64, True, "3"),
        (3, DType.I64, False, "tl.full((), 3, tl.int64)"),
        (2**40, DType.I64, True, "1099511627776"),
        (-7, DType.I32, False, "-7"),
        (3, DType.U8, True, "tl.full((), 3, tl.uint8)"),
        (True, DType.BOOL, True, "tl.full((), True, tl.int1)"),
    ],
)
def test_literals_keep_their_type(value, dtype, beside, text):
    assert literal(value, dtype, ROW, beside) == text


def test_exponentials_are_fast_only_beside_16_bit_types():
    def text(dtype):
        return print_triton(next(c for c in cases(dtype) if c.name.startswith("softmax")).program).text

    assert "_exp(" in text(DType.BF16)
    assert "libdevice.exp(" in text(F32)


def test_a_store_of_a_row_value_along_the_columns_is_spread():
    block = Block()
    block.load("m", "m", index(r=1), ROW, F32)
    block.store("y", index(r=64, c=1), "m", ROW, F32)
    program = one_phase(block, (param("m", F32, (8,)), param("y", F32, (8, 64), True)), pieces=(32, 32))
    text = print_triton(program).text
    assert "tl.store(y_ptr + row * 64 + col_0, m)" in text
    assert "tl.store(y_ptr + row * 64 + col_1, m)" in text


def test_literals_can_be_converted_and_stored():
    block = Block()
    block.items.append(Convert("one", 1.0, SCALAR, F32, DType.BF16))
    block.store("y", index(r=64, c=1), 0.5, TILE, DType.F64)
    program = one_phase(block, (param("y", DType.F64, (8, 64), True),))
    assert "one = tl.full((), 1.0, tl.bfloat16)" in print_triton(program).text
    assert "np.float64(0.5)" in print_numpy(program).text


def test_a_column_reduction_over_looped_columns_and_rows_is_refused():
    block = Block()
    block.load("x", "x", index(r=64, c=1), TILE, F32)
    block.items.append(ColReduce("acc", "x", TILE, "sum", F32, "y", index(c=1), F32))
    params = (param("x", F32, (8, 64)), param("y", F32, (64,), True))
    with pytest.raises(ValueError, match="one row tile per chunk"):
        print_triton(one_phase(block, params, col_block=16, pieces=(16,)))


def test_a_value_that_needs_a_reduction_of_its_own_walk_is_refused():
    block = Block()
    block.load("x", "x", index(r=64, c=1), TILE, F32)
    block.reduce("s", "sum", "x")
    block.map("y", "div", "x", "s")
    with pytest.raises(ValueError, match="reduction of its own pass"):
        print_triton(one_phase(block, (param("x", F32, (8, 64)),), col_block=16, pieces=(16,)))


def test_phases_share_the_grid():
    program = copy()
    other = dataclasses.replace(program.phases[0], fixed=(Axis("b", 3),))
    with pytest.raises(ValueError, match="grid of the first phase"):
        print_triton(dataclasses.replace(program, phases=(*program.phases, other)))


def test_undefined_functions_are_refused():
    block = Block()
    block.map("y", "lgamma", 3, level=SCALAR, arg=DType.I32)
    with pytest.raises(ValueError, match="lgamma is not defined on i32"):
        print_triton(one_phase(block, ()))


def test_launch_data_is_passed_on():
    source = print_triton(copy())
    assert (source.entry, source.backend, source.grid) == ("k", "triton", (2, 1))
    assert source.params == (("x", F32), ("y", F32))
    assert source.writes == (1,)


def test_runs_merge_axes_of_one_stride():
    axes = (Axis("a", 3), Axis("one", 1), Axis("b", 4), Axis("c", 5))
    assert runs(index(a=20, b=5, c=1), axes) == [Run(0, 3, 1, 1, 60)]
    assert runs(index(a=2, b=100, c=20), axes) == [Run(0, 0, 2, 20, 3), Run(1, 3, 20, 1, 20)]
    assert runs(index(one=7), axes) == []


def test_guards_that_cannot_fail_are_seen():
    sizes = {"a": 4, "b": 3}
    assert bounds(index(-2, a=1, b=-5), sizes) == (-12, 1)
    assert needed(Guard(index(a=1), 0, 4), sizes) == (False, False)
    assert needed(Guard(index(-1, a=1), 0, 3), sizes) == (True, False)


def test_namer_claims_all_copies_together():
    namer = Namer()
    assert namer.claim("x", 2) == ("x_0", "x_1")
    assert namer.claim("x_1") == ("x_1_v2",)
    assert namer.one("a.b") == "a_b"
    assert namer.one("2") == "v_2"


def test_writer_wraps_calls_and_sums():
    writer = Writer()
    writer.call("f(", ["a" * 50, "b" * 50])
    writer.call("f(", ["a" * 60, "b" * 60])
    writer.assign("x", "a" * 60 + " + " + "b" * 60)
    writer.docstring(["Summary.", "More \\ text."])
    lines = writer.text.split("\n")
    assert lines[0] == f"f({'a' * 50}, {'b' * 50})"
    assert lines[1:5] == ["f(", f"    {'a' * 60},", f"    {'b' * 60},", ")"]
    assert lines[5:9] == ["x = (", f"    {'a' * 60}", f"    + {'b' * 60}", ")"]
    assert lines[9:] == ['"""Summary.', "", "More \\\\ text.", '"""', ""]
