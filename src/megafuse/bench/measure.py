"""All sections of one case, each guarded: what fails is named in the result and the rest goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from megafuse.bench.dots import products_work, record_dots
from megafuse.bench.guard import guarded, progress, release_memory
from megafuse.bench.kernels import KernelTime, profile_kernels
from megafuse.bench.memory import activation_peak
from megafuse.bench.plan import PlanFacts, input_bytes, plan_facts
from megafuse.bench.record import CaseResult, Facts, RivalResult
from megafuse.bench.rivals import EAGER, MEGAFUSE, Rival, make_rivals
from megafuse.bench.rotation import Rotation, StepOf, graphed_calls, rotate, single_calls
from megafuse.bench.step import Case, Step, make_step
from megafuse.bench.timing import CudaTimer, capture_all, time_host_rounds, time_rounds, warm_up
from megafuse.bench.traffic import NcuJob, join_predicted, measure_traffic
from megafuse.runtime.environment import gpu_state

SECTIONS = ("memory", "step", "graph", "host", "call", "rotated", "kernels", "traffic")
GEMM = "gemm"  # the library products alone, timed among the rivals


@dataclass(frozen=True)
class Settings:
    """What to measure and how often. ``rivals`` are names; ``check``: auto, quick or full.

    ``rounds``: samples per work in event timings (one more is taken and dropped). ``warmup``: steps before them.
    ``host_steps``: steps per host sample. ``copy_rate``: bytes per second of a copy in this run (0: not measured).
    """

    rivals: Sequence[str] = (EAGER, MEGAFUSE)
    sections: Sequence[str] = ("memory", "step", "graph", "host")
    check: str = "auto"
    rounds: int = 20
    warmup: int = 5
    host_steps: int = 200
    host_rounds: int = 3
    copy_rate: float = 0.0
    ncu_timeout: float = 240.0
    traffic_rivals: Sequence[str] = ()


@dataclass
class Session:
    """One case while it is measured."""

    case: Case
    settings: Settings
    result: CaseResult
    rivals: list[Rival] = field(default_factory=list)
    steps: dict[str, Step] = field(default_factory=dict)

    def wants(self, section: str) -> bool:
        """Asked for."""
        return section in self.settings.sections


def measure_case(case: Case, settings: Settings) -> CaseResult:
    """Make and validate the rivals, then measure every section asked for; never raises on a section's failure."""
    start = time.perf_counter()
    result = CaseResult(case.name, dict(case.facts))
    session = Session(case, settings, result)
    with guarded(result.errors, "rivals"):
        _make(session)
    for name, run in _RUNS.items():
        if session.wants(name) and session.steps:
            progress(f"{case.name}: {name}")
            with guarded(result.errors, name):
                run(session)
            case.clear_gradients()
            release_memory()
    result.gpu_after = dict(gpu_state())
    result.seconds = time.perf_counter() - start
    return result


def _make(session: Session) -> None:
    settings, result = session.settings, session.result
    session.rivals = make_rivals(settings.rivals, session.case, settings.check)
    for rival in session.rivals:
        entry = RivalResult(rival.name, rival.build_seconds, rival.error, asdict(rival.checked))
        result.rivals[rival.name] = entry
        if rival.name == MEGAFUSE and rival.fn is not None:
            with guarded(result.errors, "plan facts"):
                entry.plan = plan_facts(rival.fn).as_dict(input_bytes(session.case))
        if rival.usable:
            session.steps[rival.name] = rival.step(session.case)
    release_memory()


def _memory(session: Session) -> None:
    for name, step in session.steps.items():
        with guarded(session.result.errors, f"memory of {name}"):
            session.result.rivals[name].memory = activation_peak(session.case, step).as_dict()


def _with_products(session: Session) -> dict[str, Any]:
    """The steps, and the library products of the unfused step (its own tensors) as one more work."""
    works: dict[str, Any] = dict(session.steps)
    with guarded(session.result.errors, "products of the step"):
        dots = record_dots(make_step(session.case, session.case.module))
        session.case.clear_gradients()
        if dots:
            facts = {"flops": sum(d.flops for d in dots), "bytes": sum(d.bytes for d in dots)}
            session.result.gemm |= {**facts, "products": [d.describe() for d in dots]}
            works[GEMM] = products_work(dots)
    return works


