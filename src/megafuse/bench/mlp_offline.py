"""What can be said of an MLP's calls without a GPU: the plan, predicted times, and the compiled kernels' resources."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megafuse.bench.mlp_case import mlp_case, series_name
from megafuse.bench.table import aligned, number
from megafuse.compiler import compile_call, dot_rule
from megafuse.explanation import (
    KernelInfo,
    Resources,
    compiled_resources,
    estimate_eager,
    explain_compiled,
    with_resources,
)
from megafuse.runtime.device import target_spec

ARCH = 90
HEADINGS = ("rows", "kernels", "library products", "opaque", "predicted us", "eager, predicted us", "x eager")
KERNEL_HEADINGS = ("kernel", "registers", "spills B", "shared B", "programs", "on an SM", "occupancy", "limited by",
                   "paced by")  # fmt: skip


@dataclass(frozen=True)
class OfflineFacts:
    """The plan of one case in numbers; seconds are predictions. ``kernels``: (name, resources) in order of launch."""

    series: str
    rows: int
    device: str
    kernels: tuple[tuple[str, Resources | None], ...]
    products: int
    opaque: int
    seconds: float
    eager_seconds: float | None


def offline_facts(source: dict[str, Any], dots: str = "library", *, compiled: bool = True) -> OfflineFacts:
    """Plan the case on tensors without data and, if ``compiled``, compile its kernels (about a second each)."""
    case = mlp_case({k: v for k, v in source.items() if k != "kind"}, "meta")
    device = target_spec(ARCH)
    rule = dot_rule(dots, torch.backends.cuda.matmul.allow_tf32)
    with case.grad_mode():
        made = compile_call(case.module, case.args, {}, device, dots=rule)
        eager = estimate_eager(lambda: case.module(*case.args), (), device)
    plan = explain_compiled(made, eager)
    if compiled:
        plan = with_resources(plan, compiled_resources(made), device)
    return OfflineFacts(
        series=series_name(source),
        rows=source["rows"],
        device=plan.device,
        kernels=tuple((c.name, c.resources) for c in plan.calls if isinstance(c, KernelInfo)),
        products=len(plan.dots),
        opaque=len(plan.calls) - len(plan.kernels) - len(plan.dots),
        seconds=plan.seconds,
        eager_seconds=eager.seconds if eager else None,
    )


def offline_text(facts: Sequence[OfflineFacts]) -> str:
    """A table of plans for each series, and the kernels of its largest size."""
    parts = []
    for name, group in itertools.groupby(facts, key=lambda f: f.series):
        cases = list(group)
        parts.append(f"{name}, planned for {cases[0].device}\n{aligned([HEADINGS, *map(_row, cases)])}")
        largest = max(cases, key=lambda f: f.rows)
        rows = [_kernel_row(*k) for k in largest.kernels]
        if any(r for _, r in largest.kernels):
            parts.append(f"compiled kernels at {largest.rows} rows\n{aligned([KERNEL_HEADINGS, *rows])}")
    return "\n\n".join(parts)


def _row(facts: OfflineFacts) -> tuple[str, ...]:
    eager = facts.eager_seconds
    return (
        str(facts.rows),
        str(len(facts.kernels)),
        str(facts.products),
        str(facts.opaque),
        number(facts.seconds * 1e6, 1),
        number(None if eager is None else eager * 1e6, 1),
        "" if not eager else f"{facts.seconds / eager:.2f}",
    )


def _kernel_row(name: str, found: Resources | None) -> tuple[str, ...]:
    if found is None or found.room is None:
        return (name, *[""] * (len(KERNEL_HEADINGS) - 2), found.error if found else "")
    room = found.room
    figures = (found.registers, found.spills, found.shared, found.programs, room.programs)
    return (name, *map(str, figures), f"{100 * room.share:.0f} %", room.limit, found.pace)
