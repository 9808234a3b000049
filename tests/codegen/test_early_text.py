"""Kernels that may be launched early wait first: in the text, and in code for sm_90 at no cost in registers."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from codegen_abreast import abreast_cases, other_abreast_cases
from codegen_blocks import Case
from codegen_chains import chain_cases
from codegen_dots import dot_cases, production_cases
from codegen_joint import joint_cases
from codegen_maps import map_cases
from codegen_programs import cases, other_cases
from codegen_running import worker
from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.numpy import print_kernel as print_numpy
from megafuse.codegen.triton import print_kernel as print_triton
from megafuse.core.dtypes import DType

EVERY = [
    *(
        case
        for dtype in (DType.BF16, DType.F32)
        for case in (*cases(dtype), *joint_cases(dtype), *abreast_cases(dtype), *chain_cases(dtype), *dot_cases(dtype))
    ),
    *other_cases(),
    *other_abreast_cases(),
    *map_cases(),
    *production_cases(),
]
# A map, reductions, phases, kernels side by side, chains, products by pointers and by descriptors.
KINDS = ["gelu_bf16_150", "layer_norm_backward_bf16_1280_1", "mixing_bf16_16", "apart_bf16", "chain_walk_bf16"]
KINDS += ["chain_turned_bf16", "dot_residual_bf16", "production_act"]


def waits(source: KernelSource) -> bool:
    """Whether the kernel's last parameter is ``early``, and its first statement waits where that is true."""
    tree = ast.parse(source.text)
    (kernel,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == source.entry)
    _, first, *_ = kernel.body  # behind the docstring
    told = kernel.args.args[-1].arg == "early" and ast.unparse(kernel.args.defaults[-1]) == "False"
    assert told == (ast.unparse(first) == "if early:\n    _wait_for_kernel_before()")
    assert told == ("griddepcontrol.wait" in source.text)
    return told


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_a_text_waits_first_where_its_record_says_so(case: Case) -> None:
    source = print_triton(case.program)
    for one in (source, *([source.fallback] if source.fallback else [])):
        assert one.waits and waits(one)
    for one in (print_triton(case.program, assembly=False), print_numpy(case.program)):
        assert not one.waits and "early" not in one.text.split("def " + one.entry)[1].split(":\n")[0]


def compiled(**environment: str) -> dict[str, Any]:
    printed = worker("codegen_compile.py", *KINDS, **environment).split("\n")
    records = [json.loads(line) for line in printed if line.startswith("{")]
    return {record.pop("name"): record for record in records}


@pytest.mark.timeout(900)
def test_waiting_changes_nothing_else() -> None:
    versions = pytest.importorskip("codegen_versions", reason="needs triton")
    if not versions.LAUNCHES_EARLY:
        pytest.skip("this Triton launches no kernel early")
    early, serial = compiled(MEGAFUSE_NO_PDL="0"), compiled(MEGAFUSE_NO_PDL="1")
    assert set(early) == set(serial) == set(KINDS)
    for name, record in early.items():
        assert record.pop("early") and not serial[name].pop("early"), name
        assert record.pop("waits") == ["1 times, first"] * 2, name
        assert serial[name].pop("waits") == ["0 times"] * 2, name
        assert record == serial[name], name
