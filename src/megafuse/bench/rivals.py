"""The rivals: eager, ``torch.compile``, megafuse. Each is made once per case and validated before it may be timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megafuse.api import fuse
from megafuse.bench.guard import error_text, progress
from megafuse.bench.plan import plan_facts
from megafuse.bench.step import Case, Step, make_step
from megafuse.bench.verify import Checked, verify
from megafuse.core.errors import InputError

Maker = Callable[[Case], Callable[..., Any]]
MEGAFUSE = "megafuse"
GRAPHED = "megafuse-graph"
TUNED = "megafuse-tuned"
OURS = (MEGAFUSE, GRAPHED, TUNED)
EAGER = "eager"


class NotValidated(InputError):
    """A rival that did not validate was to be timed."""


@dataclass(frozen=True)
class Rival:
    """One rival on one case. ``fn`` is None where it could not be made; ``error`` says why.

    ``build_seconds``: making it and its first step, compilation included.
    """

    name: str
    fn: Callable[..., Any] | None
    build_seconds: float
    error: str = ""
    checked: Checked = field(default_factory=lambda: Checked(False, "not checked"))

    @property
    def usable(self) -> bool:
        """Made and validated."""
        return self.fn is not None and self.checked.ok

    def step(self, case: Case) -> Step:
        """The step to time.

        Raises:
            NotValidated: the rival was not made or did not validate.
        """
        if self.fn is None or not self.checked.ok:
            why = self.error or "; ".join(self.checked.failures) or self.checked.how
            raise NotValidated(f"{self.name} is not timed: {why}")
        return make_step(case, self.fn)


def _eager(case: Case) -> Callable[..., Any]:
    return case.module


def _compiled(mode: str | None) -> Maker:
    def make(case: Case) -> Callable[..., Any]:
        return torch.compile(case.module, mode=mode, dynamic=False)

    return make


def _megafuse(case: Case, cuda_graph: bool = False, tune: bool | None = None) -> Callable[..., Any]:
    device = next(case.module.parameters()).device.type
    options: dict[str, Any] = {"target": "cuda" if device == "cuda" else "interpret", "dots": case.dots}
    return fuse(case.module, *case.args, **options, cuda_graph=cuda_graph, tune=tune, **case.kwargs)


MAKERS: dict[str, Maker] = {
    EAGER: _eager,
    "compile": _compiled(None),
    "max-autotune": _compiled("max-autotune-no-cudagraphs"),
    MEGAFUSE: _megafuse,
    GRAPHED: partial(_megafuse, cuda_graph=True),
    TUNED: partial(_megafuse, tune=True),
}


def parse_rivals(text: str) -> list[str]:
    """Comma-separated rival names, eager first (the others are compared with it).

    Raises:
        InputError: an unknown name.
    """
    names = [n.strip() for n in text.split(",") if n.strip()]
    unknown = [n for n in names if n not in MAKERS]
    if unknown:
        raise InputError(f"unknown rival {unknown[0]!r}", hint=f"use some of {', '.join(MAKERS)}")
    return sorted(dict.fromkeys(names), key=lambda n: n != EAGER)


def make_rival(name: str, case: Case, level: str = "auto") -> Rival:
    """Make a rival, run one step of it and validate it; any failure is in the result, not raised."""
    start = time.perf_counter()
    try:
        with case.grad_mode():
            fn = MAKERS[name](case)
        make_step(case, fn)()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:
        return Rival(name, None, time.perf_counter() - start, error_text(error))
    finally:
        case.clear_gradients()
    seconds = time.perf_counter() - start
    if name == EAGER:
        return Rival(name, fn, seconds, checked=Checked(True, "the reference itself"))
    if name in OURS and not (facts := plan_facts(fn)).kernels:
        return Rival(name, fn, seconds, checked=Checked(False, "the plan", (f"no generated kernel {facts.reason}",)))
    with case.grad_mode():
        checked = verify(case, fn, generated=name in OURS, level=level)
    return Rival(name, fn, seconds, checked=checked)


def make_rivals(names: Sequence[str], case: Case, level: str = "auto") -> list[Rival]:
    """All rivals of a case, with a line of progress for each."""
    if set(names) - {EAGER, *OURS}:
        torch.compiler.reset()  # a further shape of the same code would otherwise compile with dynamic shapes
    made = []
    for name in names:
        rival = make_rival(name, case, level)
        made.append(rival)
        state = "validated" if rival.usable else f"NOT USABLE: {rival.error or '; '.join(rival.checked.failures[:6])}"
        progress(
            f"{case.name}: {name} made in {rival.build_seconds:.1f} s, check {rival.checked.seconds:.1f} s: {state}"
        )
    return made
