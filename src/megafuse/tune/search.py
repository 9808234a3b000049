"""The search: all kernels of a step in rounds, each compiled at once in other processes, then timed one by one.

After each round the best of each kernel is settled: it has been checked against the heuristic's results, it has won
against its time once more, and it is handed to ``keep``. So whatever ends the search early, the results so far stay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megafuse.compiler import Compiled
from megafuse.compiler.variants import KernelSource, KernelTiles, Subject, Variant, make_variants, select, subjects
from megafuse.core.device import DeviceSpec
from megafuse.runtime.offline import CompileReport
from megafuse.tune.bench import Bench
from megafuse.tune.candidates import ROUNDS, candidates
from megafuse.tune.occupancy import misfit

FIRST_SAMPLES, SAMPLES = 4, 15
HOPELESS = 1.2  # times the best, after the first samples: not worth more
MARGIN = 0.99  # of the heuristic's time, which a winner must beat when both are timed again
MINOR = 0.01  # share of the step's time below which a kernel gets no more than the first round
COMPILE_SHARE = 0.6  # of the time left, at most: what is compiled by then is still timed
AT_LIMIT = 0.97  # share of the copy rate at which nothing is left to win

Compile = Callable[[Sequence[KernelSource], float], list[CompileReport]]


@dataclass(frozen=True)
class KernelResult:
    """What tuning found for one kernel. ``seconds`` are of the kernel with the kernels that add up its partial sums.

    ``own_seconds`` is the kernel's alone. ``rejected`` counts candidates by reason.
    """

    subject: Subject
    tiles: KernelTiles
    seconds: float
    heuristic_seconds: float
    own_seconds: float
    report: CompileReport | None
    programs: int
    tried: int
    rejected: Mapping[str, int]

    @property
    def changed(self) -> bool:
        """Other tiles than the heuristic's won."""
        return self.tiles != self.subject.tiles


@dataclass(frozen=True)
class StepResult:
    """One result for each kernel that was timed.

    ``stopped``: what ended the search early, or empty. ``problems``: kernels that could not be timed, and why.
    """

    kernels: tuple[KernelResult, ...]
    seconds: float
    stopped: str = ""
    problems: tuple[str, ...] = ()


@dataclass
class State:
    """One kernel in the search. ``times``: seconds by tiles, infinite for what failed."""

    subject: Subject
    heuristic: Variant
    times: dict[KernelTiles, float] = field(default_factory=dict)
    variants: dict[KernelTiles, Variant] = field(default_factory=dict)
    checked: dict[KernelTiles, bool] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    settled: KernelResult | None = None

    @property
    def base(self) -> float:
        """The heuristic's time."""
        return self.times.get(self.subject.tiles, math.inf)

    @property
    def best(self) -> KernelTiles:
        """The fastest tiles so far: the cheapest by measured costs."""
        by_name = {str(number): tiles for number, tiles in enumerate(self.times)}
        if not by_name:
            return self.subject.tiles
        costs = {name: self.times[tiles] for name, tiles in by_name.items()}
        return by_name[select(list(costs), costs, costs).chosen]

    def reject(self, tiles: KernelTiles, reason: str) -> None:
        """Note why tiles are out."""
        self.times[tiles] = math.inf
        kind = " ".join(w for w in reason.split(":", maxsplit=1)[0].split() if not any(c.isdigit() for c in w))
        self.rejected[kind] = self.rejected.get(kind, 0) + 1


