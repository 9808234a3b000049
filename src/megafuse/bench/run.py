"""Run a list of cases and keep the record as it grows, so that a run that is stopped leaves what it had measured."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megafuse.bench.cases import make_case
from megafuse.bench.guard import guarded, progress, release_memory, say
from megafuse.bench.measure import SECTIONS, Settings, measure_case
from megafuse.bench.record import RESULTS, CaseResult, Facts, Record, begin
from megafuse.bench.rivals import MAKERS, parse_rivals
from megafuse.bench.table import summary
from megafuse.bench.timing import copy_bandwidth
from megafuse.core.errors import InputError
from megafuse.runtime.timer import require_cuda

Show = Callable[[Record], str]
Measure = Callable[[Mapping[str, Any], Settings], CaseResult]


def add_common_options(parser: argparse.ArgumentParser, *, rivals: str, what: str) -> None:
    """Options that every benchmark takes."""
    slow = "max-autotune compiles for minutes, megafuse-tuned measures tiles first"
    parser.add_argument("--rivals", default=rivals, help=f"of {', '.join(MAKERS)}; {slow}")
    parser.add_argument("--what", default=what, help=f"sections, of {', '.join(SECTIONS)}")
    parser.add_argument("--dots", default="library", help="library, or auto: generated products where predicted faster")
    parser.add_argument("--check", choices=("auto", "quick", "full"), default="auto", help="depth of validation")
    parser.add_argument("--rounds", type=int, default=20, help="samples per rival; one more is dropped")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each rival before timing")
    parser.add_argument("--host-steps", type=int, default=200, help="steps per host sample")
    parser.add_argument("--host-rounds", type=int, default=2, help="host samples per rival; one more is dropped")
    parser.add_argument("--traffic-rivals", default="", help="rivals for ncu (default: all that validated)")
    parser.add_argument("--ncu-timeout", type=float, default=240.0, help="seconds for one profiler run")
    parser.add_argument(
        "--time-limit", type=float, default=0.0, help="start no further case after so many seconds; 0: no limit"
    )
    parser.add_argument("--no-copy-rate", action="store_true", help="do not measure copy bandwidth first")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the record")


def settings_from(args: argparse.Namespace) -> Settings:
    """The settings that the common options ask for.

    Raises:
        InputError: an unknown rival or section.
    """
    sections = [s.strip() for s in args.what.split(",") if s.strip()]
    unknown = [s for s in sections if s not in SECTIONS]
    if unknown:
        raise InputError(f"unknown section {unknown[0]!r} in --what", hint=f"use some of {', '.join(SECTIONS)}")
    return Settings(
        rivals=parse_rivals(args.rivals),
        sections=sections,
        check=args.check,
        rounds=args.rounds,
        warmup=args.warmup,
        host_steps=args.host_steps,
        host_rounds=args.host_rounds,
        ncu_timeout=args.ncu_timeout,
        traffic_rivals=parse_rivals(args.traffic_rivals),
    )


def measure_source(source: Mapping[str, Any], settings: Settings) -> CaseResult:
    """Make the case on the GPU and measure it; a case that cannot be made is a result with its error."""
    errors: list[str] = []
    with guarded(errors, "making the case"):
        return measure_case(make_case(source), settings)
    return CaseResult(str(source.get("name", source.get("shape"))), dict(source), errors=errors)


def run_cases(
    kind: str,
    sources: Sequence[Mapping[str, Any]],
    settings: Settings,
    args: argparse.Namespace,
    measure: Measure = measure_source,
    show: Show = summary,
) -> Record:
    """Measure all cases; the record is written after each one. The last lines printed are the summary."""
    header, errors, copy = begin(kind, asdict(settings)), list[str](), dict[str, Any]()
    say(f"{header['environment']}")
    if not args.no_copy_rate:
        settings, copy = _with_copy_rate(settings, errors)
    cases: list[CaseResult] = []
    start = time.perf_counter()
    record = Record(**header, copy=copy, cases=(), errors=tuple(errors))
    for number, source in enumerate(sources):
        if args.time_limit and time.perf_counter() - start > args.time_limit:
            errors.append(f"time limit of {args.time_limit:g} s: {len(sources) - number} cases were not run")
            break
        progress(f"case {number + 1} of {len(sources)}: {dict(source)}")
        cases.append(measure({**source, "dots": args.dots}, settings))
        release_memory()
        record = replace(record, cases=tuple(cases), errors=tuple(errors))
        record.write(args.out)
    record = replace(record, errors=tuple(errors))
    path = record.write(args.out)
    say(show(record))
    say(f"record: {path}")
    return record


def _with_copy_rate(settings: Settings, errors: list[str]) -> tuple[Settings, Facts]:
    with guarded(errors, "copy bandwidth"):
        rate, times = copy_bandwidth()
        return replace(settings, copy_rate=rate), {"bytes_per_s": rate, "bytes": 2 * 2**30, **times.as_dict()}
    return settings, {}


def failed(record: Record) -> bool:
    """True if nothing was measured, a case has no rival, or a rival did not validate."""
    checks = [r.checked.get("ok") for c in record.cases for r in c.rivals.values()]
    return not all(c.rivals for c in record.cases) or not checks or not all(checks)


def prepare_gpu() -> None:
    """A CUDA device, and products in the precision of their operands until a case says otherwise.

    Raises:
        TargetError: no CUDA device.
    """
    require_cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
