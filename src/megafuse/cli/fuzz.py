"""``megafuse fuzz``: random modules fused and checked, and what fails printed as a small program."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
import typer

from megafuse.api import NotFusedWarning, fuse
from megafuse.cli.running import TARGET_ON, limit_threads
from megafuse.core.dtypes import spelled
from megafuse.core.errors import TargetError
from megafuse.validate import CheckOptions, check
from megafuse.workloads.random_modules import DTYPES, ModuleProgram
from megafuse.workloads.random_reduce import reduce_program
from megafuse.workloads.random_steps import random_program

# Most modules are judged on two draws. Those hold too few elements to tell a fault from chance, so what fails in
# numbers alone is judged by the same rule on 14 fresh draws, and where those leave a doubt, as in any check, on more.
FIRST = CheckOptions(seeds=2, small_seeds=0, repeats=1, ask_again=False)
AGAIN = replace(FIRST, seeds=14, first_seed=50, ask_again=True)
LOST = "the device is lost"
NUMBERS = "numbers"


@dataclass(frozen=True)
class Case:
    """One module: its number and type, and where it runs."""

    seed: int
    dtype: str
    device: str = "cpu"

    @property
    def command(self) -> str:
        """The command that runs it again."""
        return f"megafuse fuzz --seed {self.seed} --count 1 --dtype {self.dtype} --device {self.device}"


@dataclass(frozen=True)
class Failure:
    """``kind``: the exception's name, or what the check rejects. ``program``: the module as far as it was reduced."""

    kind: str
    text: str
    program: ModuleProgram


def cases(seed: int, count: int, dtype: str, device: str) -> list[Case]:
    """``count`` modules from number ``seed`` on; dtype ``all`` gives each number one of the types in turn."""
    chosen = spelled(dtype, ("all", *DTYPES), "--dtype")
    names = list(DTYPES) if chosen == "all" else [chosen]
    return [Case(n, names[n % len(names)], device) for n in range(seed, seed + max(0, count))]


def examine(program: ModuleProgram, device: str = "cpu") -> Failure | None:
    """Fuse a module on ``device`` and check it by the acceptance rule; None where all is well."""
    module, inputs = program.make(device)
    module(*inputs)  # what does not run without megafuse is a fault of the generator, and raised
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", NotFusedWarning)
            warnings.filterwarnings("error", message=".*the original ops run")
            fused = fuse(module, *inputs, target=TARGET_ON[device])
            report = check(module, *inputs, fused=fused, options=FIRST)
            if not report.ok and not report.structure and not report.determinism:
                report = check(module, *inputs, fused=fused, options=AGAIN)
    except TimeoutError:
        raise
    except Exception as error:
        return Failure(LOST if _is_lost(device) else type(error).__name__, str(error), program)
    if report.ok:
        return None
    kind = "structure" if report.structure else "determinism" if report.determinism else NUMBERS
    return Failure(kind, str(report), program)


def _is_lost(device: str) -> bool:
    """Whether nothing runs on the GPU any more in this process: so it is after an illegal access."""
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def examine_case(case: Case, each: float = math.inf, reduce_for: float = 0.0) -> Failure | None:
    """Examine a module within ``each`` seconds, and reduce it for ``reduce_for`` seconds where it fails."""
    program = random_program(case.seed, case.dtype)
    try:
        with _time_limit(each):
            failure = examine(program, case.device)
    except TimeoutError:
        return Failure("time limit", f"it took longer than {each:.0f} s", program)
    if failure is None or failure.kind == LOST or reduce_for <= 0:
        return failure
    latest = failure

    def fails(candidate: ModuleProgram) -> bool:
        nonlocal latest
        try:
            with _time_limit(each):
                found = examine(candidate, case.device)
        except TimeoutError:
            return False
        if found is None or found.kind != latest.kind:
            return False
        latest = found
        return True

    reduce_program(program, fails, seconds=reduce_for)
    return latest


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises ``TimeoutError`` in the body after ``seconds``."""
    if not math.isfinite(seconds):
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def failure_text(case: Case, failure: Failure) -> str:
    """What failed, a program that shows it, and how to have it again."""
    bar = "-" * 100
    lines = len(failure.program.lines)
    options = _written(AGAIN) if failure.kind == NUMBERS else ""
    return (
        f"FAILED module {case.seed} in {case.dtype}: {failure.kind}\n{failure.text}\n"
        f"a program of {lines} lines that shows it:\n{bar}\n{failure.program.reproducer(case.device, options)}{bar}\n"
        f"again: {case.command}"
    )


def _written(options: CheckOptions) -> str:
    """The arguments that make ``options``."""
    values = ((f.name, getattr(options, f.name), f.default) for f in fields(options))
    return ", ".join(f"{name}={value!r}" for name, value, default in values if value != default)


def run_fuzz(todo: Sequence[Case], *, jobs: int, seconds: float, each: float, reduce_for: float) -> bool:
    """Examine modules in ``jobs`` processes until all are done or ``seconds`` are over; True if none failed."""
    begin = time.monotonic()
    failed, done = 0, 0
    for case, failure in _outcomes(todo, jobs, begin + seconds, each, reduce_for):
        done += 1
        if failure is not None:
            failed += 1
            typer.echo(failure_text(case, failure))
        elif done % 100 == 0:
            typer.echo(f"{done} of {len(todo)} done, {failed} failed, {time.monotonic() - begin:.0f} s")
    where = f"modules {todo[0].seed} to {todo[-1].seed} on {todo[0].device}" if todo else "no modules"
    typer.echo(
        f"fuzz: {where}: {done - failed} passed, {failed} failed, {len(todo) - done} not run, "
        f"{time.monotonic() - begin:.0f} s"
    )
    return failed == 0


def _outcomes(
    todo: Sequence[Case], jobs: int, end: float, each: float, reduce_for: float
) -> Iterator[tuple[Case, Failure | None]]:
    """Cases with what came of them, as they end."""
    if jobs <= 1:
        for case in todo:
            if time.monotonic() > end:
                return
            yield case, examine_case(case, each, reduce_for)
        return
    left = iter(todo)
    running: dict[Future[Failure | None], Case] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=limit_threads) as pool:
        while True:
            while len(running) < jobs and time.monotonic() < end and (following := next(left, None)):
                running[pool.submit(examine_case, following, each, reduce_for)] = following
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                try:
                    yield running.pop(future), future.result()
                except BrokenProcessPool as error:
                    raise TargetError("a process died while it ran a module", hint="run it with --jobs 1") from error
