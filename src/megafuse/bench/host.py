"""Benchmark of the host: what a call costs the CPU, beside eager, ``torch.compile`` and a bare library call.

A training step is host time over many steps that end in one synchronisation, rivals validated first and in turn. An
inference call is timed in the same way beside ``torch.mm(out=)``. Steps are also timed with backward on the calling
thread (``torch.autograd.set_multithreading_enabled(False)``): by default autograd runs it on a thread of its own, whose
core has to be woken and knows nothing of what the other one had in its cache. ``--profile`` shows where megafuse's time
goes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megafuse.bench.cases import DTYPES, SEED, make_case, parse_shapes
from megafuse.bench.guard import guarded, progress, release_memory, say
from megafuse.bench.host_profile import profile_host
from megafuse.bench.parser import bench_parser
from megafuse.bench.record import RESULTS, CaseResult, Facts, Record, RivalResult, begin
from megafuse.bench.rivals import EAGER, MEGAFUSE, Rival, make_rivals, parse_rivals
from megafuse.bench.run import failed, prepare_gpu
from megafuse.bench.step import Case, draw_cotangents
from megafuse.bench.table import aligned, number, ratio
from megafuse.bench.timing import Times, Work, time_host_rounds, warm_up
from megafuse.core.errors import MegafuseError
from megafuse.runtime.environment import gpu_state

SHAPES = "4,16,128,2;256,32,512,2"
ROWS, WIDTH, LAYERS = 256, 128, 3
LIBRARY_CALL = "mm(out=)"
HEADINGS = ("case", "what", "ok", "host us", "x eager", "x mm(out=)")


@dataclass(frozen=True)
class Loop:
    """How often: ``rounds`` samples (one more is dropped) of ``steps`` calls; ``sync`` waits for the device."""

    rounds: int
    steps: int
    sync: Callable[[], None] = torch.cuda.synchronize

    def time(self, works: Mapping[str, Work]) -> dict[str, Facts]:
        """Samples of each work, in turn, for a record."""
        found = time_host_rounds(works, rounds=self.rounds + 1, steps=self.steps, sync=self.sync)
        return {n: _facts(times, self.steps) for n, times in found.items()}


def _facts(times: Times, steps: int) -> Facts:
    return times.as_dict() | {"steps_per_sample": steps}


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = bench_parser("host", "Time the host's part of fused calls, and show where it goes.")
    parser.add_argument("--shapes", default=SHAPES, help="of the RankMixer block: B,T,D,k;... (empty: none)")
    parser.add_argument("--rows", default=str(ROWS), help="of the MLP, comma-separated (empty: none)")
    parser.add_argument("--rivals", default="eager,compile,megafuse,megafuse-graph", help="to be timed")
    parser.add_argument("--check", choices=("auto", "quick", "full"), default="quick", help="depth of validation")
    parser.add_argument("--steps", type=int, default=200, help="calls per sample, which end in one synchronisation")
    parser.add_argument("--rounds", type=int, default=5, help="samples; one more is dropped")
    parser.add_argument("--profile", action="store_true", help="print where the host's time of megafuse goes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the record")
    return parser


def cases(shapes: str, rows: str, device: str = "cuda") -> Sequence[Callable[[], Case]]:
    """Makers of the cases to run.

    Raises:
        InputError: a shape is not four whole numbers.
    """
    sources = [
        {"kind": "rank_mixer", "shape": list(s), "dtype": "bfloat16", "seed": SEED} for s in parse_shapes(shapes)
    ]
    counts = [int(r) for r in rows.split(",") if r.strip()]
    return [partial(make_case, s, device) for s in sources] + [partial(mlp_case, n, device=device) for n in counts]


def mlp_case(rows: int, *, device: str = "cuda", dtype: str = "float16", width: int = WIDTH) -> Case:
    """An MLP of three square layers with softplus between them and no bias; ``x`` and upstream gradient are normal."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(SEED)
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(width, width, bias=False), nn.Softplus())]
        module = nn.Sequential(*layers[:-1]).to(DTYPES[dtype])
        x = torch.randn(rows, width).to(DTYPES[dtype]).requires_grad_()
    facts = {"rows": rows, "width": width, "layers": LAYERS, "activation": "softplus", "dtype": dtype, "seed": SEED}
    name = f"mlp {rows}x{width}, {LAYERS} layers, {dtype}"
    return Case(name, module, (x,), {}, draw_cotangents(module, (x,), {}, SEED), rows, facts)