def _step(session: Session) -> None:
    settings, errors = session.settings, session.result.errors
    works = warm_up(_with_products(session), settings.warmup, errors, "step")
    for name, times in time_rounds(works, rounds=settings.rounds, timer=CudaTimer()).items():
        found = times.as_dict()
        if name == GEMM:
            session.result.gemm["step"] = found
        else:
            session.result.rivals[name].step = found | _rates(session, times.mean)


def _rates(session: Session, microseconds: float) -> Facts:
    """Samples/s, and TFLOP/s of the step's products alone (the same numerator for every rival)."""
    seconds = microseconds * 1e-6
    flops = session.result.gemm.get("flops", 0)
    return {"samples_per_s": session.case.samples / seconds, "tflop_per_s": flops / seconds / 1e12}


def _graph(session: Session) -> None:
    graphs = capture_all(_with_products(session), session.result.errors)
    works = {name: graph.replay for name, graph in graphs.items()}
    for name, times in time_rounds(works, rounds=session.settings.rounds, timer=CudaTimer()).items():
        if name == GEMM:
            session.result.gemm["graph"] = times.as_dict()
        else:
            session.result.rivals[name].graph = times.as_dict()


def _host(session: Session) -> None:
    settings = session.settings
    works = warm_up(session.steps, 3, session.result.errors, "host")
    sync = torch.cuda.synchronize
    for name, times in time_host_rounds(
        works, rounds=settings.host_rounds + 1, steps=settings.host_steps, sync=sync
    ).items():
        session.result.rivals[name].host = times.as_dict() | {"steps_per_sample": settings.host_steps}


def _rotation(session: Session) -> tuple[Rotation, dict[str, StepOf]]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    rotation = rotate(session.case, properties.L2_cache_size)
    return rotation, {r.name: r.step for r in session.rivals if r.usable}


def _call(session: Session) -> None:
    settings = session.settings
    rotation, steps = _rotation(session)
    found = single_calls(rotation, steps, settings.rounds, settings.warmup, CudaTimer(), session.result.errors)
    for name, times in found.items():
        session.result.rivals[name].call = times.as_dict() | rotation.as_dict()


def _rotated(session: Session) -> None:
    rotation, steps = _rotation(session)
    for name, times in graphed_calls(
        rotation, steps, session.settings.rounds, CudaTimer(), session.result.errors
    ).items():
        session.result.rivals[name].rotated = times.as_dict() | rotation.as_dict()


def _kernels(session: Session) -> None:
    for name, step in session.steps.items():
        with guarded(session.result.errors, f"kernels of {name}"):
            entry = session.result.rivals[name]
            predicted = predicted_bytes(entry.plan)
            entry.kernels = [
                kernel_row(k, predicted.get(k.name), session.settings.copy_rate) for k in profile_kernels(step)
            ]


def predicted_bytes(plan: Mapping[str, Any]) -> dict[str, int]:
    """Predicted DRAM bytes of one launch by kernel name, from a plan's facts in a record."""
    return {k["name"]: k["bytes"] for k in plan.get("kernels", ())}


def kernel_row(kernel: KernelTime, predicted: int | None, copy_rate: float) -> Facts:
    """A line of the kernel table; ``share_of_copy`` is predicted bytes per second over those of a copy."""
    row: Facts = {"name": kernel.name, "launches": kernel.launches, "us": kernel.microseconds}
    if predicted is not None:
        row["predicted_bytes"] = predicted
        if copy_rate and kernel.microseconds:
            rate = predicted * kernel.launches / (kernel.microseconds * 1e-6)
            row["share_of_copy"] = rate / copy_rate
    return row


def _traffic(session: Session) -> None:
    wanted = session.settings.traffic_rivals or list(session.steps)
    for name in (n for n in wanted if n in session.steps):
        progress(f"{session.case.name}: traffic of {name}")
        with guarded(session.result.errors, f"traffic of {name}"):
            entry = session.result.rivals[name]
            job = NcuJob(dict(session.case.source), name, session.settings.ncu_timeout)
            traffic = measure_traffic(job)
            rows = join_predicted(traffic.kernels, predicted_bytes(entry.plan), session.settings.copy_rate)
            entry.traffic = traffic.as_dict() | {"by_kernel": rows}


_RUNS = {
    "memory": _memory, "step": _step, "graph": _graph, "host": _host, "call": _call, "rotated": _rotated,
    "kernels": _kernels, "traffic": _traffic,
}  # fmt: skip

__all__ = ["SECTIONS", "PlanFacts", "Settings", "measure_case"]
