"""Named tables of a page, filled from the records that each names.

A page holds ``<!-- table: NAME RECORD ... -->`` and, further down, ``<!-- table: end -->``; what stands between is
replaced. RECORD is a file's name without ``.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megafuse.bench import table
from megafuse.bench.mlp_table import mlp_tables
from megafuse.bench.record import CaseResult, Record, RivalResult, read_record
from megafuse.bench.table import number, ratio
from megafuse.core.errors import InputError
from megafuse.report.markdown import KERNEL_HEADINGS, kernel_rows, markdown_table, shell_command

MARK = re.compile(
    r"(<!-- table: (?!end -->)(?P<name>\S+)(?P<records>[^\n]*?) -->\n).*?(<!-- table: end -->)", re.DOTALL
)
OURS = "megafuse"
Rows = Iterator[tuple[str, ...]]


def fill(page: str, files: Iterable[Path]) -> str:
    """``page`` with every named table made anew from ``files``.

    Raises:
        InputError: a table or record that does not exist, or a table that would be empty.
    """
    known = {path.stem: path for path in files}

    def filled(found: re.Match[str]) -> str:
        names = found["records"].split()
        return f"{found[1]}\n{named_table(found['name'], names, known)}\n\n{found[4]}"

    return MARK.sub(filled, page)


def named_table(name: str, records: Sequence[str], known: Mapping[str, Path]) -> str:
    """One table, and below it the records that it comes from."""
    if name not in MAKERS:
        raise InputError(f"the page asks for a table {name!r}", hint=f"use one of {', '.join(MAKERS)}")
    missing = [r for r in records if r not in known] if records else ["(none is named)"]
    if missing:
        raise InputError(f"table {name}: no record {missing[0]}", hint="name files of the given folders, without .json")
    text = MAKERS[name]([known[r] for r in records])
    return f"{text}\n\nFrom " + ", ".join(f"`{r}`" for r in records) + "."


def measured(headings: Sequence[str], rows: Callable[[CaseResult], Rows]) -> Callable[[Sequence[Path]], str]:
    """A maker of tables with some rows for each case; columns that are empty everywhere are left out."""

    def make(paths: Sequence[Path]) -> str:
        body = [row for path in paths for case in read_record(path).cases for row in rows(case)]
        if not body:
            raise InputError(f"nothing to show of {', '.join(p.stem for p in paths)}", hint="name another record")
        kept = [i for i in range(len(headings)) if any(row[i] for row in body)]
        return markdown_table([[row[i] for i in kept] for row in (headings, *body)])

    return make


def step_rows(case: CaseResult) -> Rows:
    """The measured rivals and the products alone, as on the console."""
    yield from table.case_rows(case)


def sample_rows(case: CaseResult) -> Rows:
    """How the samples of a step spread: microseconds."""
    for rival in case.rivals.values():
        if step := rival.step:
            spread = (number(step[key], 1) for key in ("mean", "min", "p20", "median", "p80", "max"))
            yield (case.name, rival.name, str(step["samples"]), *spread)


def memory_rows(case: CaseResult) -> Rows:
    """Peak, and what of it was there before or is handed back as gradients: MiB."""
    base = case.rivals.get("eager", RivalResult("eager")).memory.get("activation")
    for rival in case.rivals.values():
        if memory := rival.memory:
            sizes = (number(memory[key] / 2**20, 0) for key in ("peak", "before", "gradients", "activation"))
            yield (case.name, rival.name, *sizes, ratio(memory["activation"], base))


def busy_rows(case: CaseResult) -> Rows:
    """Launches per step and the sum of their times on the GPU."""
    for rival in case.rivals.values():
        if rival.kernels:
            launches, us = (sum(row[key] for row in rival.kernels) for key in ("launches", "us"))
            yield (case.name, rival.name, f"{launches:g}", number(us, 1))


def traffic_rows(case: CaseResult) -> Rows:
    """Bytes of generated kernels (those with a planned number) and of the other launches: GB."""
    for rival in case.rivals.values():
        if rows := rival.traffic.get("by_kernel"):
            ours, others = ([r for r in rows if ("predicted_bytes" in r) is generated] for generated in (True, False))
            planned = sum(r["predicted_bytes"] for r in ours)
            yield (case.name, rival.name, "generated kernels", _gigabytes(ours), number(planned / 1e9, 2))
            library = rival.plan.get("dot_bytes", 0)
            yield (case.name, rival.name, "library products", _gigabytes(others), number(library / 1e9, 2))
            whole = number((planned + library) / 1e9, 2)
            yield (case.name, rival.name, "together", number(rival.traffic["total"] / 1e9, 2), whole)


def _gigabytes(rows: Iterable[Mapping[str, Any]]) -> str:
    return number(sum(r["measured_bytes"] for r in rows) / 1e9, 2)


def our_kernel_rows(case: CaseResult) -> Rows:
    """The launches of the fused step, one row per kernel."""
    yield from kernel_rows(case.rivals.get(OURS, RivalResult(OURS)))


def machines(paths: Sequence[Path]) -> str:
    """Where and how each record was measured, then the commands."""
    headings = ("record", "started", "commit", "GPU", "driver", "CUDA", "PyTorch", "Triton", "Python", "copy TB/s")
    records = {path.stem: read_record(path) for path in paths}
    commands = "\n".join(shell_command(record) for record in records.values())
    rows = [_machine(name, record) for name, record in records.items()]
    return f"{markdown_table([headings, *rows])}\n\n```bash\n{commands}\n```"


def _machine(name: str, record: Record) -> tuple[str, ...]:
    facts = (record.environment.get(k, "") for k in ("gpu", "driver_version", "cuda", "torch", "triton", "python"))
    copy = number(record.copy["bytes_per_s"] / 1e12, 2) if "bytes_per_s" in record.copy else ""
    return (f"`{name}`", record.started, record.commit[:7] + record.commit[40:], *facts, copy)


def mlps(paths: Sequence[Path]) -> str:
    """The tables of MLP records: GPU time, time with launch overhead, their difference, host time."""
    found = [t for path in paths for t in mlp_tables(read_record(path))]
    if not found:
        raise InputError(f"nothing to show of {', '.join(p.stem for p in paths)}", hint="name a record of bench mlp")
    return "\n\n".join(f"{t.title}\n\n{markdown_table(t.rows)}" for t in found)


def checks(paths: Sequence[Path]) -> str:
    """Measured errors: the reports of the checks in records of ``megafuse demo``."""
    parts = []
    for path in paths:
        data = json.loads(path.read_text(encoding="utf-8"))
        where = ", ".join(f"{key} {data['environment'][key]}" for key in ("python", "torch", "numpy"))
        parts.append(f"Commit {data['commit'][:7] + data['commit'][40:]}, {where}.")
        parts += [f"{c['title']}, on {c['target']}:\n\n```\n{c['text']}\n```" for c in data["checks"] if "text" in c]
    return "\n\n".join(parts)


MAKERS: dict[str, Callable[[Sequence[Path]], str]] = {
    "machines": machines,
    "steps": measured(table.HEADINGS, step_rows),
    "samples": measured(("case", "rival", "samples", "mean us", "min", "p20", "median", "p80", "max"), sample_rows),
    "memory": measured(("case", "rival", "peak MiB", "before", "gradients", "activation", "x eager"), memory_rows),
    "busy": measured(("case", "rival", "launches per step", "sum of kernel times us"), busy_rows),
    "traffic": measured(("case", "rival", "launches", "measured GB", "planned GB"), traffic_rows),
    "kernels": measured(KERNEL_HEADINGS, our_kernel_rows),
    "mlps": mlps,
    "checks": checks,
}
