"""Benchmark of tuning: the RankMixer block with the heuristic's tiles and with measured ones.

Kernels are timed by the tuner: alone, L2 flushed, heuristic and winner in turn. The steps of both are then validated
and timed in turn, like any rivals.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megafuse.api import engine_of, fuse
from megafuse.bench.cases import SEED, make_case
from megafuse.bench.guard import guarded, progress, release_memory, say
from megafuse.bench.parser import bench_parser
from megafuse.bench.rank_mixer import NAMED, PRODUCTION, sources
from megafuse.bench.record import RESULTS, CaseResult, Facts, Record, RivalResult, begin
from megafuse.bench.run import failed, prepare_gpu
from megafuse.bench.step import Case, make_step
from megafuse.bench.timing import CudaTimer, Times, copy_bandwidth, time_rounds, warm_up
from megafuse.bench.verify import verify
from megafuse.compiler import Compiled
from megafuse.core.errors import MegafuseError
from megafuse.runtime.environment import gpu_state
from megafuse.runtime.plan_store import Entry, write_plan
from megafuse.tune import StepResult, entries_of, tune_step

HEURISTIC, TUNED = "heuristic", "tuned"


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = bench_parser("tuning", "Tune the kernels of the RankMixer block and time before and after.")
    parser.add_argument("--shapes", default=PRODUCTION, help=f"B,T,D,k;... or {', '.join(NAMED)}")
    parser.add_argument("--dtypes", default="bfloat16", help="as of the block's benchmark")
    parser.add_argument("--seconds", type=float, default=90.0, help="for the tuning of each case")
    parser.add_argument("--kept", action="store_true", help="take what the cache has instead of measuring anew")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each step; one more is dropped")
    parser.add_argument("--plan", type=Path, default=None, help="write the plan of the last case to this file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the record")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run; exit status 0 if all was validated and measured, 1 if something did not validate, 2 for unusable options."""
    args = build_parser().parse_args(argv)
    try:
        listed = sources(args.shapes, args.dtypes, SEED)
        prepare_gpu()
    except MegafuseError as error:
        say(f"error: {error}")
        return 2
    settings = {"seconds": args.seconds, "kept": args.kept, "rounds": args.rounds}
    rate, times = copy_bandwidth()
    copy: Facts = {"bytes_per_s": rate, **times.as_dict()}
    record = Record(**begin("tuning", settings), copy=copy, cases=())
    for source in listed:
        progress(f"case {source}")
        record = replace(record, cases=(*record.cases, measure_tuning(make_case(source), args, rate)))
        record.write(args.out)
        release_memory()
    say(table(record))
    say(f"record: {record.write(args.out)}")
    return int(failed(record))


def measure_tuning(case: Case, args: argparse.Namespace, copy_rate: float) -> CaseResult:
    """Tune one case, then validate and time its step with both kinds of tiles; what fails is named in the result."""
    result = CaseResult(case.name, dict(case.facts))
    with guarded(result.errors, "tuning"):
        heuristic = fuse(case.module, *case.args, tune=False, **case.kwargs)
        compiled = _compiled(heuristic)
        found = tune_step(compiled, seconds=args.seconds, again=not args.kept)
        entries = entries_of(compiled)
        result.facts |= _search_facts(found)
        tuned = fuse(case.module, *case.args, **case.kwargs)
        fused = {HEURISTIC: heuristic, TUNED: tuned}
        result.rivals |= {name: RivalResult(name, checked=asdict(verify(case, fn, generated=True)))
                          for name, fn in fused.items()}  # fmt: skip
        result.rivals[TUNED].kernels = [kernel_facts(e, copy_rate) for e in entries]
        for name, taken in _time_steps(case, fused, args.rounds, result.errors).items():
            result.rivals[name].step = taken.as_dict()
        if args.plan is not None:
            write_plan(args.plan, compiled.device.name, entries)
    result.gpu_after = dict(gpu_state())
    return result


def _compiled(fused: Any) -> Compiled:
    (bound,) = engine_of(fused).bindings
    assert bound.compiled is not None
    return bound.compiled


def _search_facts(found: StepResult) -> Facts:
    return {
        "tuning_seconds": found.seconds,
        "stopped": found.stopped,
        "tried": sum(k.tried for k in found.kernels),
        "kernels_timed": len(found.kernels),
        "kernels_changed": sum(k.changed for k in found.kernels),
    }


def kernel_facts(entry: Entry, copy_rate: float) -> Facts:
    """A kernel's line: microseconds before and after, with what adds up its partial sums, and the tiles taken."""
    after = float(entry.facts.get("tuned_seconds", entry.seconds))
    moved = int(entry.facts.get("dram_bytes", 0))
    return {
        "name": entry.name,
        "heuristic_us": entry.heuristic_seconds * 1e6,
        "us": after * 1e6,
        "own_us": entry.seconds * 1e6,
        "share_of_copy": moved / entry.seconds / copy_rate,
        "num_warps": entry.num_warps,
        "tiles": [dict(t) for t in entry.tiles],
        **entry.facts,
    }


def _time_steps(case: Case, fused: dict[str, Any], rounds: int, errors: list[str]) -> dict[str, Times]:
    works = warm_up({name: make_step(case, fn) for name, fn in fused.items()}, 5, errors, "step")
    return time_rounds(works, rounds=rounds, timer=CudaTimer())


def table(record: Record) -> str:
    """Before and after of every kernel and step."""
    lines = []
    for case in record.cases:
        lines.append(f"{case.name}: {case.facts.get('tried', 0)} tiles tried in "
                     f"{case.facts.get('tuning_seconds', 0):.0f} s {case.facts.get('stopped', '')}")  # fmt: skip
        for k in case.rivals[TUNED].kernels if TUNED in case.rivals else ():
            gain = k["heuristic_us"] / k["us"]
            lines.append(f"  {k['name']:40} {k['heuristic_us']:9.1f} -> {k['us']:9.1f} us  {gain:.2f}x  "
                         f"{100 * k['share_of_copy']:3.0f} % of copy")  # fmt: skip
        for name, rival in case.rivals.items():
            shown = f"{rival.step['median']:.0f} us" if rival.step else "not timed"
            lines.append(f"  step with {name} tiles: {shown}, {'validated' if rival.checked.get('ok') else 'WRONG'}")
        lines += [f"  failed: {e}" for e in case.errors]
    return "\n".join(lines)