def measure_host(case: Case, names: Sequence[str], check: str, loop: Loop) -> tuple[CaseResult, list[Rival]]:
    """Validate the rivals, then time training steps and inference calls; what fails is named in the result."""
    start = time.perf_counter()
    result = CaseResult(case.name, dict(case.facts))
    rivals: list[Rival] = []
    with guarded(result.errors, "training"):
        rivals = make_rivals(names, case, check)
        result.rivals |= {r.name: RivalResult(r.name, r.build_seconds, r.error, asdict(r.checked)) for r in rivals}
        works = warm_up({r.name: r.step(case) for r in rivals if r.usable}, 3, result.errors, "training")
        for name, facts in loop.time(works).items():
            result.rivals[name].host = facts
        result.facts["one_thread"] = loop.time({name: one_thread(work) for name, work in works.items()})
    case.clear_gradients()
    with guarded(result.errors, "inference"):
        result.facts["inference"] = inference(case, [r for r in rivals if r.usable], loop, result.errors)
    result.gpu_after = dict(gpu_state())
    result.seconds = time.perf_counter() - start
    return result, rivals


def one_thread(step: Work) -> Work:
    """The step with backward on the calling thread."""

    def run() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            step()

    return run


def inference(case: Case, rivals: Sequence[Rival], loop: Loop, errors: list[str]) -> Facts:
    """Host time of calls without gradients, and of one library call on the case's first input."""
    x = case.args[0].detach().flatten(0, -2)
    out, square = torch.empty_like(x), torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    works: dict[str, Work] = {LIBRARY_CALL: lambda: torch.mm(x, square, out=out)}
    works |= {r.name: _call(case, r.fn) for r in rivals if r.fn is not None}
    with torch.no_grad():
        return loop.time(warm_up(works, 3, errors, "inference"))


def _call(case: Case, fn: Callable[..., Any]) -> Work:
    args, kwargs = case.args, dict(case.kwargs)
    return lambda: fn(*args, **kwargs)


def rows_of(record: Record) -> list[tuple[str, ...]]:
    """The table's cells: a training step and an inference call of each rival."""
    rows: list[tuple[str, ...]] = []
    for case in record.cases:
        eager = _median(case.rivals[EAGER].host) if EAGER in case.rivals else None
        for rival in case.rivals.values():
            took, good = _median(rival.host), "yes" if rival.checked.get("ok") else "NO"
            rows.append((case.name, f"{rival.name} step", good, number(took, 1), ratio(took, eager), ""))
        alone: Facts = case.facts.get("one_thread", {})
        eager = _median(alone.get(EAGER))
        for name, facts in alone.items():
            took = _median(facts)
            rows.append((case.name, f"{name} step, one thread", "", number(took, 1), ratio(took, eager), ""))
        calls: Facts = case.facts.get("inference", {})
        base, eager = _median(calls.get(LIBRARY_CALL)), _median(calls.get(EAGER))
        for name, facts in calls.items():
            took = _median(facts)
            rows.append((case.name, f"{name} call", "", number(took, 1), ratio(took, eager), ratio(took, base)))
    return rows


def _median(times: Facts | None) -> float | None:
    return times.get("median") if times else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run; exit status 0 if all was validated and measured, 1 if something did not validate, 2 for unusable options."""
    args = build_parser().parse_args(argv)
    try:
        makers, names = cases(args.shapes, args.rows), parse_rivals(args.rivals)
        prepare_gpu()
    except MegafuseError as error:
        say(f"error: {error}")
        return 2
    loop = Loop(args.rounds, args.steps)
    settings = {"rivals": names, "rounds": args.rounds, "steps": args.steps, "check": args.check}
    record = Record(**begin("host", settings), copy={}, cases=())
    for make in makers:
        case = make()
        progress(f"case {case.name}")
        result, rivals = measure_host(case, names, args.check, loop)
        record = replace(record, cases=(*record.cases, result))
        record.write(args.out)
        if args.profile:
            _profile(case, rivals, loop, result)
        release_memory()
    say(aligned([HEADINGS, *rows_of(record)]))
    say(f"record: {record.write(args.out)}")
    return int(failed(record))


def _profile(case: Case, rivals: Sequence[Rival], loop: Loop, result: CaseResult) -> None:
    with guarded(result.errors, "profile"):
        fused = next(r.fn for r in rivals if r.name == MEGAFUSE)
        facts, text = profile_host(case, fused, loop.steps, loop.sync)
        result.rivals[MEGAFUSE].plan["host_profile"] = facts
        say(text)
