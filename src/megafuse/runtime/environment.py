"""Facts of the machine that belong beside every measurement."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess

import torch

_FIELDS = (
    "name", "driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit",
    "temperature.gpu", "clocks_throttle_reasons.active",
)  # fmt: skip


def environment() -> dict[str, str]:
    """Versions, GPU, driver, and, where ``nvidia-smi`` answers, clocks (MHz), power (W) and temperature (C) of now.

    Facts that are not to be had are left out.
    """
    facts = {"python": platform.python_version(), "torch": str(torch.__version__), "system": platform.platform()}
    facts |= {name: version for name in ("triton", "numpy", "megafuse") if (version := _version(name))}
    if torch.version.cuda:
        facts["cuda"] = str(torch.version.cuda)
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        facts["gpu"] = torch.cuda.get_device_name(index)
        facts |= gpu_state(index)
    return facts


def gpu_state(index: int = 0) -> dict[str, str]:
    """Clocks, power and driver of visible GPU ``index`` by ``nvidia-smi``; empty where it does not answer in 10 s."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    selector = getattr(torch.cuda.get_device_properties(index), "uuid", None) if torch.cuda.is_available() else None
    which = f"GPU-{selector}" if selector else str(index)
    query = [tool, f"--id={which}", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [v.strip() for v in done.stdout.strip().split(",")]
    return dict(zip(_FIELDS, values, strict=True)) if len(values) == len(_FIELDS) else {}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
