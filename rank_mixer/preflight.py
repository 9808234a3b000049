"""Environment check: ``python preflight.py --target cpu`` or ``--target cuda``.

Versions other than the documented ones give a warning. The check fails only where the full block does not run, or
gives an output or gradient that is missing, of a wrong shape or not finite. It measures no time.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

import torch
from torch import Tensor

from rank_mixer_src.config import WorkloadConfig
from rank_mixer_src.gemm import GEMM_BACKENDS
from rank_mixer_src.worker import Worker, require_gpu
from rank_mixer_src.workload import Workload, build_workload, check_output_shape

TARGETS = ("cpu", "cuda")
CHECK_DTYPES = ("float32", "bfloat16")
DOCUMENTED_PYTHON = "3.12"
DOCUMENTED_NCCL = "2.21.5"
DOCUMENTED_CAPABILITY = (9, 0)
DOCUMENTED_PACKAGES = {
    "cpu": {"torch": "2.6.0", "numpy": "1.26.4"},
    "cuda": {"torch": "2.6.0+cu126", "triton": "3.2.0", "numpy": "1.26.4"},
}


def _compare(name: str, found: str, documented: str) -> str | None:
    if found == documented:
        return None
    return f"{name} {found} differs from the documented {documented}"


def _installed_version(package: str, target: str) -> str:
    try:
        version = metadata.version(package) if package != "torch" else str(torch.__version__)
    except metadata.PackageNotFoundError:
        return "(not installed)"
    return version.split("+")[0] if target == "cpu" else version


def environment_warnings(target: str) -> list[str]:
    """Everything about this environment that differs from the documented one for ``target``."""
    found = [_compare("Python", platform.python_version().rpartition(".")[0], DOCUMENTED_PYTHON)]
    for package, documented in DOCUMENTED_PACKAGES[target].items():
        found.append(_compare(package, _installed_version(package, target), documented))
    if target == "cuda":
        found += _gpu_comparisons()
    return [warning for warning in found if warning is not None]


def _gpu_comparisons() -> list[str | None]:
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    documented = ".".join(map(str, DOCUMENTED_CAPABILITY))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return [
        _compare("compute capability", capability, documented),
        _compare("NCCL", nccl, DOCUMENTED_NCCL),
        _compare("CUDA of PyTorch", str(torch.version.cuda), "12.6"),
    ]


def check_finite(name: str, value: Tensor | None, like: Tensor) -> None:
    """Raise :class:`RuntimeError` unless ``value`` exists, has the shape of ``like`` and is finite."""
    if value is None:
        raise RuntimeError(f"{name} is missing")
    if value.shape != like.shape:
        raise RuntimeError(f"{name} has shape {list(value.shape)}, expected {list(like.shape)}")
    if not bool(torch.isfinite(value).all()):
        raise RuntimeError(f"{name} is not finite")


def check_step(workload: Workload) -> int:
    """Run one step and check output, input gradient and every parameter gradient; returns how many gradients."""
    out = workload.step()
    check_output_shape(out, workload.inputs)
    check_finite("output", out, workload.inputs)
    check_finite("gradient of inputs", workload.inputs.grad, workload.inputs)
    parameters = dict(workload.block.named_parameters())
    for name, parameter in parameters.items():
        check_finite(f"gradient of {name}", parameter.grad, parameter)
    return 1 + len(parameters)


def check_block(device: str) -> None:
    """Run the full block at (B, T, D, k) = (2, 4, 16, 2), EP=1, in each dtype with each GEMM backend."""
    for dtype in CHECK_DTYPES:
        for backend in sorted(GEMM_BACKENDS):
            config = WorkloadConfig(batch_size=2, tokens=4, dim=16, k=2, dtype=dtype, gemm_backend=backend)
            gradients = check_step(build_workload(config, device=device))
            print(f"ok: block B=2 T=4 D=16 k=2 EP=1 {dtype} {backend}: output and {gradients} gradients finite")


def main(argv: Sequence[str] | None = None) -> int:
    """Check one target; returns the exit status."""
    parser = argparse.ArgumentParser(description="Check the environment and run the full block once.")
    parser.add_argument("--target", choices=TARGETS, required=True)
    target = parser.parse_args(argv).target
    try:
        if target == "cuda":
            require_gpu(Worker())
            print(f"GPU: {torch.cuda.get_device_name()}")
        for warning in environment_warnings(target):
            print(f"warning: {warning}", file=sys.stderr)
        check_block(target)
    except RuntimeError as error:
        print(f"preflight: error: {error}", file=sys.stderr)
        return 1
    print(f"preflight: {target} ok (PyTorch {torch.__version__})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
