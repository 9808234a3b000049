"""The demo's tables and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from megafuse.core.text import counted, quantity
from megafuse.explanation import KernelInfo, PhaseInfo, PlanInfo
from megafuse.runtime.offline import CompileReport


def plan_table(plan: PlanInfo) -> Table:
    """One line a call: what it reads and writes, its tile, its predicted traffic and time."""
    table = Table(title="plan", title_justify="left", box=None, pad_edge=False)
    for heading, right in (("call", False), ("what", False), ("predicted traffic", True), ("predicted time", True)):
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    forward = True
    for call in plan.calls:
        if forward and not call.forward:
            table.add_row("[dim]backward[/dim]")
            forward = False
        name, what = (call.name, _lines(call)) if isinstance(call, KernelInfo) else (call.call, call.what)
        table.add_row(name, escape(what), quantity(call.dram_bytes, "B"), quantity(call.seconds, "s"))
    return table


def _lines(kernel: KernelInfo) -> str:
    """The user's lines in short."""
    places = [s.split(": ", 1)[0] for s in kernel.sources]
    return f"{counted(len(kernel.reads), 'tensor')} in, {len(kernel.writes)} out: {', '.join(places)}"


def compile_table(reports: Sequence[CompileReport], plan: PlanInfo) -> Table:
    """Registers, spills and shared memory of every kernel."""
    arch = reports[0].arch if reports else 0
    table = Table(title=f"kernels compiled for sm_{arch}", title_justify="left", box=None, pad_edge=False)
    for heading in ("kernel", "warps", "tile", "registers", "spills", "shared", "compile"):
        table.add_column(heading, justify="left" if heading in ("kernel", "tile") else "right")
    kernels = {k.name: k for k in plan.kernels}
    for report in reports:
        kernel = kernels.get(report.entry)
        head = (report.entry, str(kernel.num_warps) if kernel else "", _tile(kernel) if kernel else "")
        if report.error:
            table.add_row(*head, f"[red]{escape(report.error.splitlines()[-1][:60])}[/red]")
            continue
        spills = "0" if not report.spills else f"[yellow]{report.spills} B[/yellow]"
        table.add_row(*head, str(report.registers), spills, f"{report.shared} B", f"{report.seconds:.1f} s")
    return table


def _tile(kernel: KernelInfo) -> str:
    return "; ".join(f"{_rows(p)} x {'+'.join(map(str, p.pieces))}" for p in kernel.phases)


def _rows(phase: PhaseInfo) -> str:
    return f"{phase.abreast} abreast" if phase.abreast > 1 else str(phase.row_tile)


def plan_record(plan: PlanInfo) -> dict[str, Any]:
    """The plan's figures for the record; predicted, not measured."""
    eager = plan.eager
    kernels = [
        {"name": k.name, "forward": k.forward, "dram_bytes": k.dram_bytes, "seconds": k.seconds, "warps": k.num_warps}
        for k in plan.kernels
    ]
    return {
        "title": plan.title,
        "device": plan.device,
        "kernels": kernels,
        "dots": [{"what": d.what, "flops": d.flops, "seconds": d.seconds} for d in plan.dots],
        "opaque": list(plan.opaque),
        "generated_share": plan.coverage.share,
        "saved_bytes": plan.saved_bytes,
        "predicted": {"dram_bytes": plan.dram_bytes, "seconds": plan.seconds},
        "predicted_eager": {"dram_bytes": eager.dram_bytes, "seconds": eager.seconds, "rule": eager.rule}
        if eager
        else None,
        "compile_seconds": plan.compile_seconds,
    }


def check_line(check: Mapping[str, Any]) -> str:
    """One line on one check; the whole report where it failed."""
    if check.get("error"):
        return f"  [red]FAIL[/red]  {escape(check['title'])}: {escape(check['error'])}"
    state = "[green]ok[/green]  " if check["ok"] else "[red]FAIL[/red]"
    counts = f"{counted(check['tensors'], 'tensor')}, {counted(check['seeds'], 'seed')}, {check['seconds']:.1f} s"
    line = f"  {state}  {escape(check['title'])}: {counts}"
    line += "".join(f"\n        NOTE: {escape(note)}" for note in check.get("notes", ()))
    return line if check["ok"] else f"{line}\n{escape(check['text'])}"
