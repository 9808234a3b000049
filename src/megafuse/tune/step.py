"""Tuning a compiled step on the GPU at hand: with a lock, a time limit, progress shown, and results kept on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megafuse.compiler import Compiled, KnownTiles, reschedule
from megafuse.compiler.plans import Tuner, tiles_as_data
from megafuse.compiler.variants import KernelSource, KernelTiles, Subject, alike, subjects
from megafuse.core.device import DeviceSpec
from megafuse.core.occupancy import limiting, occupancy
from megafuse.runtime.offline import CompileReport, compile_offline
from megafuse.runtime.plan_store import Entry, drop_entry, tuning_lock, write_entry
from megafuse.runtime.plan_store import say as warn
from megafuse.runtime.timer import require_cuda
from megafuse.tune.bench import Bench, event_timer
from megafuse.tune.search import Compile, KernelResult, Search, StepResult

DEFAULT_SECONDS = 90.0
FIRST_SHARE = 0.85  # of the time, for all kernels; then the kernels that add up partial sums, which are new
SECONDS_PER_KERNEL = 30.0  # of one compilation
MOST_PROCESSES = 32
Say = Callable[[str, int, int], None]


def tuner(seconds: float = DEFAULT_SECONDS) -> Tuner:
    """What ``fuse(tune=True)`` calls for a compilation of which not all is known."""

    def tune(compiled: Compiled, device: torch.device) -> None:
        result = tune_step(compiled, seconds=seconds, device=device)
        if result.stopped == "interrupted":
            warn("tuning was interrupted: what was found so far is taken")
        for problem in result.problems:
            warn(f"not tuned: {problem}")

    return tune


def tune_step(
    compiled: Compiled,
    *,
    seconds: float = DEFAULT_SECONDS,
    again: bool = False,
    device: torch.device | None = None,
) -> StepResult:
    """Measure tiles for the kernels of a step on a GPU (default: the current one), and keep the best in the cache.

    Kernels that have been measured are left out, unless ``again``. The search ends after about ``seconds``, or at
    Ctrl-C; what is settled by then is kept.

    Raises:
        TargetError: there is no GPU.
    """
    require_cuda()
    place = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    bench = Bench(place, "triton", event_timer)
    with torch.cuda.device(place), tuning_lock(2 * seconds + 60), progress() as say:
        return run(compiled, bench, compiler(compiled.device), seconds=seconds, say=say, again=again)


def run(
    compiled: Compiled,
    bench: Bench,
    compile_: Compile | None,
    *,
    seconds: float,
    say: Say = lambda text, done, total: None,
    again: bool = False,
) -> StepResult:
    """Tune with a given bench and compiler; see :func:`tune_step`.

    First the kernels that do the work; then, with the winners in place, those that add up their partial sums, of which
    the winners decide how many there are.
    """
    start = time.monotonic()
    names = _Kept(compiled.device, again)
    results: dict[str, KernelResult] = {}
    stopped, problems = "", list[str]()
    for share, all_kernels in ((FIRST_SHARE, False), (1.0, True)):
        current = reschedule(compiled, names.tiles)
        wanted = names.missing([s for s in subjects(current.step) if all_kernels or not s.finishes])
        if not wanted or stopped == "interrupted":
            continue
        search = Search(current, bench, compile_, names.keep, start + share * seconds, say)
        results |= {r.subject.key: r for r in search.run(wanted, names.known)}
        stopped, problems = search.stopped or stopped, problems + search.problems
    return StepResult(tuple(results.values()), time.monotonic() - start, stopped, tuple(dict.fromkeys(problems)))


def entries_of(compiled: Compiled) -> list[Entry]:
    """What the cache has of the kernels of a step, scheduled with it, in order."""
    known = KnownTiles(compiled.device.name)
    step = reschedule(compiled, known).step
    return [known.found[s.key] for s in subjects(step) if s.key in known.found]


@dataclass
class _Kept:
    """What is known of kernels: read from the cache (not ``again``), and written to it."""

    device: DeviceSpec
    again: bool
    known: dict[str, KernelTiles] = field(default_factory=dict)

    def tiles(self, key: str) -> KernelTiles | None:
        """The tiles of a kernel, as found here before or earlier."""
        if key not in self.known and not self.again:
            found = KnownTiles(self.device.name)(key)
            if found is not None:
                self.known[key] = found
        return self.known.get(key)

    def missing(self, kernels: Sequence[Subject]) -> list[str]:
        """Keys of the kernels that have nothing kept, or something that the schedule stage did not take."""
        for kernel in kernels:
            kept = self.tiles(kernel.key)
            if kept is not None and not alike(kernel.tiles, kept):
                del self.known[kernel.key]
                drop_entry(kernel.key, self.device.name, "its tiles are not legal")
        return [k.key for k in kernels if self.tiles(k.key) is None]

    def keep(self, result: KernelResult) -> None:
        """Take over a result."""
        self.known[result.subject.key] = result.tiles
        write_entry(entry_of(result, self.device), self.device.name)


def entry_of(result: KernelResult, device: DeviceSpec) -> Entry:
    """What is kept of a result."""
    return Entry(
        result.subject.key,
        result.subject.name,
        tiles_as_data(result.tiles),
        result.tiles.num_warps,
        result.own_seconds,
        result.heuristic_seconds,
        facts_of(result, device),
    )


def facts_of(result: KernelResult, device: DeviceSpec) -> dict[str, object]:
    """Figures for reports: of the search, of the compiled kernel, and what most likely limits it."""
    copy = result.subject.dram_bytes / result.own_seconds / device.dram_bandwidth
    facts: dict[str, object] = {
        "tuned_seconds": result.seconds,
        "tried": result.tried,
        "rejected": dict(result.rejected),
        "dram_bytes": result.subject.dram_bytes,
        "copy_share": copy,
    }
    report = result.report
    if report is None or report.error:
        return facts
    found = occupancy(report.registers, report.shared, result.tiles.num_warps, device)
    return facts | {
        "registers": report.registers,
        "spills": report.spills,
        "shared": report.shared,
        "occupancy": found.share,
        "limit": limiting(copy, found, result.programs, device),
    }


def compiler(device: DeviceSpec) -> Compile:
    """Compiles sources for ``device`` in other processes."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def compile_(sources: Sequence[KernelSource], seconds: float) -> list[CompileReport]:
        return compile_offline(
            sources,
            device.arch,
            processes=min(MOST_PROCESSES, count),
            seconds_per_kernel=SECONDS_PER_KERNEL,
            seconds=seconds,
        )

    return compile_


@contextmanager
def progress() -> Iterator[Say]:
    """A bar on the terminal, if there is one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tuning", total=None)

        def say(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        yield say
