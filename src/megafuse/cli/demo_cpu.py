"""The demo where there is no GPU: tile programs executed, kernels cross-compiled, costs predicted; nothing is timed."""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from megafuse.cli.inputs import DTYPES
from megafuse.cli.planning import DEFAULT_ARCH, plan_selection
from megafuse.cli.running import check_example, limit_threads
from megafuse.cli.selection import Selection
from megafuse.cli.tables import check_line, compile_table, plan_record, plan_table
from megafuse.cli.targets import make_example
from megafuse.core.dtypes import spelled
from megafuse.core.errors import MegafuseError
from megafuse.explanation import PlanInfo, format_summary
from megafuse.runtime.offline import CompileReport, compile_offline
from megafuse.validate import CheckOptions, CheckReport

PROCESSES = 2
CHECK_DTYPES = ("bfloat16", "float32")
CHECK_SIZES = ("small", "odd")


@dataclass(frozen=True)
class PlanResult:
    """What the planning process hands back."""

    title: str
    plan: PlanInfo
    kernels: tuple[Any, ...]
    error: str = ""


def demo_without_gpu(selection: Selection, console: Console) -> dict[str, Any]:
    """Run the demo; the facts for its record."""
    console.print(
        "no GPU: the plan is for an NVIDIA H200 (sm_90); [bold]nothing is timed[/bold], all costs are predicted"
    )
    cases = check_cases(selection)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context, initializer=limit_threads) as pool:
        planning = pool.submit(plan_job, selection)
        checking = [pool.submit(check_job, *case) for case in cases]
        result = planning.result()
        console.print(f"\n[bold]{result.title}[/bold]")
        console.print(plan_table(result.plan), soft_wrap=False)
        reports = compile_kernels(result, console)
        checks = [_compile_check(result, reports), *_report_checks(checking, console)]
    console.print(f"\n{format_summary(result.plan)}", markup=False)
    console.print(
        "\nNothing was timed: there is no GPU here. Times and traffic above are the cost model's predictions."
    )
    return {
        "timed": False,
        "plan": plan_record(result.plan),
        "kernels": [asdict(r) for r in reports],
        "checks": checks,
    }


Case = tuple[Selection, str, str | None]


def check_cases(selection: Selection) -> list[Case]:
    """(selection, size, dtype) of the checks: two small shapes in two types; a user's module as it is given."""
    if selection.module:
        return [(selection, "small", None)]
    plain = replace(selection, batch_size=None, tokens=None, dim=None, k=None, dtype=None)
    chosen = spelled(selection.dtype, DTYPES, "--dtype") if selection.dtype else CHECK_DTYPES[0]
    dtypes = dict.fromkeys((chosen, *CHECK_DTYPES[1:]))
    return [(plain, size, dtype) for size in CHECK_SIZES for dtype in dtypes]


def plan_job(selection: Selection) -> PlanResult:
    """Plan at the measured shape, on tensors without data; runs in a process of its own."""
    planned = plan_selection(selection, DEFAULT_ARCH)
    found = PlanResult(planned.example.title, planned.info(), ())
    try:
        return replace(found, kernels=planned.compiled.artifact("triton").kernels)
    except Exception as error:  # a kernel that cannot be printed must not hide the plan and the checks
        return replace(found, error=f"{type(error).__name__}: {error}")


def check_job(selection: Selection, size: str, dtype: str | None) -> dict[str, Any]:
    """One check of the executed tile programs; runs in a process of its own."""
    start = time.perf_counter()
    example = make_example(selection, size, "cpu", dtype)
    facts: dict[str, Any] = {"title": example.title, "size": size, "target": "interpret"}
    try:
        report = check_example(example, "cpu", CheckOptions(require_finite=not selection.module), dots=selection.dots)
    except MegafuseError as error:
        return facts | {"ok": False, "error": str(error)}
    return facts | check_facts(report) | {"seconds": time.perf_counter() - start}


def check_facts(report: CheckReport) -> dict[str, Any]:
    """A report's facts for the record."""
    names = sorted({v.name for v in report.verdicts})
    text = str(report)
    facts = {"ok": report.ok, "tensors": len(names), "seeds": report.seeds, "text": text, "names": names}
    facts |= {"notes": list(report.notes)} if report.notes else {}
    return facts | ({"more_draws": report.more_draws} if report.doubts else {})


def compile_kernels(result: PlanResult, console: Console) -> list[CompileReport]:
    """Cross-compile the plan's kernels, one after another: the checks keep the other core busy."""
    if result.error:
        console.print(f"\n[red]kernels were not printed[/red]: {escape(result.error)}")
        return []
    if importlib.util.find_spec("triton") is None:
        console.print("kernels were not compiled: triton is not installed")
        return []
    reports = compile_offline(result.kernels, DEFAULT_ARCH, processes=1)
    console.print()
    console.print(compile_table(reports, result.plan), soft_wrap=False)
    return reports


def _compile_check(result: PlanResult, reports: list[CompileReport]) -> dict[str, Any]:
    """Compilation as one more check: every kernel was printed, and compiled where that was tried."""
    failed = [f"{r.entry}: {r.error}" for r in reports if r.error]
    error = result.error or "; ".join(failed)
    return {"title": f"{result.title}: {len(reports)} kernels compiled", "ok": not error, "error": error}


def _report_checks(running: list[Future[dict[str, Any]]], console: Console) -> Iterator[dict[str, Any]]:
    console.print(
        "\n[bold]checks[/bold]: generated tile programs, run through NumPy, against the original and an fp64 oracle"
    )
    console.print("(outputs, input gradients, every used parameter gradient; NaN and Inf fail)")
    for done in as_completed(running):
        check = done.result()
        console.print(check_line(check))
        yield check
