"""What works on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from megafuse.cli.cache import cache_report
from megafuse.runtime.environment import environment
from megafuse.runtime.shim import interpreting


def doctor_report() -> str:
    """Versions, GPU, compilers, cache, and what follows from them."""
    facts = environment()
    rows = [*facts.items(), *_tools(), ("cache", cache_report().replace("\n", ": "))]
    width = max(len(name) for name, _ in rows)
    return "\n".join([*(f"{name.ljust(width)}  {value}" for name, value in rows), "", *_verdicts()])


def _tools() -> list[tuple[str, str]]:
    return [
        ("GPU", torch.cuda.get_device_name() if torch.cuda.is_available() else "none that this PyTorch can use"),
        ("Triton", "installed" if _has_triton() else "not installed"),
        ("C compiler", _compiler() or "none found"),
        ("ncu", shutil.which("ncu") or "none found"),
    ]


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _verdicts() -> list[str]:
    gpu, triton = torch.cuda.is_available(), _has_triton()
    lines = ["ok    plan, explain, show, and check of the tile programs on the CPU"]
    lines.append("ok    compile kernels without a GPU" if triton else "no    compile kernels: install triton")
    if not gpu:
        lines.append("no    run and time kernels: there is no GPU that this PyTorch can use")
    elif interpreting():
        lines.append("no    run kernels: TRITON_INTERPRET is set; unset it")
    elif not triton:
        lines.append("no    run kernels: install triton")
    else:
        lines.append("ok    run and time kernels")
        if _compiler() is None:
            lines.append("warn  Triton builds its launcher with a C compiler: install one, or name it in CC")
    return lines


def _compiler() -> str | None:
    return os.environ.get("CC") or next((p for n in ("cc", "gcc", "clang") if (p := shutil.which(n))), None)
