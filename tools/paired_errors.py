"""Errors of a module beside the unfused module's, draw by draw: is one failed draw chance, or a wrong result?

Usage: ``python tools/paired_errors.py NAME --dtype fp32 [--size small] [--draws 150] [--first 1000] [--device cuda]
[--out FOLDER]``; NAME is the number of a random module, or a workload, made at ``--size``.

For each result and draw the largest error and the RMS error of both against the fp64 oracle are taken (functions of
megafuse.validate). If both have the same distribution, each is the larger one in half of the draws. Printed and
recorded per result: medians of the ratios fused/unfused, pooled RMS ratio, in how many draws either is larger, and in
how many either is over four times the other, with the two-sided probability of such an imbalance (sign test).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from megafuse import fuse
from megafuse.bench.record import begin, compact_lists
from megafuse.cli.running import TARGET_ON
from megafuse.validate.compare import Sample, measure
from megafuse.validate.oracle import oracle_run
from megafuse.validate.problem import Problem, draw_leaves
from megafuse.validate.running import Runner, draw_cotangents
from megafuse.workloads import get, names
from megafuse.workloads.random_modules import DTYPES
from megafuse.workloads.random_steps import random_program

ROOT = Path(__file__).resolve().parents[1]
FAR = 4.0  # the factor of the max rule


def sign_test(larger: int, smaller: int) -> float:
    """Two-sided probability that of ``larger + smaller`` fair draws one side gets at least as many as the larger."""
    n, most = larger + smaller, max(larger, smaller)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(most, n + 1)) / 2**n)


def subject(name: str, size: str, dtype: str, device: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """The random module of that number, or the workload of that name."""
    if name.isdecimal():
        return random_program(int(name), dtype).make(device)
    return get(name).make(size, dtype=DTYPES[dtype], device=device)


def draws(module: torch.nn.Module, inputs: tuple[Any, ...], device: str, seeds: range) -> dict[str, list[Sample]]:
    """Samples of each result, one a draw."""
    problem = Problem.of(module, inputs, {})
    fused = fuse(module, *inputs, target=TARGET_ON[device])
    found: dict[str, list[Sample]] = {}
    for seed in seeds:
        leaves = draw_leaves(problem, seed)
        (unfused,) = Runner(problem, problem.fn).run(leaves, seed)
        cotangents = draw_cotangents(unfused.outputs, seed)
        (ours,) = Runner(problem, fused).run(leaves, cotangents)
        exact, theirs = oracle_run(problem, leaves, cotangents).tensors(), ours.tensors()
        for name, reference in unfused.tensors().items():
            if reference.is_floating_point() and not name.startswith("state "):
                found.setdefault(name, []).append(measure(name, "", theirs[name], reference, exact[name], seed=seed))
    return found


def summary(samples: list[Sample]) -> dict[str, Any]:
    """What is printed of a result, and the raw errors."""
    most = [(s.fused_max, s.unfused_max) for s in samples]
    facts: dict[str, Any] = {"elements": samples[0].elements, "draws": len(samples)}
    for name, factor in (("over", 1.0), ("far over", FAR)):
        counts = [sum(f > factor * u for f, u in most), sum(u > factor * f for f, u in most)]
        facts[name] = {"fused": counts[0], "unfused": counts[1], "probability": sign_test(*counts)}
    facts["median max ratio"] = statistics.median(f / u if u else 1.0 + (f > 0) for f, u in most)
    squares = [sum(s.fused_square for s in samples), sum(s.unfused_square for s in samples)]
    facts["pooled rms ratio"] = math.sqrt(squares[0] / squares[1]) if squares[1] else 1.0 + (squares[0] > 0)
    return facts | {"raw max": most, "raw rms": [(s.fused_rms, s.unfused_rms) for s in samples]}


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="number of a random module, or one of " + ", ".join(names()))
    parser.add_argument("--size", default="small", help="of the workload")
    parser.add_argument("--dtype", choices=tuple(DTYPES), required=True)
    parser.add_argument("--device", choices=tuple(TARGET_ON), default="cpu")
    parser.add_argument("--draws", type=int, default=150)
    parser.add_argument("--first", type=int, default=1000, help="number of the first draw")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "checks", help="folder for the record")
    asked = parser.parse_args()
    module, inputs = subject(asked.name, asked.size, asked.dtype, asked.device)
    found = draws(module, inputs, asked.device, range(asked.first, asked.first + asked.draws))
    results = {name: summary(samples) for name, samples in found.items()}
    print(f"{'result':40}  median max  pooled rms  larger (fused:unfused)  over {FAR:g} x  probability")
    for name, facts in results.items():
        over, far = facts["over"], facts["far over"]
        ratios = f"{facts['median max ratio']:10.2f}  {facts['pooled rms ratio']:10.2f}"
        print(
            f"{name:40}  {ratios}  {over['fused']:13}:{over['unfused']:<8}"
            f"  {far['fused']:4}:{far['unfused']:<4}  {over['probability']:.2f}"
        )
    settings = {
        "name": asked.name,
        "size": asked.size,
        "dtype": asked.dtype,
        "device": asked.device,
        "first": asked.first,
    }
    record = begin("paired errors", settings) | {"results": results}
    path = asked.out / f"paired_{asked.name}_{asked.dtype}_{asked.device}.json"
    asked.out.mkdir(parents=True, exist_ok=True)
    path.write_text(compact_lists(json.dumps(record, indent=1)) + "\n")
    print(f"record: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
