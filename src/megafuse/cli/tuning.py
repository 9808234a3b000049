"""``megafuse tune``: measure, keep, show and export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megafuse.cli.measured import as_text, tuned_table
from megafuse.cli.planning import plan_selection
from megafuse.cli.selection import Selection
from megafuse.core.text import quantity
from megafuse.runtime.plan_store import Entry, write_plan
from megafuse.runtime.timer import require_cuda
from megafuse.tune import StepResult, entries_of, tune_step


def tune_selection(selection: Selection, *, seconds: float, again: bool, export: Path | None) -> str:
    """Tune what ``selection`` names on the GPU at hand; the report.

    Raises:
        TargetError: there is no GPU.
        InputError: the plan cannot be written.
    """
    require_cuda()
    compiled = plan_selection(selection, measured=False).compiled
    result = tune_step(compiled, seconds=seconds, again=again)
    entries = entries_of(compiled)
    lines = [as_text(tuned_table(entries, compiled.device.name)), summary(result, entries)]
    lines += [f"not tuned: {problem}" for problem in result.problems]
    if export is not None:
        write_plan(export, compiled.device.name, entries)
        lines.append(f"plan written to {export}")
    return "\n".join(lines)


def summary(result: StepResult, entries: Sequence[Entry]) -> str:
    """How long it took, what was won, and why it ended."""
    tried = sum(k.tried for k in result.kernels)
    whole = [k for k in result.kernels if not k.subject.finishes]  # the others are timed with these
    before, after = sum(k.heuristic_seconds for k in whole), sum(k.seconds for k in whole)
    gain = f"; together {quantity(before, 's')} before, {quantity(after, 's')} now" if whole else ""
    ended = f", {result.stopped}" if result.stopped else ""
    known = len(entries) - len(result.kernels)
    kept = f"; {known} kernels were measured before" if known > 0 else ""
    return f"{len(result.kernels)} kernels, {tried} tiles tried in {result.seconds:.0f} s{ended}{gain}{kept}"
