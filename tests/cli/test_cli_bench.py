"""``megafuse bench``: the list, options passed on as they are, and errors."""

from __future__ import annotations

import pytest
import torch

from megafuse.bench import mlp
from megafuse.cli import bench

NEEDS_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@pytest.mark.parametrize("argv", [("bench",), ("bench", "--help")])
def test_the_list(megafuse_cli, argv):
    status, out, _ = megafuse_cli(*argv)
    assert status == 0
    for name in bench.BENCHES:
        assert name in out


def test_options_are_passed_on_as_they_are(megafuse_cli, monkeypatch):
    seen = []
    monkeypatch.setattr(mlp, "main", lambda argv: seen.append(argv) or 1)
    status, _, _ = megafuse_cli("bench", "mlp", "--sizes", "64,128", "--json", "--D=32", "--help")
    assert status == 1
    assert seen == [["--sizes", "64,128", "--json", "--D=32", "--help"]]


def test_an_unknown_benchmark_is_named(megafuse_cli):
    status, _, err = megafuse_cli("bench", "speed")
    assert status == 2
    assert "no benchmark 'speed'" in err


@pytest.mark.parametrize("name", ["mlp", "weightnorm"])
def test_help_of_a_benchmark(megafuse_cli, name):
    status, out, _ = megafuse_cli("bench", name, "--help")
    assert status == 0
    assert f"usage: megafuse bench {name}" in out
    for option in ("--sizes", "--D ", "--H ", "--OUT", "--layers", "--activation", "--dtype", "--warmup", "--iters",
                   "--mode", "--json"):  # fmt: skip
        assert option in out


@NEEDS_NO_GPU
def test_bad_options_end_with_status_2(megafuse_cli):
    status, out, _ = megafuse_cli("bench", "mlp", "--sizes", "none")
    assert status == 2
    assert "argument --sizes" in out


@NEEDS_NO_GPU
def test_resources_are_shown_without_a_gpu(megafuse_cli):
    pytest.importorskip("triton")
    status, out, _ = megafuse_cli("explain", "--workload", "tiny_mlp", "--dtype", "float32", "--resources")
    assert status == 0
    assert " registers, " in out
    assert "of its threads, limited by" in out
    assert "paced by" in out
    assert "registers" not in megafuse_cli("explain", "--workload", "tiny_mlp", "--dtype", "float32")[1]
