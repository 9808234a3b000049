"""DRAM traffic of one step, measured by Nsight Compute in a process of its own, by kernel."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megafuse.bench.cases import ROOT
from megafuse.core.errors import TargetError

READ, WRITE, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
FLAGS = ("--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none")
WORKER = "megafuse.bench.ncu_worker"
_UNITS = {
    "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9,
    "nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6,
}  # fmt: skip


@dataclass(frozen=True)
class NcuJob:
    """One measurement: the case's source, the rival's name, and a time limit in seconds."""

    source: Mapping[str, Any]
    rival: str
    timeout: float = 240.0


@dataclass(frozen=True)
class KernelTraffic:
    """One launch: DRAM bytes read and written, and its duration under the profiler in microseconds."""

    name: str
    read: float
    written: float
    microseconds: float

    @property
    def total(self) -> float:
        """Bytes read plus written."""
        return self.read + self.written


@dataclass(frozen=True)
class Traffic:
    """All launches of one step, in order; sums in bytes and microseconds."""

    kernels: tuple[KernelTraffic, ...]
    command: str = ""

    @property
    def total(self) -> float:
        """Bytes read plus written by all launches."""
        return sum(k.total for k in self.kernels)

    def as_dict(self) -> dict[str, Any]:
        """Sums and launches for a record."""
        read, written = sum(k.read for k in self.kernels), sum(k.written for k in self.kernels)
        time = sum(k.microseconds for k in self.kernels)
        sums = {"unit": "bytes", "total": self.total, "read": read, "written": written, "kernel_us": time}
        return {**sums, "launches": [asdict(k) for k in self.kernels], "command": self.command}


def ncu_command(job: NcuJob, log: Path, ncu: str = "ncu", python: str = sys.executable) -> list[str]:
    """The profiler's command line; the table goes to ``log``."""
    metrics = ("--metrics", f"{READ},{WRITE},{TIME}")
    output = ("--csv", "--print-units", "base", "--log-file", str(log))
    spec = json.dumps({"source": dict(job.source), "rival": job.rival})
    return [ncu, *FLAGS, *metrics, *output, python, "-m", WORKER, spec]


def measure_traffic(job: NcuJob) -> Traffic:
    """Run the profiler and read its table.

    Raises:
        TargetError: no ncu, it failed, it took too long, or it profiled nothing; the text holds the end of its output.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise TargetError("ncu (Nsight Compute) is not on the PATH", hint="traffic is measured only where it is")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = ncu_command(job, log, ncu)
        output = _run(command, job.timeout)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    kernels = parse_ncu(text)
    if not kernels:
        raise TargetError(f"ncu profiled no kernel: {(text + output)[-1500:]}")
    shown = ncu_command(job, Path("ncu.csv"), python="python")
    return Traffic(tuple(kernels), " ".join(shown))


def _run(command: Sequence[str], timeout: float) -> str:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, env=environ, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TargetError(f"ncu took more than {timeout:g} s") from error
    return f"exit status {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"


def parse_ncu(text: str) -> list[KernelTraffic]:
    """Launches in ``ncu --csv`` output (one line per launch and metric), in order; other lines are skipped."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        launch = found.setdefault(row["ID"], {"name": short_name(row["Kernel Name"])})
        if (value := _number(row["Metric Value"], row["Metric Unit"])) is not None:
            launch[row["Metric Name"]] = value
    return [
        KernelTraffic(k["name"], k.get(READ, 0.0), k.get(WRITE, 0.0), k.get(TIME, 0.0))
        for k in found.values()
        if READ in k or WRITE in k
    ]


def _number(text: str, unit: str) -> float | None:
    """A metric in bytes or microseconds; None for "n/a" and other words."""
    try:
        return float(text.replace(",", "")) * _UNITS.get(unit.strip().lower(), 1.0)
    except ValueError:
        return None


def short_name(name: str) -> str:
    """A kernel's name without its parameter list (Triton's have none; template arguments stay)."""
    return name.rsplit("(", 1)[0].strip() if name.endswith(")") else name.strip()


def join_predicted(
    kernels: Iterable[KernelTraffic], predicted: Mapping[str, int], copy_rate: float = 0.0
) -> list[dict[str, Any]]:
    """Launches summed by name, most bytes first, beside the predicted bytes; ``share_of_copy`` from measured bytes."""
    rows: dict[str, dict[str, Any]] = {}
    for kernel in kernels:
        row = rows.setdefault(kernel.name, {"name": kernel.name, "launches": 0, "us": 0.0, "measured_bytes": 0.0})
        row["launches"] += 1
        row["us"] += kernel.microseconds
        row["measured_bytes"] += kernel.total
    for row in rows.values():
        if row["name"] in predicted:
            row["predicted_bytes"] = predicted[row["name"]] * row["launches"]
            row["measured_over_predicted"] = row["measured_bytes"] / max(1, row["predicted_bytes"])
        if copy_rate and row["us"]:
            row["share_of_copy"] = row["measured_bytes"] / (row["us"] * 1e-6) / copy_rate
    return sorted(rows.values(), key=lambda r: -r["measured_bytes"])
