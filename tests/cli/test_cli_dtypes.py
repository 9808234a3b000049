"""All commands and benchmarks take element types by their short and their long names."""

from __future__ import annotations

import pytest
import torch

from megafuse.bench import mlp, rank_mixer, workloads
from megafuse.cli.demo_cpu import check_cases
from megafuse.cli.fuzz import cases
from megafuse.cli.inputs import parse_input
from megafuse.cli.selection import Selection
from megafuse.core.errors import InputError

CPU = torch.device("cpu")
NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
DOORS = {
    "--input": lambda dtype: str(parse_input(f"2,3:{dtype}", CPU).dtype),
    "demo": lambda dtype: [case[1:] for case in check_cases(Selection(dtype=dtype))],
    "fuzz": lambda dtype: cases(0, 2, dtype, "cpu"),
    "bench mlp": lambda dtype: mlp.sources(mlp.build_parser().parse_args(["--dtype", dtype])),
    "bench rank_mixer": lambda dtype: rank_mixer.sources("small", dtype, 1),
    "bench workloads": lambda dtype: workloads.sources("block", dtype, "gpu"),
}


@pytest.mark.parametrize("door", DOORS)
def test_both_spellings_are_one_type(door):
    for short, long in NAMES.items():
        assert DOORS[door](short) == DOORS[door](long)
    assert DOORS[door]("bf16") != DOORS[door]("fp16")


@pytest.mark.parametrize("door", DOORS)
def test_an_unknown_type_is_answered_with_what_is_known(door):
    with pytest.raises(InputError, match=r"unknown element type 'float3'(.|\n)*use one of(.|\n)*float16"):
        DOORS[door]("float3")


def test_tf32_where_it_is_known():
    assert {s["dtype"] for s in rank_mixer.sources("small", "tf32", 1)} == {"tfloat32"}
    assert {s["dtype"] for s in workloads.sources("block", "tf32", "gpu")} == {"tfloat32"}


@pytest.mark.parametrize("command", ["explain", "check"])
def test_commands_on_a_module(megafuse_cli, command):
    named = (command, "--module", "cli_modules:gated", "--input", "2,16", "--dtype")
    status, out, err = megafuse_cli(*named, "bf16")
    assert status == 0
    assert (status, out, err) == megafuse_cli(*named, "bfloat16")
