"""Calls on inputs that take turns: single ones on an idle device, and many in one CUDA graph, beyond the L2 cache."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megafuse.bench.guard import guarded
from megafuse.bench.record import Facts
from megafuse.bench.step import Case, Step
from megafuse.bench.timing import Timer, Times, Work, capture, time_calls, time_rounds

BEYOND = 1.25  # times the L2 cache: the inputs of all calls together
MOST_CALLS = 4096  # in one graph
StepOf = Callable[[Case], Step]


@dataclass(frozen=True)
class Rotation:
    """Cases that are alike but for their tensors. ``bytes``: of all their inputs and upstream gradients."""

    cases: tuple[Case, ...]
    bytes: int
    l2_bytes: int

    def as_dict(self) -> Facts:
        """For a record: how many calls, and whether their inputs go beyond the cache."""
        return {"calls": len(self.cases), "input_bytes": self.bytes, "l2_bytes": self.l2_bytes}

    def steps(self, step: StepOf) -> list[Step]:
        """A step for each case."""
        return [step(case) for case in self.cases]


def rotate(case: Case, l2_bytes: int) -> Rotation:
    """The case, and as many like it with other values as together exceed a cache of ``l2_bytes`` (at least one)."""
    each = sum(t.nbytes for t in _tensors(case))
    count = min(MOST_CALLS, max(2, math.ceil(BEYOND * l2_bytes / max(each, 1))))
    made = (case, *(_moved(case, shift) for shift in range(1, count)))
    return Rotation(made, count * each, l2_bytes)


def _tensors(case: Case) -> list[Tensor]:
    leaves = pytree.tree_leaves((case.args, dict(case.kwargs)))
    return [*(t for t in leaves if isinstance(t, Tensor)), *case.cotangents]


def _moved(case: Case, shift: int) -> Case:
    """The same values in other places: every tensor rolled along its rows, in memory of its own."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().roll(shift, 0).requires_grad_(value.requires_grad)

    args, kwargs = pytree.tree_map(moved, (case.args, dict(case.kwargs)))
    return replace(case, args=args, kwargs=kwargs, cotangents=tuple(map(moved, case.cotangents)))


def single_calls(
    rotation: Rotation,
    steps: Mapping[str, StepOf],
    rounds: int,
    warmup: int,
    timer: Timer,
    errors: MutableSequence[str],
) -> dict[str, Times]:
    """Event time of single calls, launch overhead included, by rival; each call has the next inputs."""
    works: dict[str, Work] = {}
    for name, step in steps.items():
        with guarded(errors, f"call of {name}"):
            work = _in_turn(rotation.steps(step))
            for _ in range(max(1, warmup)):
                work()
            works[name] = work
    return time_calls(works, rounds=rounds, timer=timer)


def _in_turn(steps: Sequence[Step]) -> Work:
    turns = itertools.cycle(steps)

    def work() -> None:
        next(turns)()

    return work


def graphed_calls(
    rotation: Rotation, steps: Mapping[str, StepOf], rounds: int, timer: Timer, errors: MutableSequence[str]
) -> dict[str, Times]:
    """Device time of one call, by rival: a replay of a CUDA graph of all calls, divided by their number."""
    graphs: dict[str, Any] = {}
    for name, step in steps.items():
        with guarded(errors, f"graph of calls of {name}"):
            graphs[name] = capture(_all_of(rotation.steps(step)), warmup=1)
            graphs[name].replay()
            torch.cuda.synchronize()
    works = {name: graph.replay for name, graph in graphs.items()}
    found = time_rounds(works, rounds=rounds, timer=timer)
    return {name: times.divided(len(rotation.cases)) for name, times in found.items()}


def _all_of(steps: Sequence[Step]) -> Work:
    def work() -> None:
        for step in steps:
            step()

    return work
