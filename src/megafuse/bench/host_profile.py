"""Where the host's time of a fused step goes: its parts one by one, the calls of its launch code, and a profile.

Everything runs on the calling thread: backward is the launch code itself, without autograd's own thread.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megafuse.api import engine_of
from megafuse.bench.record import Facts
from megafuse.bench.step import Case, make_step
from megafuse.compiler import Bound
from megafuse.core.errors import InputError
from megafuse.runtime.autograd import StepSpec, apply
from megafuse.runtime.direct import Direct
from megafuse.runtime.step import LoadedStep

Work = Callable[[], Any]
LINES = 25  # of a profile


@dataclass
class Inside:
    """The launch code of one step on fixed tensors: ``forward()`` and ``backward()`` on the calling thread."""

    spec: StepSpec
    inputs: list[Tensor]
    tangents: list[Tensor]

    @property
    def step(self) -> LoadedStep:
        """The loaded launch code, without graphs."""
        step = self.spec.step
        return step if isinstance(step, LoadedStep) else step.plain

    def forward(self) -> Any:
        """Outputs and saved tensors of one forward."""
        return self.step.forward(list(self.inputs))

    def backward_of(self, saved: list[Tensor | None]) -> Work:
        """One backward on given saved tensors, which are kept."""
        return lambda: self.step.backward(list(saved), list(self.tangents))


def profile_host(case: Case, fused: Any, steps: int, sync: Callable[[], None] = lambda: None) -> tuple[Facts, str]:
    """Microseconds of every part of a fused step, and a text for people.

    Raises:
        InputError: the original ops serve this case.
    """
    inside = _inside(case, fused)
    with torch.no_grad():
        outputs, saved = inside.forward()
        backward = inside.backward_of(saved)
        backward()
    facts: Facts = {"steps": steps, "parts": _parts(case, fused, inside, outputs, backward, steps, sync)}
    with torch.no_grad():
        facts["calls"] = {
            "forward": time_calls(names_of(inside.step.forward), inside.forward, steps, sync),
            "backward": time_calls(names_of(inside.step.backward), backward, steps, sync),
        }
        profiles = {"launch code of backward": profiled(backward, steps, sync)}
    profiles = {"forward": profiled(lambda: fused(*case.args, **case.kwargs), steps, sync), **profiles}
    return facts, _text(case, facts, profiles)


def _inside(case: Case, fused: Any) -> Inside:
    bound: Bound = engine_of(fused).bound(case.args, dict(case.kwargs))
    if bound.spec is None:
        raise InputError(f"{case.name}: nothing to profile, the original ops serve it: {bound.reason}")
    getter = engine_of(fused).structure(case.args, dict(case.kwargs)).getter
    assert getter is not None
    return Inside(bound.spec, bound.inputs(getter(case.args, dict(case.kwargs))), list(case.cotangents))


def _parts(
    case: Case, fused: Any, inside: Inside, outputs: Any, backward: Work, steps: int, sync: Callable[[], None]
) -> dict[str, float]:
    args, kwargs = case.args, dict(case.kwargs)
    structure = engine_of(fused).structure(args, kwargs)
    with torch.no_grad():
        null = _null(inside, outputs, backward)
    works: dict[str, Work] = {
        "step": make_step(case, fused),
        "clearing gradients": case.clear_gradients,
        "call with gradients": lambda: fused(*args, **kwargs),
        "is the structure the same": structure.still_fits,
        "finding the binding": lambda: structure.bound(args, kwargs),
        "step of the same autograd node around nothing": make_step(case, lambda *_, **__: apply(null, *inside.inputs)),
    }
    found = {name: time_each(work, steps, sync) for name, work in works.items()}
    case.clear_gradients()
    with torch.no_grad():
        found["call without gradients"] = time_each(lambda: fused(*args, **kwargs), steps, sync)
        found["launch code of forward"] = time_each(inside.forward, steps, sync)
        found["launch code of backward"] = time_each(backward, steps, sync)
    return found


def _null(inside: Inside, outputs: list[Tensor], backward: Work) -> StepSpec:
    """The same node of the autograd graph around launch code that does nothing."""
    saved, grads = inside.forward()[1], backward()
    step = NullStep(inside.step, outputs, saved, grads)
    return replace(inside.spec, step=step)  # type: ignore[arg-type]


class NullStep:
    """A step's launch code that hands out what was computed before."""

    def __init__(self, step: LoadedStep, outputs: list[Any], saved: list[Any], grads: list[Any]) -> None:
        self.device, self.has_backward = step.device, step.has_backward
        self.saved_inputs, self.saved_strides = step.saved_inputs, step.saved_strides
        self.overwritten, self.returned_again = (), step.returned_again
        self._given = outputs, saved, grads

    def forward(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """New handles on the same outputs."""
        outputs, saved, _ = self._given
        return [None if o is None else o.detach() for o in outputs], list(saved)

    def backward(self, saved: list[Any], tangents: list[Any]) -> list[Any]:
        """New handles on the same gradients."""
        return [None if g is None else g.detach() for g in self._given[2]]


def names_of(fn: Any) -> dict[str, Any]:
    """The globals of the launch code that runs: on a GPU there may be two, with checks and without."""
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, Direct):
        fn = owner.direct if owner.ready else owner.checked
    names: dict[str, Any] = fn.__globals__
    return names


