"""Scripts, preflight and public check as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import preflight
import public_check
from rank_mixer_src.config import WorkloadConfig
from rank_mixer_src.workload import build_workload

ROOT = Path(preflight.__file__).resolve().parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
RUN_SCRIPTS = [script for script in SCRIPTS if script.name.startswith("run_")]
NEEDS_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="shows the message of a machine without a GPU")


def run_script(script: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **environ}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def echo_command(script: Path, *arguments: str, **environ: str) -> str:
    """The command that a script would start: ``echo`` stands in for the interpreter."""
    return run_script(script, *arguments, PYTHON="echo", **environ).stdout.strip()


def test_the_documented_scripts_exist() -> None:
    names = [script.stem for script in RUN_SCRIPTS]
    assert names == ["run_grouped_local", "run_minimal_local", "run_prod_local"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_bash_syntax(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("script", RUN_SCRIPTS, ids=lambda script: script.stem)
def test_scripts_pass_settings_and_arguments_on(script: Path) -> None:
    command = echo_command(script, "--k", "3", NPROC="1", WARMUP="6", NUM_TESTS="9")
    assert command.startswith("rank_mixer_src/bench_rank_mixer.py ")
    assert command.endswith("--warmup 6 --num-tests 9 --k 3")
    assert ("--gemm-backend grouped" in command) == (script.stem == "run_grouped_local")


def test_default_is_eight_workers() -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("NPROC", "USE_TORCHRUN")}
    command = ["bash", str(RUN_SCRIPTS[0])]
    started = subprocess.run(command, env={**environ, "PYTHON": "echo"}, capture_output=True, text=True, check=True)
    assert started.stdout.startswith("-m torch.distributed.run --standalone --nproc-per-node=8 rank_mixer_src/")


def test_one_worker_can_use_torchrun_and_bad_nproc_fails() -> None:
    assert "--nproc-per-node=1" in echo_command(RUN_SCRIPTS[0], NPROC="1", USE_TORCHRUN="1")
    refused = run_script(RUN_SCRIPTS[0], NPROC="0")
    assert refused.returncode == 2
    assert "NPROC" in refused.stderr


def test_prod_script_lists_backends() -> None:
    done = run_script(ROOT / "scripts" / "run_prod_local.sh", "--list-backends", NPROC="1")
    assert done.returncode == 0, done.stderr
    assert "bmm" in done.stdout
    assert "grouped" in done.stdout


def test_preflight_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main(["--target", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "float32 bmm" in printed
    assert "bfloat16 grouped" in printed
    assert "preflight: cpu ok" in printed


def test_preflight_warns_on_other_versions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(preflight, "DOCUMENTED_PYTHON", "2.7")
    assert preflight.main(["--target", "cpu"]) == 0
    assert "differs from the documented 2.7" in capsys.readouterr().err


def test_preflight_finds_bad_gradients() -> None:
    workload = build_workload(WorkloadConfig(batch_size=2, tokens=4, dim=16, dtype="float32"), device="cpu")
    with torch.no_grad():
        workload.grad_output[0, 0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="gradient of inputs is not finite"):
        preflight.check_step(workload)
    with pytest.raises(RuntimeError, match="missing"):
        preflight.check_finite("gradient", None, workload.inputs)
    with pytest.raises(RuntimeError, match="shape"):
        preflight.check_finite("gradient", torch.zeros(1), workload.inputs)


@NEEDS_NO_GPU
def test_gpu_checks_fail_clearly_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main(["--target", "cuda"]) == 1
    assert public_check.main() == 1
    assert capsys.readouterr().err.count("needs a CUDA GPU") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("script", RUN_SCRIPTS, ids=lambda script: script.stem)
@pytest.mark.parametrize("torchrun", ["0", "1"])
def test_scripts_run_the_benchmark(script: Path, torchrun: str) -> None:
    """At a small shape, by plain Python and through torchrun with its process group."""
    small = "--batch-size 4 --tokens 16 --dim 128 --warmup 1 --num-tests 3".split()
    done = run_script(script, *small, NPROC="1", USE_TORCHRUN=torchrun)
    assert done.returncode == 0, done.stderr
    assert "B=4 T=16 D=128 k=2 H=256 T_local=16" in done.stdout
    assert "A2A_bytes_per_rank=0 overlap=none mode=fwd+bwd" in done.stdout
    assert "samples=2 mean=" in done.stdout


@pytest.mark.gpu
def test_gpu_checks_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main(["--target", "cuda"]) == 0
    assert public_check.main() == 0
    assert "B=4 T=16 D=128 k=2 H=256 T_local=16" in capsys.readouterr().out


def test_public_configuration() -> None:
    config = public_check.PUBLIC_CONFIG
    assert (config.batch_size, config.tokens, config.dim, config.k, config.seed) == (4, 16, 128, 2, 7101)
    assert (config.ffn_type, config.gemm_backend, config.warmup, config.num_tests) == ("dense_v2", "bmm", 2, 3)
