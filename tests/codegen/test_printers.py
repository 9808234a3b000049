"""Printed kernels give the right values: NumPy texts here, Triton texts under the interpreter in a worker process."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from codegen_abreast import abreast_cases, other_abreast_cases
from codegen_blocks import Case
from codegen_chains import chain_cases
from codegen_dots import dot_cases
from codegen_joint import joint_cases, rounding_cases, summed_cases
from codegen_maps import map_cases
from codegen_programs import cases, other_cases
from codegen_running import differences, entry, worker
from megafuse.codegen.numpy import print_kernel as print_numpy
from megafuse.codegen.triton import print_kernel as print_triton
from megafuse.core.dtypes import DType
from megafuse.core.errors import TargetError
from megafuse.runtime.shim import interpreted_kernel

FLOATS = (DType.F32, DType.F16, DType.BF16)
EVERY = [
    *(case for dtype in FLOATS for case in (*cases(dtype), *joint_cases(dtype), *dot_cases(dtype))),
    *(case for dtype in FLOATS for case in (*chain_cases(dtype), *abreast_cases(dtype))),
    *(case for through in (DType.BF16, DType.F16) for case in rounding_cases(through)),
    *other_cases(),
    *summed_cases(),
    *other_abreast_cases(),
    *map_cases(),
]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_numpy_text_matches_the_reference(case: Case, tmp_path: Path):
    source = print_numpy(case.program)
    arrays = case.arrays()
    entry(source, tmp_path)(*arrays.values())
    assert not differences(arrays, case)
    for name, array in case.inputs.items():
        assert arrays[name].tobytes() == array.tobytes(), "an input was written"


@pytest.mark.parametrize("case", [c for c in EVERY if getattr(c.program, "shares", 1) > 1], ids=lambda case: case.name)
def test_of_programs_that_share_a_tile_one_makes_each_store(case: Case):
    """They hold equal values: that two of them store one would show nowhere."""
    kernel = ast.parse(print_triton(case.program).text).body[-1]
    masks = [ast.unparse(k.value) for call in stores(kernel) for k in call.keywords if k.arg == "mask"]
    owned = [match[0] for mask in masks if (match := re.search(r"share == \d+", mask))]
    assert len(owned) == len(stores(kernel)) == sum(p.written for p in case.program.params)
    assert set(owned) == {f"share == {n}" for n in {0, case.program.shares - 1}}


def stores(tree: ast.AST) -> list[ast.Call]:
    """The stores below a node."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "tl.store"]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_no_comparison_takes_a_conjunction_for_its_operand(case: Case):
    """``a < 2 & b`` compares ``a`` with ``2 & b``."""
    for source in (print_numpy(case.program), print_triton(case.program)):
        compared = [
            operand
            for node in ast.walk(ast.parse(source.text))
            if isinstance(node, ast.Compare)
            for operand in (node.left, *node.comparators)
        ]
        joined = [o for o in compared if isinstance(o, ast.BinOp) and isinstance(o.op, ast.BitAnd | ast.BitOr)]
        assert not joined, [ast.unparse(operand) for operand in joined]


def test_the_comparison_sees_a_wrong_value(tmp_path: Path):
    case = cases(DType.F32)[0]
    arrays = case.arrays()
    entry(print_numpy(case.program), tmp_path)(*arrays.values())
    arrays["y"][5] += 1e-3
    (told,) = differences(arrays, case)
    assert told.startswith("y: 1 of") and "[5]" in told


def test_the_interpreter_refuses_roundings_to_bf16(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for case in rounding_cases(DType.BF16):
        with pytest.raises(TargetError, match="rounds to bf16 in assembly, which Triton's interpreter cannot run"):
            interpreted_kernel(print_triton(case.program))


def test_triton_texts_match_the_reference_under_the_interpreter():
    every_case = pytest.importorskip("codegen_interpret", reason="needs triton").every_case
    printed = worker("codegen_interpret.py", TRITON_INTERPRET="1")
    assert printed.split("\n")[:-1] == [f"ran {len(every_case())}"]
