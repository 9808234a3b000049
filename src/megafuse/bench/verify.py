"""Validation before timing: the acceptance rule of ``megafuse.validate`` for every rival."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megafuse.api import check
from megafuse.bench.guard import error_text
from megafuse.bench.step import Case
from megafuse.validate import RULE, CheckOptions, Sample, Verdict, decided, in_doubt, judge, measure
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
    rivals take the same rule on one seed, without structure, poison and repeats, which they do not promise. What short
    tensors leave in doubt is decided by further draws for either, and ``how`` says so.
    """
    start = time.perf_counter()
    chosen = level_for(case, level)
    how = f"megafuse.check, level {chosen}" if generated else "the acceptance rule, one seed"
    try:
        judged = _check_failures(case, fn, LEVELS[chosen]) if generated else one_seed_failures(case, fn)
    except Exception as error:
        judged = ((error_text(error),), 0)
    finally:
        case.clear_gradients()
    failures, more = judged
    how += f"; short tensors in doubt, decided by {more} further draws" if more else ""
    return Checked(not failures, how, failures, time.perf_counter() - start)


def _check_failures(case: Case, fn: Callable[..., Any], options: CheckOptions) -> tuple[tuple[str, ...], int]:
    report = check(case.module, *case.args, fused=fn, options=options, **case.kwargs)
    failures = report.failures if report.verdicts else ("nothing was compared", *report.failures)
    return failures, report.more_draws


def one_seed_failures(case: Case, fn: Callable[..., Any], seed: int = 1) -> tuple[tuple[str, ...], int]:
    """Reasons why ``fn`` breaks the rule on one draw of inputs (none: it keeps it), and on how many more in doubt."""
    problem = Problem.of(case.module, case.args, case.kwargs)
    different, verdicts = _judge_draws(problem, fn, range(seed, seed + 1))
    doubts = () if different else in_doubt(verdicts)
    more = RULE.further_draws if doubts else 0
    if doubts:
        different, further = _judge_draws(problem, fn, range(seed + 1, seed + 1 + more))
        verdicts = decided(doubts, further)
    failures = (*different, *(f"{v.name}: {reason}" for v in verdicts for reason in v.reasons))
    return failures if verdicts else (*failures, "nothing was compared"), more


def _judge_draws(
    problem: Problem, fn: Callable[..., Any], seeds: Sequence[int]
) -> tuple[tuple[str, ...], tuple[Verdict, ...]]:
    """What differs without arithmetic, and the rule's verdicts, over the draws ``seeds``."""
    different: dict[str, None] = {}
    sums: dict[str, Sample] = {}
    for seed in seeds:
        found, samples = _one_draw(problem, fn, seed)
        different.update(dict.fromkeys(found))
        for sample in samples:
            sums[sample.name] = sums[sample.name] + sample if sample.name in sums else sample
    return tuple(different), judge(sums.values(), require_finite=True)


def _one_draw(problem: Problem, fn: Callable[..., Any], seed: int) -> tuple[list[str], list[Sample]]:
    leaves = draw_leaves(problem, seed)
    (unfused,) = Runner(problem, problem.fn).run(leaves, seed)
    cotangents = draw_cotangents(unfused.outputs, seed)
    (ours,) = Runner(problem, fn).run(leaves, cotangents)
    return _compared(ours, unfused, oracle_run(problem, leaves, cotangents), seed)


def _compared(ours: Run, unfused: Run, exact: Run, seed: int) -> tuple[list[str], list[Sample]]:
    found, theirs, true = ours.tensors(), unfused.tensors(), exact.tensors()
    different, samples = [], []
    for name, reference in theirs.items():
        if name.startswith("state "):
            continue
        tensor = found.get(name)
        if tensor is None or tensor.shape != reference.shape or tensor.dtype != reference.dtype:
            different.append(f"{name}: missing, or of another shape or dtype")
        else:
            samples.append(measure(name, name.split(" ")[0], tensor, reference, true[name], seed=seed))
    return different, samples
