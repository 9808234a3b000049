"""Every command on small modules: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megafuse.cli import demo as demo_command
from megafuse.cli import demo_cpu, running
from megafuse.cli.planning import plan_selection
from megafuse.cli.selection import Selection
from megafuse.cli.targets import make_example
from megafuse.runtime.plan_store import Entry, write_entry

GATED = ("--module", "cli_modules:gated", "--input", "6,16:float32")
FFN = ("--workload", "gelu_ffn")
SOURCE = Path(__file__).resolve().parents[2] / "src"


def test_help_lists_the_commands_that_exist(megafuse_cli):
    status, out, _ = megafuse_cli("--help")
    assert status == 0
    for command in ("demo", "explain", "show", "check", "fuzz", "tune", "doctor", "cache"):
        assert command in out
    for later in ("profile", "ablate"):
        assert later not in out


def test_explain(megafuse_cli):
    status, out, _ = megafuse_cli("explain", *GATED)
    assert status == 0
    for part in ("forward", "backward", "boundaries", "saved for backward", "100.0 % generated", "eager:", "torch."):
        assert part in out


@pytest.mark.parametrize(
    ("stage", "parts"),
    [
        ("graph", ("inputs:", "forward:", "backward:", "gradient of")),
        ("plan", ("forward", "totals")),
        ("schedule", ("buffers", "pool of backward: ", "launch k0", "free ", "outputs:")),
        ("code", ("import triton", "def forward", "def backward", "# ---- launch code")),
    ],
)
def test_show(megafuse_cli, stage, parts):
    status, out, _ = megafuse_cli("show", stage, *GATED)
    assert status == 0
    for part in parts:
        assert part in out


def test_show_one_kernel_as_numpy(megafuse_cli):
    status, out, _ = megafuse_cli("show", "code", *GATED, "--backend", "numpy", "--kernel", "k0")
    assert status == 0
    assert "import numpy" in out
    assert "launch code" not in out


def test_check_of_the_tile_programs(megafuse_cli):
    status, out, _ = megafuse_cli("check", *GATED, "--device", "cpu", "--seeds", 1)
    assert status == 0, out
    assert "passed (1 seed, 3 repeats, " in out
    assert out.endswith("the generated programs ran as NumPy on the CPU; nothing ran on a GPU\n")


def test_doctor(megafuse_cli, tmp_path):
    status, out, _ = megafuse_cli("doctor")
    assert status == 0
    assert torch.__version__ in out
    assert str(tmp_path / "cache") in out
    assert ("run and time kernels" in out) == (torch.cuda.is_available() or "no    run" in out)


def test_cache_is_shown_and_cleared(megafuse_cli, tmp_path):
    folder = tmp_path / "cache" / "sources"
    folder.mkdir(parents=True)
    (folder / "k.py").write_text("x" * 1000)
    assert "1 file, 1 kB" in megafuse_cli("cache")[1]
    assert "deleted 1 file," in megafuse_cli("cache", "--clear")[1]
    assert (tmp_path / "cache").is_dir()
    assert "0 files" in megafuse_cli("cache")[1]


@pytest.mark.parametrize("workload", ["rank_mixer_block", "gelu_ffn"])
def test_full_sizes_are_planned_without_data(workload):
    example = make_example(Selection(workload=workload), "full", "meta")
    assert {p.device.type for p in example.fn.parameters()} == {"meta"}
    assert example.args[0].device.type == "meta"
    assert example.args[0].requires_grad


def test_the_block_and_its_ffn_come_from_the_reference_package():
    block = make_example(Selection(), "odd", "cpu", "float32")
    assert type(block.fn).__module__ == "rank_mixer_src.block"
    assert block.args[0].shape == (3, 5, 35)
    ffn = make_example(Selection(subgraph="dense_ffn_v2", batch_size=7), "small", "cpu")
    assert ffn.fn.__name__ == "dense_ffn_v2_compute"
    assert len(ffn.args) == 7
    assert ffn.args[0].shape == (7, 4, 16)


def test_equal_seeds_give_equal_inputs():
    one, two = (make_example(Selection(), "small", "cpu") for _ in range(2))
    assert torch.equal(one.args[0], two.args[0])
    assert torch.equal(one.fn.ffn.w1, two.fn.ffn.w1)


class SameProcess:
    """Stands in for the demo's process pool."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, job, *args):
        done = demo_cpu.Future()
        done.set_result(job(*args))
        return done


@pytest.fixture
def quick_demo(monkeypatch):
    """The demo in this process, with compilation left out."""
    monkeypatch.setattr(demo_cpu, "ProcessPoolExecutor", SameProcess)
    monkeypatch.setattr(demo_cpu, "compile_offline", lambda kernels, arch, processes: [])
    monkeypatch.setattr(demo_command, "pick_device", lambda selection: "cpu")


