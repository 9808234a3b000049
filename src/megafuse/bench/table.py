"""The compact table of a run for the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megafuse.bench.record import CaseResult, Record, RivalResult

HEADINGS = (
    "case", "rival", "ok", "step us", "x gemm", "x eager", "graph us", "x eager", "host us", "x eager", "peak MiB",
    "x eager", "DRAM GB", "plan GB", "TFLOP/s", "samples/s",
)  # fmt: skip


def summary(record: Record) -> str:
    """All cases as one table, then what failed."""
    rows = [row for case in record.cases for row in case_rows(case)]
    lines = [aligned([HEADINGS, *rows])]
    if "bytes_per_s" in record.copy:
        lines.append(f"copy bandwidth in this run: {record.copy['bytes_per_s'] / 1e12:.2f} TB/s (read + written)")
    lines += [f"{c.name}: {error}" for c in record.cases for error in (*failures(c), *c.errors)]
    return "\n".join([*lines, *record.errors])


def case_rows(case: CaseResult) -> list[tuple[str, ...]]:
    """One row per rival, then the products alone."""
    eager = case.rivals.get("eager", RivalResult("eager"))
    gemm = _mean(case.gemm.get("step"))
    rows = [_row(case.name, rival, eager, gemm) for rival in case.rivals.values()]
    if gemm:
        step, graph = number(gemm, 1), number(_median(case.gemm.get("graph")), 1)
        rate = case.gemm.get("flops", 0) / gemm / 1e6
        count = f"{len(case.gemm.get('products', ()))} products"
        rows.append((case.name, "gemm", count, step, "", "", graph, *[""] * 5, "", "", number(rate, 0), ""))
    return rows


def _row(name: str, rival: RivalResult, eager: RivalResult, gemm: float | None) -> tuple[str, ...]:
    step, graph, host = _mean(rival.step), _median(rival.graph), _median(rival.host)
    peak = rival.memory.get("activation")
    measured, planned = rival.traffic.get("total"), rival.plan.get("total_bytes")
    return (
        name,
        rival.name,
        _verdict(rival),
        number(step, 1),
        ratio(step, gemm),
        ratio(step, _mean(eager.step)),
        number(graph, 1),
        ratio(graph, _median(eager.graph)),
        number(host, 1),
        ratio(host, _median(eager.host)),
        number(peak / 2**20 if peak is not None else None, 0),
        ratio(peak, eager.memory.get("activation")),
        number(measured / 1e9 if measured else None, 2),
        number(planned / 1e9 if planned else None, 2),
        number(rival.step.get("tflop_per_s"), 0),
        number(rival.step.get("samples_per_s"), 0),
    )


def _verdict(rival: RivalResult) -> str:
    """Whether it validated; empty where that was not asked (kernels that were checked one by one before)."""
    if not rival.checked and not rival.error:
        return ""
    return "yes" if rival.checked.get("ok") else "NO"


def failures(case: CaseResult) -> list[str]:
    """Rivals that were not timed, and why."""
    found = []
    for rival in case.rivals.values():
        if _verdict(rival) == "NO":
            why = rival.error or "; ".join(rival.checked.get("failures", ())[:4])
            found.append(f"{rival.name} not validated, not timed: {why}"[:600])
    return found


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns of equal width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def number(value: float | None, digits: int) -> str:
    """A number for people; empty if there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def ratio(value: float | None, base: float | None) -> str:
    """``value / base``; empty if either is missing."""
    return f"{value / base:.2f}" if value is not None and base else ""


def _mean(times: dict[str, Any] | None) -> float | None:
    return times.get("mean") if times else None


def _median(times: dict[str, Any] | None) -> float | None:
    return times.get("median") if times else None
