"""Records as Markdown: one section per record, put between two markers of a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megafuse.bench import host, table, workloads
from megafuse.bench.mlp_table import BEYOND, mlp_tables
from megafuse.bench.record import CaseResult, Record, RivalResult, read_record
from megafuse.bench.table import number, ratio

BEGIN, END = "<!-- records: begin -->", "<!-- records: end -->"
_MACHINE = ("gpu", "driver_version", "torch", "triton", "cuda", "python")
_STATE = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
KERNEL_HEADINGS = ("kernel", "launches", "us", "predicted MB", "measured MB", "share of copy")
TUNED_HEADINGS = ("kernel", "heuristic us", "tuned us", "gain", "share of copy", "registers", "spills", "limit")
MOST_KERNELS = 40
ROWS_INSIDE = f"{BEYOND} behind the rows: the inputs of all calls of a graph together did not exceed the L2 cache."


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is the heading."""
    lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def record_section(record: Record, name: str) -> str:
    """Heading, machine, table, kernels and failures of one record; ``name`` is its file's name."""
    parts = [f"## {record.kind}, {record.started[:10]}", _machine(record, name)]
    if tables := list(mlp_tables(record)):
        parts += [f"{t.title}\n\n{markdown_table(t.rows)}" for t in tables]
        parts += [ROWS_INSIDE] * any(row[0].endswith(BEYOND) for t in tables for row in t.rows[1:])
    elif record.kind == "workloads":
        parts.append(markdown_table([workloads.HEADINGS, *workloads.workload_rows(record)]))
    elif record.kind == "host":
        parts.append(markdown_table([host.HEADINGS, *host.rows_of(record)]))
    else:
        rows = [row for case in record.cases for row in table.case_rows(case)]
        parts.append(markdown_table([table.HEADINGS, *rows]))
    parts += [part for case in record.cases for part in kernel_sections(case)]
    failed = [f"- {c.name}: {text}" for c in record.cases for text in (*table.failures(c), *c.errors)]
    failed += [f"- {text}" for text in record.errors]
    return "\n\n".join([*parts, *(["Failed or left out:\n\n" + "\n".join(failed)] if failed else [])])


def _machine(record: Record, name: str) -> str:
    facts = [f"{key} {record.environment[key]}" for key in _MACHINE if key in record.environment]
    state = [f"{key} {record.environment[key]}" for key in _STATE if key in record.environment]
    lines = [f"Record `{name}`, commit {record.commit or 'unknown'}: " + ", ".join(facts) + "."]
    if state:
        lines.append("Before the first case: " + ", ".join(state) + ".")
    if "bytes_per_s" in record.copy:
        lines.append(f"Copy bandwidth in this run: {record.copy['bytes_per_s'] / 1e12:.2f} TB/s.")
    return "\n".join([*lines, f"Command: `{shell_command(record)}`"])


def shell_command(record: Record) -> str:
    """The record's command, quoted for a shell: earlier records hold it without quotes."""
    return shlex.join(shlex.split(record.command))


def kernel_sections(case: CaseResult) -> list[str]:
    """A kernel table for every rival that has one."""
    found = []
    for name, rival in case.rivals.items():
        tuned = any("heuristic_us" in row for row in rival.kernels)
        rows = [_tuned_row(row) for row in rival.kernels] if tuned else kernel_rows(rival)
        table = markdown_table([TUNED_HEADINGS if tuned else KERNEL_HEADINGS, *rows])
        found += [f"### {case.name}: kernels of {name}\n\n{table}"] * bool(rows)
    return found


def _tuned_row(row: dict[str, Any]) -> tuple[str, ...]:
    """A kernel before and after tuning."""
    figures = (str(row.get(key, "")) for key in ("registers", "spills"))
    before, after = row["heuristic_us"], row["us"]
    times = number(before, 1), number(after, 1), ratio(before, after), number(row["share_of_copy"], 2)
    return (f"`{row['name'][:100]}`", *times, *figures, str(row.get("limit", "")))


def kernel_rows(rival: RivalResult) -> list[tuple[str, ...]]:
    """Kernels by time. Bytes and share are ncu's where it ran; else predicted bytes over the profiler's time."""
    measured = {row["name"]: row for row in rival.traffic.get("by_kernel", ())}
    timed = rival.kernels or list(measured.values())
    return [_kernel_row(row, measured.get(row["name"], {})) for row in timed[:MOST_KERNELS]]


def _kernel_row(row: dict[str, Any], traffic: dict[str, Any]) -> tuple[str, ...]:
    predicted = traffic.get("predicted_bytes", row.get("predicted_bytes", 0) * row["launches"])
    share = traffic.get("share_of_copy", row.get("share_of_copy"))
    return (
        f"`{row['name'][:100]}`",
        f"{row['launches']:g}",
        number(row["us"], 1),
        number(predicted / 1e6, 1) if predicted else "",
        number(traffic["measured_bytes"] / 1e6, 1) if traffic else "",
        number(share, 2),
    )


def render(records: Iterable[tuple[str, Record]]) -> str:
    """All records, newest first, as (file name, record) pairs."""
    ordered = sorted(records, key=lambda pair: pair[1].started, reverse=True)
    return "\n\n".join(record_section(record, name) for name, record in ordered) or "There is no record yet."


def files_of(paths: Iterable[Path]) -> list[Path]:
    """Files as given, and the ``*.json`` of folders."""
    return [f for p in paths for f in (sorted(p.glob("*.json")) if p.is_dir() else [p])]


def load(paths: Iterable[Path]) -> list[tuple[str, Record]]:
    """Benchmark records from files and from the ``*.json`` of folders."""
    return [(f.name, read_record(f)) for f in files_of(paths)]


def put_between_markers(page: str, text: str) -> str:
    """``page`` with ``text`` between the markers; a page without markers gets them at its end."""
    if BEGIN not in page or END not in page:
        return f"{page.rstrip()}\n\n{BEGIN}\n\n{text}\n\n{END}\n"
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}"