@pytest.mark.usefixtures("quick_demo")
def test_demo_without_a_gpu_says_that_nothing_was_timed(megafuse_cli, tmp_path):
    path = tmp_path / "deep" / "demo.json"
    status, out, _ = megafuse_cli("demo", *GATED, "--record", path)
    assert status == 0, out
    assert "nothing is timed" in out
    assert "Nothing was timed" in out
    assert str(path) in out.replace("\n", "")
    record = json.loads(path.read_text())
    assert record["timed"] is False
    assert record["ok"] is True
    assert record["plan"]["generated_share"] == 1.0
    assert record["plan"]["predicted"]["seconds"] > 0
    assert any(c.get("tensors", 0) >= 6 for c in record["checks"])


@pytest.mark.usefixtures("quick_demo")
def test_demo_ends_with_status_1_when_a_check_fails(megafuse_cli, monkeypatch, tmp_path):
    def failing(*_, **__):
        return {"title": "block", "ok": False, "error": "grad w1: RMS error [too large]"}

    monkeypatch.setattr(demo_cpu, "check_job", failing)
    status, out, _ = megafuse_cli("demo", *GATED, "--record", tmp_path / "demo.json")
    assert status == 1
    assert "CHECKS FAILED" in out
    assert "grad w1: RMS error [too large]" in out


def test_demo_checks_two_shapes_in_two_types_whatever_sizes_are_measured():
    cases = demo_cpu.check_cases(Selection(batch_size=4096, dim=1280, tokens=64))
    assert [(size, dtype) for _, size, dtype in cases] == [
        ("small", "bfloat16"), ("small", "float32"), ("odd", "bfloat16"), ("odd", "float32"),
    ]  # fmt: skip
    assert all(not s.sizes for s, _, _ in cases)


def test_compile_failures_fail_the_demo():
    planned = demo_cpu.PlanResult("block", None, (), error="ValueError: no text")
    assert not demo_cpu._compile_check(planned, [])["ok"]


def test_plans_for_other_architectures():
    planned = plan_selection(Selection(workload="gelu_ffn"), 80, size="small")
    assert planned.info().device.endswith("(sm_80)")


def test_import_of_the_package_does_not_load_torch():
    code = "import sys, megafuse; assert 'torch' not in sys.modules; dir(megafuse); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SOURCE, timeout=60)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_tuning_needs_a_gpu(megafuse_cli):
    status, _, err = megafuse_cli("tune", *GATED)
    assert status == 2
    assert "no CUDA device" in err


def kept_entry(name, **changes):
    tile = {
        "row_tile": 2, "rows_per_chunk": 8, "pieces": [64, 32], "col_block": 0, "col_grid": False, "num_stages": 3,
        "hoist": True, "abreast": 1, **changes,
    }  # fmt: skip
    facts = {
        "tuned_seconds": 1e-5,
        "registers": 40,
        "spills": 0,
        "occupancy": 0.5,
        "copy_share": 0.81,
        "limit": "memory",
    }
    return Entry(name * 8, name, (tile,), 4, 1e-5, 2.5e-5, facts)


def test_the_cache_lists_what_was_measured_and_drops_it_alone(megafuse_cli, tmp_path):
    assert "nothing measured" in megafuse_cli("cache", "--tuned")[1]
    (tmp_path / "cache" / "kept.txt").write_text("x")
    write_entry(kept_entry("k0_x"), "NVIDIA H200")
    write_entry(kept_entry("k1_y", row_tile=1, abreast=2), "NVIDIA H200")
    assert "2 kernels measured on NVIDIA H200" in megafuse_cli("cache")[1]
    listed = megafuse_cli("cache", "--tuned")[1]
    (line,) = [one for one in listed.splitlines() if "k0_x" in one]
    for part in ("25 us", "10 us", "2.50x", "2 x 64+32 in 8, 4 warps, 3 stages", "40", "50 %", "81 %", "memory"):
        assert part in line
    assert "2 abreast x 64+32 in 8, 4 warps" in next(one for one in listed.splitlines() if "k1_y" in one)
    assert "deleted 2 files" in megafuse_cli("cache", "--clear", "--tuned")[1]
    assert (tmp_path / "cache" / "kept.txt").is_file()
    assert "nothing measured" in megafuse_cli("cache", "--tuned")[1]


def test_dots_reach_the_planner(megafuse_cli):
    status, out, _ = megafuse_cli("explain", *FFN, "--dots", "auto")
    assert status == 0
    assert "is multiplied by a generated kernel" in out
    status, _, err = megafuse_cli("explain", *FFN, "--dots", "fast")
    assert status == 2
    assert "unknown way to run dots: 'fast'" in err


def test_dots_reach_the_check(megafuse_cli, monkeypatch):
    asked = []
    fuse = running.fuse
    monkeypatch.setattr(running, "fuse", lambda *a, **k: asked.append(k["dots"]) or fuse(*a, **k))
    status, out, _ = megafuse_cli("check", *FFN, "--device", "cpu", "--seeds", 1, "--dots", "auto")
    assert status == 0, out
    assert asked == ["auto"]


def test_explain_with_a_budget_of_memory(megafuse_cli):
    status, out, _ = megafuse_cli("explain", *FFN, "--memory-budget", 500)
    assert status == 0
    assert "memory_budget of 500.0 MB" in out and "memory: at most" in out