@dataclass
class Search:
    """A search over the kernels of one compilation. ``keep`` is given each result as it is settled.

    ``compile_`` compiles sources within so many seconds; None: they need no compiling. ``say`` is told what is done:
    (text, done, of how many).
    """

    compiled: Compiled
    bench: Bench
    compile_: Compile | None
    keep: Callable[[KernelResult], None]
    deadline: float
    say: Callable[[str, int, int], None] = lambda text, done, total: None
    reports: dict[str, CompileReport] = field(default_factory=dict)
    stopped: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def device(self) -> DeviceSpec:
        """The device for which the kernels were scheduled."""
        return self.compiled.device

    def run(self, wanted: Sequence[str], known: Mapping[str, KernelTiles]) -> list[KernelResult]:
        """Tune the kernels ``wanted`` (keys); the others of the step have the tiles ``known``."""
        found = [s for s in subjects(self.compiled.step) if s.key in wanted]
        variants = make_variants(self.compiled, known, [s.key for s in found], self.bench.backend)
        states = [State(s, variants[s.key], variants={s.tiles: variants[s.key]}) for s in found]
        results: dict[str, KernelResult] = {}
        try:
            self._time(states, {s.subject.key: [s.subject.tiles] for s in states}, "heuristic")
            results |= self._settle(states)
            for name in ROUNDS:
                todo = self._candidates(states, name)
                if not todo or self._late():
                    break
                self._make(states, todo, known)
                self._time(states, todo, name)
                results |= self._settle(states)
        except KeyboardInterrupt:
            self.stopped = "interrupted"
            results |= self._settle(states)
        self.problems += [f"{s.subject.name}: {s.problem}" for s in states if s.problem]
        return list(results.values())

    def _late(self) -> bool:
        if time.monotonic() < self.deadline:
            return False
        self.stopped = self.stopped or "out of time"
        return True

    def _candidates(self, states: list[State], name: str) -> dict[str, list[KernelTiles]]:
        """What to try in this round, by kernel; the kernels that take longest first."""
        total = sum(s.base for s in states if s.base < math.inf)
        todo = {}
        for state in sorted(states, key=lambda s: -s.base):
            minor = name != ROUNDS[0] and state.base < MINOR * total
            if state.base < math.inf and not minor and not self._at_limit(state):
                todo[state.subject.key] = candidates(state.subject, name, state.best, state.times)
        return {k: t for k, t in todo.items() if t}

    def _at_limit(self, state: State) -> bool:
        floor = state.subject.dram_bytes / self.device.dram_bandwidth
        return bool(state.times[state.best] * AT_LIMIT <= floor)

    def _make(
        self, states: list[State], todo: Mapping[str, list[KernelTiles]], known: Mapping[str, KernelTiles]
    ) -> None:
        """Schedule the candidates: the first of all kernels together, then the second, and so on."""
        by_key = {s.subject.key: s for s in states}
        for number in range(max(map(len, todo.values()), default=0)):
            some = {key: tiles[number] for key, tiles in todo.items() if number < len(tiles)}
            made = make_variants(self.compiled, {**known, **some}, some, self.bench.backend)
            for key, tiles in some.items():
                if key in made:
                    by_key[key].variants[tiles] = made[key]
                else:
                    by_key[key].reject(tiles, "the schedule stage does not take it")

    def _time(self, states: list[State], todo: Mapping[str, list[KernelTiles]], name: str) -> None:
        """Compile what is to be tried, then time it kernel by kernel."""
        by_key = {s.subject.key: s for s in states}
        order = [(by_key[k], tiles[n]) for n in range(max(map(len, todo.values()))) for k, tiles in todo.items()
                 if n < len(tiles)]  # fmt: skip
        order = [(s, t) for s, t in order if t in s.variants]
        self._compile([s.variants[t] for s, t in order], name)
        done = 0
        for key, tiles in todo.items():
            state = by_key[key]
            with _Given(self.bench, state) as given:
                for one in (t for t in tiles if t in state.variants and t not in state.times):
                    done += 1
                    self.say(f"{name}: timing {state.subject.name}", done, len(order))
                    if given is None or (name != "heuristic" and self._late()):
                        break
                    self._time_one(state, one, given)

    def _time_one(self, state: State, tiles: KernelTiles, given: Mapping[str, Tensor]) -> None:
        variant = state.variants[tiles]
        reason = "" if tiles == state.subject.tiles else self._misfit(variant, state.heuristic)
        if reason:
            state.reject(tiles, reason)
            return
        try:
            seconds = self.bench.seconds(variant, given, FIRST_SAMPLES)
            if seconds < HOPELESS * min(state.times.values(), default=math.inf):
                seconds = self.bench.seconds(variant, given, SAMPLES)
            state.times[tiles] = seconds
        except Exception as error:  # what cannot be launched loses; the rest goes on
            state.reject(tiles, f"cannot be run: {type(error).__name__}: {error}")
            if tiles == state.subject.tiles:
                state.problem = f"cannot be run: {error}"

    # --- compiling ----------------------------------------------------------------------------------------------------

    def _compile(self, variants: Sequence[Variant], name: str) -> None:
        """Compile the sources that are new, in order of importance; what is not reached gets no report."""
        if self.compile_ is None:
            return
        new = {s.digest: s for v in variants for s in v.sources if s.digest not in self.reports}
        self.say(f"{name}: compiling {len(new)} kernels", 0, len(new))
        left = self.deadline - time.monotonic()
        if new and left > 0:
            found = self.compile_(list(new.values()), COMPILE_SHARE * left)
            self.reports |= {r.digest: r for r in found}

    def _misfit(self, variant: Variant, heuristic: Variant) -> str:
        """Why a variant is not to be run; it may spill as much as the heuristic's.

        But not where it loads matrices first: it would be planned again when it is next assembled (``compiler.proof``).
        """
        if self.compile_ is None:
            return ""
        own = self.reports.get(heuristic.sources[0].digest)
        first = variant.tiles.chain.first if variant.tiles.chain else 0
        for number, source in enumerate(variant.sources):
            report = self.reports.get(source.digest)
            spills = own.spills if own is not None and number == 0 and not first else 0
            if report is None:
                return "out of time before it was compiled"
            if why := misfit(report, source.num_warps, self.device, spills):
                return why
        return ""

    # --- settling -----------------------------------------------------------------------------------------------------

    def _settle(self, states: list[State]) -> dict[str, KernelResult]:
        """The results as they stand: winners checked, and better than the heuristic once more."""
        found = {}
        for number, state in enumerate(states):
            if state.base == math.inf:
                continue
            if state.settled is None or state.settled.tiles != state.best:
                self.say(f"checking {state.subject.name}", number, len(states))
                with _Given(self.bench, state) as given:
                    if given is None:
                        continue
                    while not self._sound(state, state.best, given):
                        pass
                    state.settled = self._result(state, given)
            state.settled = replace(state.settled, tried=len(state.times), rejected=dict(state.rejected))
            found[state.subject.key] = state.settled
            self.keep(state.settled)
        return found

    def _sound(self, state: State, tiles: KernelTiles, given: Mapping[str, Tensor]) -> bool:
        """``tiles`` are the heuristic's, or right and faster; else they are out."""
        if tiles == state.subject.tiles or state.checked.get(tiles):
            return True
        try:
            reason = self.bench.disagreement(state.variants[tiles], state.heuristic, given)
        except Exception as error:  # what cannot be checked is not taken
            reason = f"cannot be checked: {type(error).__name__}: {error}"
        if not reason and not self._wins(state, tiles, given):
            reason = "is not faster when timed again"
        if reason:
            state.reject(tiles, reason)
        state.checked[tiles] = not reason
        return not reason

    def _wins(self, state: State, tiles: KernelTiles, given: Mapping[str, Tensor]) -> bool:
        """Faster than the heuristic by more than noise, when both are timed in turn."""
        pair = (state.heuristic, state.variants[tiles])
        rounds = [[self.bench.seconds(v, given, SAMPLES) for v in pair] for _ in range(2)]
        state.times[state.subject.tiles] = min(r[0] for r in rounds)
        state.times[tiles] = min(r[1] for r in rounds)
        return all(r[1] < MARGIN * r[0] for r in rounds)

    def _result(self, state: State, given: Mapping[str, Tensor]) -> KernelResult:
        best = state.best
        variant = state.variants[best]
        alone = replace(variant, programs=variant.programs[:1], sources=variant.sources[:1], args=variant.args[:1])
        own = state.times[best] if len(variant.sources) == 1 else self.bench.seconds(alone, given, SAMPLES)
        source = variant.sources[0]
        return KernelResult(
            state.subject,
            best,
            state.times[best],
            state.base,
            own,
            self.reports.get(source.digest),
            source.grid[0] * source.grid[1],
            len(state.times),
            dict(state.rejected),
        )


class _Given:
    """The buffers that a kernel's variants read, for as long as they are timed; None where memory does not suffice."""

    def __init__(self, bench: Bench, state: State) -> None:
        self.bench, self.state = bench, state

    def __enter__(self) -> dict[str, Tensor] | None:
        try:
            return self.bench.given(self.state.heuristic)
        except torch.cuda.OutOfMemoryError:
            self.state.problem = "its buffers do not fit the free memory"
            return None

    def __exit__(self, *error: object) -> None:
        if self.bench.device.type == "cuda":
            torch.cuda.empty_cache()
