"""Benchmark of ``megafuse.workloads``: validated, kernels counted, predicted bytes per input tensor, coverage, times.

``bytes/input`` is the predicted DRAM traffic of the generated kernels of one forward and backward over the bytes of the
inputs that require grad; ``x block`` compares it with the RankMixer block's, for its mutations.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megafuse.bench.cases import DTYPES
from megafuse.bench.guard import say
from megafuse.bench.parser import bench_parser
from megafuse.bench.record import CaseResult, Record
from megafuse.bench.run import add_common_options, failed, prepare_gpu, run_cases, settings_from
from megafuse.bench.table import aligned, failures, number, ratio
from megafuse.core.dtypes import spelled_list
from megafuse.core.errors import InputError, MegafuseError
from megafuse.workloads import names

BLOCK = "rank_mixer_block"
FAMILIES = ("block", "mutation", "stranger")
HEADINGS = (
    "workload", "ok", "kernels", "dots", "opaque", "coverage", "bytes/input", "x block", "plan GB", "DRAM GB",
    "host us", "eager", "x eager", "graph us", "eager", "x eager",
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = bench_parser("workloads", "Validate and time the workloads, forward and backward, on a GPU.")
    parser.add_argument("--workloads", default="all", help=f"names, or families of {', '.join(FAMILIES)}, or all")
    parser.add_argument("--dtypes", default="bfloat16", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--size", default="gpu", help="named size of the workloads: small, odd or gpu")
    add_common_options(parser, rivals="eager,megafuse", what="graph,host")
    parser.set_defaults(host_steps=50, host_rounds=1, rounds=10, check="quick")
    return parser


def sources(workloads: str, dtypes: str, size: str) -> list[dict[str, Any]]:
    """The cases to run, in the order of the registry.

    Raises:
        InputError: a name, family or dtype is not known.
    """
    wanted: dict[str, None] = {}
    for entry in filter(None, (e.strip() for e in workloads.split(","))):
        found = names() if entry == "all" else names(entry) or [n for n in names() if n == entry]
        if not found:
            raise InputError(f"unknown workload {entry!r}", hint=f"use some of {', '.join((*FAMILIES, *names()))}")
        wanted.update(dict.fromkeys(found))
    types = spelled_list(dtypes, DTYPES, "--dtypes")
    return [{"kind": "workload", "name": n, "dtype": d, "size": size} for n in wanted for d in types]


def workload_table(record: Record) -> str:
    """One line per workload, then what failed."""
    lines = [aligned([HEADINGS, *workload_rows(record)])]
    lines += [f"{c.name}: {text}" for c in record.cases for text in (*failures(c), *c.errors)]
    return "\n".join([*lines, *record.errors])


def workload_rows(record: Record) -> list[tuple[str, ...]]:
    """The table's cells."""
    return [_row(case, _block_bytes(record, case)) for case in record.cases if "megafuse" in case.rivals]


def _block_bytes(record: Record, case: CaseResult) -> float | None:
    """Bytes per input of the block in the same dtype; None outside its family."""
    if case.facts.get("family") not in ("block", "mutation"):
        return None
    for other in record.cases:
        if other.name == f"{BLOCK} {case.facts.get('dtype')}" and "megafuse" in other.rivals:
            return other.rivals["megafuse"].plan.get("kernel_bytes_per_input")
    return None


def _row(case: CaseResult, block: float | None) -> tuple[str, ...]:
    ours, eager = case.rivals["megafuse"], case.rivals.get("eager")
    plan, per_input = ours.plan, ours.plan.get("kernel_bytes_per_input")
    planned, measured = plan.get("total_bytes"), ours.traffic.get("total")
    cells = [case.name, "yes" if ours.checked.get("ok") else "NO", str(len(plan.get("kernels", ())))]
    cells += [str(plan.get("dots", "")), str(plan.get("opaque_calls", "")), number(plan.get("coverage_by_elements"), 3)]
    cells += [number(per_input, 2), ratio(per_input, block)]
    cells += [number(planned / 1e9 if planned else None, 2), number(measured / 1e9 if measured else None, 2)]
    for section in ("host", "graph"):
        mine = getattr(ours, section).get("median")
        theirs = getattr(eager, section).get("median") if eager else None
        cells += [number(mine, 1), number(theirs, 1), ratio(mine, theirs)]
    return tuple(cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; exit status 0 if all validated with at least one generated kernel each, 1 if not, 2 for unusable options."""
    args = build_parser().parse_args(argv)
    try:
        listed, settings = sources(args.workloads, args.dtypes, args.size), settings_from(args)
        prepare_gpu()
    except MegafuseError as error:
        say(f"error: {error}")
        return 2
    return int(failed(run_cases("workloads", listed, settings, args, show=workload_table)))
