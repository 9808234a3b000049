"""Validation before timing: the acceptance rule of ``megafuse.validate`` for every rival."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megafuse.api import check
from megafuse.bench.guard import error_text
from megafuse.bench.step import Case
from megafuse.validate import CheckOptions, judge, measure
from megafuse.validate.oracle import oracle_run
from megafuse.validate.problem import Problem, draw_leaves
from megafuse.validate.running import Run, Runner, draw_cotangents

#: Levels of the check of generated steps. The first seed of ``quick`` is odd: those run on poisoned allocations.
LEVELS = {
    "quick": CheckOptions(seeds=1, small_seeds=0, repeats=1, first_seed=1, require_finite=True),
    "full": CheckOptions(require_finite=True),
}
LARGE_BYTES = 64 * 2**20  # inputs above this take the quick level unless told otherwise


@dataclass(frozen=True)
class Checked:
    """Outcome of validation. ``how`` says what was compared; ``failures`` name tensors and reasons."""

    ok: bool
    how: str
    failures: tuple[str, ...] = ()
    seconds: float = 0.0


def level_for(case: Case, level: str) -> str:
    """``auto`` resolved: quick for inputs above 64 MiB, else full."""
    if level != "auto":
        return level
    return "quick" if sum(t.nbytes for t in case.inputs()) > LARGE_BYTES else "full"


def verify(case: Case, fn: Callable[..., Any], *, generated: bool, level: str = "auto") -> Checked:
    """Judge ``fn`` against the case's module and the fp64 oracle.

    Generated steps (ours) take ``megafuse.check``: structure, the rule, poisoned memory and bitwise repeats. Other
    rivals take the same rule on one seed, without structure, poison and repeats, which they do not promise.
    """
    start = time.perf_counter()
    chosen = level_for(case, level)
    how = f"megafuse.check, level {chosen}" if generated else "the acceptance rule, one seed"
    try:
        failures = _check_failures(case, fn, LEVELS[chosen]) if generated else one_seed_failures(case, fn)
    except Exception as error:
        failures = (error_text(error),)
    finally:
        case.clear_gradients()
    return Checked(not failures, how, failures, time.perf_counter() - start)


def _check_failures(case: Case, fn: Callable[..., Any], options: CheckOptions) -> tuple[str, ...]:
    report = check(case.module, *case.args, fused=fn, options=options, **case.kwargs)
    return report.failures if report.verdicts else ("nothing was compared", *report.failures)


def one_seed_failures(case: Case, fn: Callable[..., Any], seed: int = 1) -> tuple[str, ...]:
    """Reasons why ``fn`` breaks the rule on one draw of inputs; empty if it keeps it."""
    problem = Problem.of(case.module, case.args, case.kwargs)
    leaves = draw_leaves(problem, seed)
    (unfused,) = Runner(problem, problem.fn).run(leaves, seed)
    cotangents = draw_cotangents(unfused.outputs, seed)
    (ours,) = Runner(problem, fn).run(leaves, cotangents)
    return _judged(ours, unfused, oracle_run(problem, leaves, cotangents))


def _judged(ours: Run, unfused: Run, exact: Run) -> tuple[str, ...]:
    found, theirs, true = ours.tensors(), unfused.tensors(), exact.tensors()
    failures, samples = [], []
    for name, reference in theirs.items():
        if name.startswith("state "):
            continue
        tensor = found.get(name)
        if tensor is None or tensor.shape != reference.shape or tensor.dtype != reference.dtype:
            failures.append(f"{name}: missing, or of another shape or dtype")
        else:
            samples.append(measure(name, name.split(" ")[0], tensor, reference, true[name]))
    verdicts = judge(samples, require_finite=True)
    failures += [f"{v.name}: {reason}" for v in verdicts for reason in v.reasons]
    return tuple(failures) if samples else (*failures, "nothing was compared")
