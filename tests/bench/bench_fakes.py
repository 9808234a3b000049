"""Fake devices and small cases for the tests of the benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megafuse.bench.record import CaseResult, Record, RivalResult
from megafuse.bench.step import Case


class FakeEvent:
    def __init__(self, timer: FakeTimer) -> None:
        self.timer, self.at = timer, 0.0

    def record(self) -> None:
        self.at = self.timer.now

    def elapsed_time(self, end: Any, /) -> float:
        return end.at - self.at


class FakeTimer:
    """A device whose clock (milliseconds) moves only when a work or a flush says so."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []

    def synchronize(self) -> None:
        self.log.append("sync")

    def flush(self) -> None:
        self.log.append("flush")
        self.now += 1000.0

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def work(self, name: str, milliseconds: float) -> Any:
        def run() -> None:
            self.log.append(name)
            self.now += milliseconds

        return run


class Net(nn.Module):
    """Two products and a gate: mm and addmm in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def net_case(rows: int = 512) -> Case:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(rows, 8, requires_grad=True)
    return Case("net", net, (x,), {}, (torch.randn(rows, 8),), rows, {"dtype": "float32"}, {"kind": "none"})


def times(*values: float) -> dict[str, Any]:
    return {"mean": values[0], "median": values[0], "raw": list(values)}


def sample_record() -> Record:
    eager = RivalResult("eager", checked={"ok": True}, step=times(20.0), host=times(30.0), memory={"activation": 2**30})
    ours = RivalResult(
        "megafuse",
        checked={"ok": True},
        step={**times(10.0), "tflop_per_s": 5.0, "samples_per_s": 7.0},
        host=times(15.0),
        memory={"activation": 2**29},
        plan={"kernels": [{"name": "k0", "launches": 1, "bytes": 100}], "total_bytes": 4e9},
        kernels=[{"name": "k0", "launches": 1.0, "us": 3.0, "predicted_bytes": 1000000}],
        traffic={"total": 5e9, "by_kernel": [{"name": "k0", "launches": 1, "us": 3.0, "measured_bytes": 2e6}]},
    )
    broken = RivalResult("compile", error="no compiler", checked={"ok": False, "failures": []})
    case = CaseResult(
        "case a", rivals={r.name: r for r in (eager, ours, broken)}, gemm={"step": times(8.0), "flops": 80}
    )
    return Record(
        kind="rank_mixer",
        started="2026-01-02T03:04:05",
        command="python benchmarks/rank_mixer.py",
        commit="abc",
        environment={"gpu": "GPU", "torch": "2"},
        settings={},
        copy={"bytes_per_s": 4e12},
        cases=(case,),
    )
