"""Printed kernels give the right values: NumPy texts here, Triton texts under the interpreter in a worker process."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen_blocks import Case
from codegen_maps import map_cases
from codegen_programs import cases, other_cases
from codegen_running import differences, entry, worker
from megafuse.codegen.numpy import print_kernel as print_numpy
from megafuse.core.dtypes import DType

EVERY = [*cases(DType.F32), *cases(DType.F16), *cases(DType.BF16), *other_cases(), *map_cases()]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_numpy_text_matches_the_reference(case: Case, tmp_path: Path):
    source = print_numpy(case.program)
    arrays = case.arrays()
    entry(source, tmp_path)(*arrays.values())
    dtypes = {param.name: param.dtype for param in case.program.params}
    assert not differences(arrays, case.expected, dtypes, case.tolerance)
    for name, array in case.inputs.items():
        assert arrays[name].tobytes() == array.tobytes(), "an input was written"


def test_the_comparison_sees_a_wrong_value(tmp_path: Path):
    case = cases(DType.F32)[0]
    arrays = case.arrays()
    entry(print_numpy(case.program), tmp_path)(*arrays.values())
    arrays["y"][5] += 1e-3
    assert differences(arrays, case.expected, {p.name: p.dtype for p in case.program.params}, 0.0)


def test_triton_texts_match_the_reference_under_the_interpreter():
    printed = worker("codegen_interpret.py", TRITON_INTERPRET="1")
    count = len(cases(DType.F32)) + len(cases(DType.F16)) + len(other_cases()) + len(map_cases())
    assert printed.split("\n")[:-1] == [f"ran {count}"]
