"""The GPU demo's parts that run anywhere, and the whole of it where there is a GPU."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from megafuse.bench.step import make_step
from megafuse.cli.demo_gpu import BoundCall, Measured, make_case, results_table
from megafuse.cli.selection import Selection
from megafuse.cli.targets import make_example
from megafuse.explanation import PlanInfo


@pytest.fixture
def ffn():
    return make_example(Selection(subgraph="dense_ffn_v2", dtype="float32"), "small", "cpu")


def test_a_function_becomes_a_module_with_the_parameters_of_its_arguments(ffn):
    module = BoundCall(ffn.fn, ffn.args[1:])
    assert torch.equal(module(ffn.args[0]), ffn.fn(*ffn.args))
    assert len(list(module.parameters())) == 8


@pytest.mark.parametrize("subgraph", [None, "dense_ffn_v2"])
def test_every_target_makes_a_case_that_can_step(subgraph):
    selection = Selection(subgraph=subgraph, dtype="float32")
    case = make_case(make_example(selection, "small", "cpu"), selection)
    make_step(case, case.module)()
    assert len(case.gradients()) == 1 + len(list(case.module.parameters()))
    assert bool(case.source) is (subgraph is None)


def test_results_are_set_side_by_side(ffn):
    measured = [Measured("eager", (2000.0, 4000.0)), Measured("compile", error="did not [validate]")]
    stream = io.StringIO()
    Console(width=120, file=stream).print(results_table(measured, PlanInfo("block"), ffn))
    text = stream.getvalue()
    assert "3000.0" in text
    assert "667" in text  # 2 samples in 3 ms
    assert "did not [validate]" in text


@pytest.mark.gpu
def test_demo_on_a_gpu_times_all_rivals(megafuse_cli, tmp_path):
    path = tmp_path / "demo.json"
    sizes = ("--batch-size", 64, "--tokens", 8, "--dim", 64)
    status, out, _ = megafuse_cli("demo", *sizes, "--no-traffic", "--record", path)
    assert status == 0, out
    record = json.loads(path.read_text())
    assert record["timed"] is True
    assert [r["name"] for r in record["rivals"]] == ["eager", "compile", "megafuse"]
    assert all(len(r["samples_us"]) == 19 and r["peak"]["activation"] > 0 for r in record["rivals"])
