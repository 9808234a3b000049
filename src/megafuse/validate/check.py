"""``check``: a fused callable against the module it replaces, by the fp64 oracle and the one acceptance rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch

from megafuse.core.errors import InputError
from megafuse.core.keywords import options_of, require_known
from megafuse.validate.compare import Sample, measure, same_bits
from megafuse.validate.oracle import oracle_run
from megafuse.validate.poison import PoisonMode
from megafuse.validate.problem import Problem, callee_of, draw_leaves
from megafuse.validate.report import SMALL, CheckReport
from megafuse.validate.running import Run, Runner, draw_cotangents, require_not_random
from megafuse.validate.tolerance import RULE, Rule
from megafuse.validate.verdict import Verdict, decided, in_doubt, judge

Compiler = Callable[..., Callable[..., Any]]


@dataclass(frozen=True)
class CheckOptions:
    """How a check runs.

    ``seeds``: input draws pooled. ``small_seeds``: further draws with inputs times ``small_scale``, pooled apart: there
    a norm's variance is near its epsilon, which normal inputs hide below the rounding of 16-bit results.
    ``repeats``: extra forward+backward runs that must be bitwise equal to the first.
    ``poison``: give every second seed NaN-filled allocations (off for callables that a dispatch mode would disable,
    such as compiled graphs). ``require_finite``: any NaN or Inf fails, even where the reference has it too.
    ``first_seed``: number of the first draw. ``ask_again``: what is in doubt on short samples is decided by further
    draws (``Rule.further_draws`` times as many, from the next number on), once.
    """

    seeds: int = 5
    small_seeds: int = 2
    small_scale: float = 2.0**-6
    repeats: int = 3
    poison: bool = True
    require_finite: bool = False
    first_seed: int = 0
    ask_again: bool = True
    rule: Rule = RULE


def check(
    module_or_fn: Callable[..., Any],
    *args: Any,
    fused: Callable[..., Any] | None = None,
    seeds: int = 5,
    require_finite: bool = False,
    fuse: Compiler | None = None,
    options: CheckOptions | None = None,
    **kwargs: Any,
) -> CheckReport:
    """Compare ``fused`` with ``module_or_fn`` called on ``(*args, **kwargs)``; see docs/numerics.md for the rule.

    Every seed draws fresh inputs of the same shapes, strides, dtypes and requires_grad (integers, parameters and plain
    values are kept) and fresh upstream gradients. Outputs, input gradients, the gradient of every used parameter, and
    buffers or inputs that the call changes are compared; the fused call is repeated and must be bitwise equal.
    Where short samples leave a doubt, many more draws are made, and they decide; the report says so.
    ``fused`` is any callable of the same signature; without it ``fuse(module_or_fn, *args, **kwargs)`` makes one.
    ``options`` overrides ``seeds`` and ``require_finite``. Parameters, buffers and ``.grad`` are left as they were.

    Raises ``InputError`` for unusable arguments, unknown keywords or a random reference, ``OracleError`` if the oracle
    cannot run.
    """
    options = options or CheckOptions(seeds=seeds, require_finite=require_finite)
    if isinstance(options.seeds, bool) or not isinstance(options.seeds, Integral) or options.seeds < 1:
        raise InputError(f"argument 'seeds' is {options.seeds!r}", hint="give a whole number, at least 1")
    if fused is not None and (isinstance(fused, type) or not callable(fused)):
        raise InputError(f"argument 'fused' is {fused!r}", hint="pass what fuse() returned, or leave it out")
    problem = Problem.of(module_or_fn, args, kwargs)
    require_known("check", CHECK_OPTIONS, callee_of(module_or_fn), kwargs)
    if fused is None:
        if fuse is None:
            raise InputError("neither 'fused' nor 'fuse' is given", hint="pass the fused callable as fused=")
        fused = fuse(module_or_fn, *args, **kwargs)
    require_not_random(problem, problem.leaves)
    session = _Session(problem, fused, options)
    verdicts = session.judge_draws(options.first_seed)
    session.check_repeatable()
    doubts = in_doubt(verdicts, options.rule) if options.ask_again and not session.differs else ()
    if not doubts:
        return session.report(verdicts)
    following = options.first_seed + max(options.seeds, options.small_seeds)
    further = session.judge_draws(following, options.rule.further_draws)
    return session.report(decided(doubts, further, options.rule), doubts)


CHECK_OPTIONS = options_of(check)


@dataclass
class _Session:
    """State of one check while its seeds run."""

    problem: Problem
    fused: Callable[..., Any]
    options: CheckOptions
    structure: dict[str, None] = field(default_factory=dict)
    determinism: dict[str, None] = field(default_factory=dict)
    poisoned: int = 0

    @property
    def differs(self) -> bool:
        """True if a difference was found that is none of numbers."""
        return bool(self.structure or self.determinism)

    def judge_draws(self, first: int, times: int = 1) -> tuple[Verdict, ...]:
        """Verdicts on ``times`` as many draws as the options name, those from number ``first`` on and no others."""
        options, sums = self.options, dict[str, Sample]()
        for seed in range(first, first + times * options.seeds):
            self._add_seed(sums, seed)
        for seed in range(first, first + times * options.small_seeds):
            self._add_seed(sums, seed, options.small_scale, SMALL)
        return judge(sums.values(), require_finite=options.require_finite, rule=options.rule)

    def _add_seed(self, sums: dict[str, Sample], seed: int, scale: float = 1.0, suffix: str = "") -> None:
        """Run reference, candidate and oracle on one draw, and add their differences to the sums."""
        leaves = draw_leaves(self.problem, seed, scale)
        before = Run({}, {}, {**self.problem.buffers(), **self.problem.inputs(leaves)})
        (unfused,) = Runner(self.problem, self.problem.fn).run(leaves, seed)
        cotangents = draw_cotangents(unfused.outputs, seed)
        fused = self._run_fused(leaves, cotangents, poison=self.options.poison and seed % 2 == 1)
        self._note(structure_differences(fused, unfused), self.structure)
        exact = oracle_run(self.problem, leaves, cotangents)
        surrogate: Mapping[str, torch.Tensor] = {}
        if any(t.dtype == torch.float64 for t in unfused.tensors().values()):
            surrogate = oracle_run(self.problem, leaves, cotangents, torch.float32).tensors()
        changed = {f"state {n}" for n in _changed(before, unfused) | _changed(before, fused)}
        theirs, true = fused.tensors(), exact.tensors()
        for name, reference in unfused.tensors().items():
            ours = theirs.get(name)
            if name.startswith("state ") and name not in changed:
                continue
            if ours is None or ours.shape != reference.shape or ours.dtype != reference.dtype:
                continue  # already a structural difference
            fp64 = surrogate.get(name) if reference.dtype == torch.float64 else None
            triple = (ours, reference, true[name])
            role = self._role(name) + suffix
            found = measure(name + suffix, role, *triple, seed=seed, surrogate=fp64, rule=self.options.rule)
            sums[found.name] = sums[found.name] + found if found.name in sums else found

    def check_repeatable(self) -> None:
        """Bitwise equality of repeated runs and of two backwards over one forward, each in memory of its own."""
        leaves = draw_leaves(self.problem, self.options.first_seed)
        runner = Runner(self.problem, self.fused)
        first, again = runner.run(leaves, self.options.first_seed, backwards=2)
        state = [*self.problem.parameters().values(), *self.problem.buffers().values()]
        self._note(_bit_differences(first, again, "a second backward over the same forward"), self.determinism)
        self._note(_shared_memory(first.grads, again.grads, state), self.determinism)
        for _ in range(self.options.repeats):
            (run,) = runner.run(leaves, self.options.first_seed)
            self._note(_bit_differences(first, run, "a repeated run"), self.determinism)
            self._note(_shared_memory(_computed(first), _computed(run), state), self.determinism)

    def report(self, verdicts: tuple[Verdict, ...], doubts: tuple[Verdict, ...] = ()) -> CheckReport:
        """The record; ``doubts`` are why ``verdicts`` are those on further draws."""
        times = self.options.rule.further_draws if doubts else 0
        subject = getattr(self.problem.fn, "__name__", type(self.problem.fn).__name__)
        return CheckReport(
            subject=subject,
            seeds=self.options.seeds,
            repeats=self.options.repeats,
            poisoned=self.poisoned,
            verdicts=verdicts,
            structure=tuple(self.structure),
            determinism=tuple(self.determinism),
            more_draws=times * (self.options.seeds + self.options.small_seeds),
            doubts=doubts,
        )

    def _run_fused(self, leaves: Sequence[Any], cotangents: Mapping[str, torch.Tensor], *, poison: bool) -> Run:
        mode = PoisonMode() if poison else None
        with mode or nullcontext():
            (run,) = Runner(self.problem, self.fused).run(leaves, cotangents)
        self.poisoned += mode.allocations if mode else 0
        return run

    def _role(self, name: str) -> str:
        kind, _, bare = name.partition(" ")
        if kind != "grad":
            return kind
        return "parameter gradient" if bare in self.problem.parameters() else "input gradient"

    @staticmethod
    def _note(found: Sequence[str], into: dict[str, None]) -> None:
        into.update(dict.fromkeys(found))


def structure_differences(fused: Run, unfused: Run) -> list[str]:
    """Differences that need no arithmetic: which results there are, their types, shapes, dtypes, strides."""
    found = [f"{n}: missing from the fused result" for n in unfused.outputs if n not in fused.outputs]
    found += [f"{n}: not a result of the reference" for n in fused.outputs if n not in unfused.outputs]
    for name in unfused.outputs.keys() & fused.outputs.keys():
        ours, theirs = fused.outputs[name], unfused.outputs[name]
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            found += _form_differences(f"output {name}", ours, theirs, strides=True)
        elif type(ours) is not type(theirs) or ours != theirs:
            found.append(f"output {name}: {ours!r} instead of {theirs!r}")
    for name, theirs in unfused.grads.items():
        ours = fused.grads.get(name)
        if ours is None and theirs is not None:
            found.append(f"grad {name}: missing")
        elif ours is not None and theirs is None:
            found.append(f"grad {name}: given, but the reference has none")
        elif ours is not None and theirs is not None:
            found += _form_differences(f"grad {name}", ours, theirs, strides=False)
    return sorted(found)


def _form_differences(name: str, ours: torch.Tensor, theirs: torch.Tensor, *, strides: bool) -> list[str]:
    pairs = [("shape", tuple(ours.shape), tuple(theirs.shape)), ("dtype", ours.dtype, theirs.dtype)]
    pairs.append(("device", ours.device, theirs.device))
    if strides:
        pairs.append(("requires_grad", ours.requires_grad, theirs.requires_grad))
    if strides and ours.shape == theirs.shape and theirs.numel():
        pairs.append(("strides", _significant(ours), _significant(theirs)))
    return [f"{name}: {what} {a} instead of {b}" for what, a, b in pairs if a != b]


def _significant(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the axes longer than one; the others carry no meaning."""
    return tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)


def _changed(before: Run, run: Run) -> set[str]:
    return {n for n, t in run.after.items() if n in before.after and not same_bits(t, before.after[n])}


def _bit_differences(first: Run, second: Run, when: str) -> list[str]:
    one, two = first.tensors(), second.tensors()
    names = sorted(one.keys() | two.keys())
    return [f"{name} differs bitwise in {when}" for name in names if not same_bits(one.get(name), two.get(name))]


def _computed(run: Run) -> dict[str, Any]:
    """Results that a run must own: gradients, and outputs that carry one."""
    return {**{n: t for n, t in run.outputs.items() if getattr(t, "requires_grad", False)}, **run.grads}


def _shared_memory(first: Mapping[str, Any], second: Mapping[str, Any], state: Sequence[torch.Tensor]) -> list[str]:
    """Results of one run that a later run has written over; views of parameters and buffers are not counted."""
    fixed = {t.untyped_storage().data_ptr() for t in state}
    live = {n: t.untyped_storage().data_ptr() for n, t in second.items() if t is not None and t.numel()}
    earlier = {t.untyped_storage().data_ptr() for t in first.values() if t is not None and t.numel()} - fixed
    return [f"{name} lies in memory of an earlier run's results" for name, place in live.items() if place in earlier]
