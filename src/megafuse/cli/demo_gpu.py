"""The demo on a GPU: every rival validated, then timed in one process as the reference workload times itself."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from megafuse.bench.cases import with_dots
from megafuse.bench.guard import guarded, release_memory
from megafuse.bench.memory import Peak, activation_peak
from megafuse.bench.rivals import MEGAFUSE, Rival, make_rivals
from megafuse.bench.step import Case, draw_cotangents
from megafuse.bench.timing import CudaTimer, time_rounds
from megafuse.bench.traffic import NcuJob, measure_traffic
from megafuse.bench.verify import LEVELS
from megafuse.cli.demo_cpu import check_cases, check_facts
from megafuse.cli.running import check_example
from megafuse.cli.selection import Selection
from megafuse.cli.tables import check_line, plan_record, plan_table
from megafuse.cli.targets import Example, find_package, make_example
from megafuse.core.errors import InputError, MegafuseError
from megafuse.core.text import quantity
from megafuse.explanation import PlanInfo, explain, format_summary
from megafuse.validate import CheckOptions

RIVALS = ("eager", "compile", MEGAFUSE)
WARMUP, NUM_TESTS = 5, 20
GRADIENT_SEED = 1000  # added to the seed, as the reference workload does
NCU_SECONDS = 120.0


class BoundCall(nn.Module):
    """A function with all but its first argument fixed, as a module: its parameters are those of the arguments."""

    def __init__(self, fn: Callable[..., Any], rest: tuple[Any, ...]) -> None:
        super().__init__()
        self.fn, self.count, self.plain = fn, len(rest), {}
        for i, value in enumerate(rest):
            if isinstance(value, nn.Parameter | nn.Module):
                setattr(self, f"given{i}", value)
            else:
                self.plain[i] = value

    def forward(self, first: Tensor) -> Any:
        """Call the function."""
        rest = [self.plain[i] if i in self.plain else getattr(self, f"given{i}") for i in range(self.count)]
        return self.fn(first, *rest)


@dataclass
class Measured:
    """One rival's figures. ``samples_us``: kept samples of the step in microseconds."""

    name: str
    samples_us: tuple[float, ...] = ()
    peak: Peak | None = None
    traffic_bytes: int | None = None
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def mean_us(self) -> float:
        """Arithmetic mean, as the reference workload reports it."""
        return sum(self.samples_us) / len(self.samples_us) if self.samples_us else float("nan")


def demo_with_gpu(selection: Selection, console: Console, *, traffic: bool = True) -> dict[str, Any]:
    """Run the demo; the facts for its record."""
    torch.backends.cuda.matmul.allow_tf32 = False
    console.print(f"GPU: {torch.cuda.get_device_name()}")
    example = make_example(selection, "full", "cuda")
    case = make_case(example, selection)
    rivals = make_rivals(RIVALS, case)
    ours = next(r for r in rivals if r.name == MEGAFUSE)
    plan = explain(ours.fn).plans[-1] if ours.fn is not None else PlanInfo(example.title, reason=ours.error)
    console.print(f"\n[bold]{example.title}[/bold]")
    console.print(plan_table(plan), soft_wrap=False)
    checks = [_rival_check(example, ours), *_small_checks(selection)]
    console.print("\n[bold]checks[/bold]: against the original and an fp64 oracle; NaN and Inf fail")
    for check in checks:
        console.print(check_line(check))
    measured = [measure(case, rival, selection, traffic=traffic) for rival in rivals]
    console.print()
    console.print(results_table(measured, plan, example), soft_wrap=False)
    console.print("samples/s and TFLOP/s by the mean; flops are those of the matrix products, the same for all")
    console.print(f"\n{format_summary(plan)}", markup=False)
    return {
        "timed": True,
        "plan": plan_record(plan),
        "checks": checks,
        "rivals": [_record(m, plan, example) for m in measured],
    }


def make_case(example: Example, selection: Selection) -> Case:
    """The example as a case of the benchmarks."""
    module, args = example.fn, example.args
    if not isinstance(module, nn.Module):
        module, args = BoundCall(module, args[1:]), args[:1]
    gradients = draw_cotangents(module, args, example.kwargs, selection.seed + GRADIENT_SEED)
    case = Case(example.title, module, args, example.kwargs, gradients, max(1, example.samples), source=example.source)
    return with_dots(case, selection.dots)


