"""One stage of a compilation as text."""

from __future__ import annotations

from megafuse.cli.planning import Planned
from megafuse.cli.stage import Stage
from megafuse.core.errors import InputError
from megafuse.explanation import format_plan, format_schedule
from megafuse.ir.printer import format_graph


def show_stage(planned: Planned, stage: Stage, *, backend: str = "triton", kernel: str | None = None) -> str:
    """The text of a stage.

    Raises:
        InputError: no such back end, or no kernel of that name.
    """
    if stage is Stage.GRAPH:
        return format_graph(planned.compiled.graph)
    if stage is Stage.PLAN:
        return format_plan(planned.info())
    if stage is Stage.SCHEDULE:
        return format_schedule(planned.compiled.step)
    return _code(planned, backend, kernel)


def _code(planned: Planned, backend: str, kernel: str | None) -> str:
    artifact = planned.compiled.artifact(backend)
    chosen = [k for k in artifact.kernels if kernel is None or kernel in k.entry]
    if not chosen:
        names = ", ".join(k.entry for k in artifact.kernels) or "none"
        raise InputError(f"argument --kernel: no kernel's name contains {kernel!r}", hint=f"there are: {names}")
    parts = [f"# ---- {k.entry}: grid {k.grid}, {k.num_warps} warps\n{k.text}" for k in chosen]
    if kernel is None:
        parts.append(f"# ---- launch code\n{artifact.host.text}")
    return "\n".join(parts)