def time_each(work: Work, steps: int, sync: Callable[[], None]) -> float:
    """Mean microseconds of ``work`` on the host; the device is idle at the start."""
    for _ in range(3):
        work()
    sync()
    start = time.perf_counter()
    for _ in range(steps):
        work()
    taken = time.perf_counter() - start
    sync()
    return taken / steps * 1e6


def time_calls(names: dict[str, Any], work: Work, steps: int, sync: Callable[[], None]) -> dict[str, Facts]:
    """What each function among ``names`` takes within ``work``: calls and microseconds per step, the clock's taken off.

    ``names`` are the globals of launch code; they are wrapped for the time being.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    own = {
        n: f for n, f in names.items() if callable(f) and not n.startswith("__") and n not in ("forward", "backward")
    }
    clock = time.perf_counter

    def wrapped(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            out = fn(*args, **kwargs)
            spent[name] += clock() - start
            counts[name] += 1
            return out

        return call

    try:
        names.update({n: wrapped(n, f) for n, f in own.items()})
        time_each(work, steps, sync)
    finally:
        names.update(own)
    base = _clock_cost()
    runs = steps + 3
    return {
        n: {"calls": counts[n] / runs, "us": max(0.0, spent[n] - counts[n] * base) / runs * 1e6}
        for n in sorted(spent, key=lambda n: -spent[n])
    }


def _clock_cost(times: int = 20_000) -> float:
    """Seconds that two looks at the clock and an empty call take."""
    clock, nothing = time.perf_counter, lambda: None
    total = 0.0
    for _ in range(times):
        start = clock()
        nothing()
        total += clock() - start
    return total / times


def profiled(work: Work, steps: int, sync: Callable[[], None]) -> str:
    """The most expensive functions of ``work``, by their own time (a profiler makes Python calls look dearer)."""
    work()
    sync()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        work()
    profile.disable()
    sync()
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(LINES)
    return out.getvalue()


def _text(case: Case, facts: Facts, profiles: Mapping[str, str]) -> str:
    lines = [f"{case.name}: microseconds of host time, mean of {facts['steps']}"]
    lines += [f"  {us:8.1f}  {name}" for name, us in facts["parts"].items()]
    for direction, calls in facts["calls"].items():
        total = sum(c["us"] for c in calls.values())
        lines.append(f"calls of the {direction}'s launch code, {total:.1f} us in all")
        lines += [f"  {c['us']:8.1f}  {c['calls']:5.1f} x {name}" for name, c in calls.items()]
    for name, text in profiles.items():
        lines += [f"profile of {name}, {facts['steps']} times", text]
    return "\n".join(lines)
