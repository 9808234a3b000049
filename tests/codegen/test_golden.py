"""Printed texts are what was last looked at, and are formatted. ``MEGAFUSE_ACCEPT_GOLDEN=1`` accepts new texts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from codegen_abreast import abreast_cases, other_abreast_cases
from codegen_chains import chain_cases
from codegen_dots import dot_cases
from codegen_joint import joint_cases, rounding_cases, summed_cases
from codegen_maps import map_cases
from codegen_programs import cases, other_cases
from megafuse.codegen.numpy import print_kernel as print_numpy
from megafuse.codegen.triton import print_kernel as print_triton
from megafuse.core.dtypes import DType

GOLDEN = Path(__file__).parent / "golden"
FLOATS = (DType.BF16, DType.F32)
EVERY = (
    *(case for dtype in FLOATS for case in (*cases(dtype), *joint_cases(dtype), *abreast_cases(dtype))),
    *rounding_cases(DType.BF16),
    *(case for dtype in FLOATS for case in (*dot_cases(dtype, descriptors=True), *chain_cases(dtype))),
    *other_cases(),
    *summed_cases(),
    *other_abreast_cases(),
    *map_cases(),
)
CASES = {case.name: case for case in EVERY}
RUFF = shutil.which("ruff", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
NAMES = (
    "layer_norm_bf16_1280",
    "layer_norm_backward_bf16_1197_4",
    "layer_norm_backward_bf16_2560_1_2_abreast",
    "layer_norm_backward_f32_20_2_last_first",
    "mixing_bf16_20",
    "gather_bf16_i32_1",
    "softmax_f32_150_looped",
    "gelu_bf16_150",
    "concat_pad_f32",
    "reductions_f64_looped",
    "joint_sums_bf16_4_16_16_16",
    "apart_bf16",
    "rounding_bf16_20",
    "maps_f32",
    "dot_residual_bf16",
    "dot_sums_bf16",
    "dot_parts_bf16",
    "dot_odd_f32",
    "chain_odd_bf16",
    "chain_shared_bf16",
    "chain_sums_100_bf16",
    "chain_rows_f32",
    "chain_problems_bf16",
)
PRINTERS = {"triton": print_triton, "numpy": print_numpy}


@pytest.mark.parametrize("backend", PRINTERS)
@pytest.mark.parametrize("name", NAMES)
def test_text_is_the_accepted_one(name: str, backend: str):
    text = PRINTERS[backend](CASES[name].program).text
    path = GOLDEN / f"{name}_{backend}.py"
    if os.environ.get("MEGAFUSE_ACCEPT_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text(), "accept with MEGAFUSE_ACCEPT_GOLDEN=1 after reading the difference"


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.py")} == {
        f"{name}_{backend}" for name in NAMES for backend in PRINTERS
    }


@pytest.mark.skipif(RUFF is None, reason="needs ruff")
def test_all_texts_are_formatted(tmp_path: Path):
    for name, case in CASES.items():
        for backend, printer in PRINTERS.items():
            (tmp_path / f"{name}_{backend}.py").write_text(printer(case.program).text)
    command = [str(RUFF), "format", "--check", "--isolated", "--line-length", "120", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_printing_is_deterministic():
    for case in CASES.values():
        assert print_triton(case.program) == print_triton(case.program)