def measure(case: Case, rival: Rival, selection: Selection, *, traffic: bool = True) -> Measured:
    """Memory, time and traffic of one rival that validated."""
    if not rival.usable:
        return Measured(rival.name, error=rival.error or "; ".join(rival.checked.failures[:3]) or "did not validate")
    step = rival.step(case)
    errors: list[str] = []
    found = Measured(rival.name)
    with guarded(errors, "memory"):
        found.peak = activation_peak(case, step)
    with guarded(errors, "time"):
        found.samples_us = _time(step, selection)
    if case.source and traffic and shutil.which("ncu"):
        with guarded(errors, "traffic"):
            found.facts["traffic"] = measure_traffic(NcuJob(dict(case.source), rival.name, NCU_SECONDS)).as_dict()
            found.traffic_bytes = int(found.facts["traffic"]["total"])
    found.error = "; ".join(errors)
    case.clear_gradients()
    release_memory()
    return found


def _time(step: Callable[[], Any], selection: Selection) -> tuple[float, ...]:
    """Samples in microseconds, by the reference workload's own timing where it is at hand."""
    try:
        package = find_package(selection.package)
    except InputError:
        times = time_rounds({"step": step}, rounds=NUM_TESTS, timer=CudaTimer())["step"]
        return times.kept.microseconds
    return tuple(s * 1e6 for s in package.time_step(step, warmup=WARMUP, num_tests=NUM_TESTS).samples_s)


def _rival_check(example: Example, ours: Rival) -> dict[str, Any]:
    checked = ours.checked
    facts = {"title": f"{example.title} ({checked.how})", "ok": ours.usable, "tensors": "all"}
    facts["seeds"] = next((LEVELS[w].seeds for w in LEVELS if w in checked.how), 1)
    text = "\n".join(checked.failures)
    return facts | {"text": text, "seconds": checked.seconds, "error": ours.error, "target": "cuda"}


def _small_checks(selection: Selection) -> list[dict[str, Any]]:
    """The full check at two small shapes in two types."""
    found = []
    for chosen, size, dtype in [] if selection.module else check_cases(selection):
        start = time.perf_counter()
        example = make_example(chosen, size, "cuda", dtype)
        facts: dict[str, Any] = {"title": example.title, "size": size, "target": "cuda"}
        try:
            facts |= check_facts(check_example(example, "cuda", CheckOptions(require_finite=True), dots=selection.dots))
        except MegafuseError as error:
            facts |= {"ok": False, "error": str(error)}
        found.append(facts | {"seconds": time.perf_counter() - start})
    return found


def results_table(measured: list[Measured], plan: PlanInfo, example: Example) -> Table:
    """Rivals side by side."""
    table = Table(title="measured, forward + backward", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "mean us", "min", "max", "samples/s", "TFLOP/s", "activation peak", "DRAM traffic"):
        table.add_column(heading, justify="left" if not heading else "right")
    for m in measured:
        if not m.samples_us:
            table.add_row(m.name, f"[red]{escape(m.error)}[/red]")
            continue
        seconds = m.mean_us * 1e-6
        times = (f"{m.mean_us:.1f}", f"{min(m.samples_us):.1f}", f"{max(m.samples_us):.1f}")
        rates = (f"{example.samples / seconds:,.0f}", f"{plan.flops / seconds / 1e12:.1f}")
        peak = quantity(m.peak.activation, "B") if m.peak else "-"
        table.add_row(m.name, *times, *rates, peak, _traffic(m, plan))
    return table


def _traffic(m: Measured, plan: PlanInfo) -> str:
    """Measured bytes, or the prediction, marked as one."""
    if m.traffic_bytes is not None:
        return quantity(m.traffic_bytes, "B")
    if m.name == MEGAFUSE:
        return f"{quantity(plan.dram_bytes, 'B')} (predicted)"
    if m.name == "eager" and plan.eager is not None:
        return f"{quantity(plan.eager.dram_bytes, 'B')} (predicted)"
    return "-"


def _record(m: Measured, plan: PlanInfo, example: Example) -> dict[str, Any]:
    rates = {}
    if m.samples_us:
        seconds = m.mean_us * 1e-6
        rates = {"samples_per_s": example.samples / seconds, "tflop_per_s": plan.flops / seconds / 1e12}
    peak = m.peak.as_dict() if m.peak else None
    return asdict(m) | {"peak": peak, "mean_us": m.mean_us, **rates}
