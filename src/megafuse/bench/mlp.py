"""Benchmark of MLPs: backends validated, then timed with launch overhead (events around single calls) and without it.

Without a GPU nothing is timed: what can be shown is the plan, predicted times and the resources of compiled kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from megafuse.bench.cases import SEED
from megafuse.bench.guard import say
from megafuse.bench.mlp_case import MODES, TYPES
from megafuse.bench.mlp_offline import offline_facts, offline_text
from megafuse.bench.mlp_table import mlp_tables
from megafuse.bench.parser import bench_parser
from megafuse.bench.record import RESULTS, Record
from megafuse.bench.run import add_common_options, failed, prepare_gpu, run_cases, settings_from
from megafuse.bench.table import aligned, failures
from megafuse.core.dtypes import spelled_list
from megafuse.core.errors import InputError, MegafuseError
from megafuse.nn.layers import check_widths, make_activation

SIZES = "64,128,256,512,1024,2048,4096,8192,16384,32768,65536"
FOLDER = RESULTS / "mlp"
NO_GPU = "There is no CUDA GPU here: nothing was timed, no record was written. All times below are predictions."


def build_parser(kind: str = "mlp") -> argparse.ArgumentParser:
    """The options; ``kind``: ``mlp`` or ``weightnorm``."""
    about = f"Time {'MLPs with weight norm' if kind == 'weightnorm' else 'MLPs'}, forward or training."
    parser = bench_parser(kind, about)
    parser.add_argument("--sizes", default=SIZES, help="rows, comma-separated")
    parser.add_argument("--D", type=int, default=128, help="width of the input")
    parser.add_argument("--H", type=int, default=128, help="width of the hidden layers")
    parser.add_argument("--OUT", type=int, default=128, help="width of the output")
    parser.add_argument("--layers", default="3", help="numbers of linear layers, comma-separated")
    parser.add_argument("--widths", default="", help="all widths instead of --D, --H, --OUT, --layers: 37,100,60,3")
    parser.add_argument("--activation", default="softplus", help="a name of megafuse.nn.ACTIVATIONS")
    parser.add_argument("--bias", action="store_true", help="linear layers have biases")
    parser.add_argument("--dtype", default="float16", help=f"of {', '.join(TYPES)}, comma-separated")
    parser.add_argument("--mode", default="training" if kind == "weightnorm" else "forward", help=", ".join(MODES))
    parser.add_argument("--seed", type=int, default=SEED, help="of parameters and inputs")
    parser.add_argument("--json", action="store_true", help="print the record instead of the tables")
    add_common_options(parser, rivals="eager,compile,max-autotune,megafuse", what="call,rotated,host")
    parser.add_argument("--iters", dest="rounds", type=int, default=argparse.SUPPRESS, help="the same as --rounds")
    parser.set_defaults(weight_norm=kind == "weightnorm", check="quick", rounds=100, warmup=20, out=FOLDER)
    return parser


def sources(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases to run: modes, depths and types outside, sizes inside.

    Raises:
        InputError: an option is not usable; the message names it.
    """
    make_activation(args.activation)
    types = spelled_list(args.dtype, TYPES, "--dtype")
    modes = _words("--mode", args.mode, MODES)
    sizes = _numbers("--sizes", args.sizes)
    shapes = [_numbers("--widths", args.widths)] if args.widths else _shapes(args)
    shared = {"activation": args.activation, "bias": args.bias, "weight_norm": args.weight_norm, "seed": args.seed}
    return [
        {"kind": "mlp", "rows": rows, "widths": list(check_widths(widths)), **shared, "dtype": dtype, "mode": mode}
        for mode in modes for widths in shapes for dtype in types for rows in sizes
    ]  # fmt: skip


def _shapes(args: argparse.Namespace) -> list[list[int]]:
    return [[args.D, *[args.H] * (n - 1), args.OUT] for n in _numbers("--layers", args.layers)]


def _numbers(option: str, text: str) -> list[int]:
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise InputError(f"argument {option}: {text!r}", hint="give whole numbers from 1 on, comma-separated")
    return [int(p) for p in parts]


def _words(option: str, text: str, known: Sequence[str] | dict[str, Any]) -> list[str]:
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts or any(p not in known for p in parts):
        raise InputError(f"argument {option}: {text!r}", hint=f"use some of {', '.join(known)}")
    return parts


def tables_text(record: Record) -> str:
    """All tables for the console, then what failed."""
    lines = [f"{table.title}\n{aligned(table.rows)}\n" for table in mlp_tables(record)]
    lines += [f"{c.name}: {error}" for c in record.cases for error in (*failures(c), *c.errors)]
    return "\n".join([*lines, *record.errors])


def run(kind: str, argv: Sequence[str] | None = None) -> int:
    """Run; exit status 0 if all was validated and measured, 1 if something did not validate, 2 for unusable options.

    Without a GPU: 0, and a text that says that nothing was timed.
    """
    args = build_parser(kind).parse_args(argv)
    try:
        listed, settings = sources(args), settings_from(args)
    except MegafuseError as error:
        say(f"error: {error}")
        return 2
    if not torch.cuda.is_available():
        _without_gpu(listed, args)
        return 0
    prepare_gpu()
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        record = run_cases(kind, listed, settings, args, show=tables_text)
    if args.json:
        sys.stdout.write(record.as_json())
    return int(failed(record))


def _without_gpu(listed: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    most = max(source["rows"] for source in listed)
    facts = [offline_facts(source, args.dots, compiled=source["rows"] == most) for source in listed]
    if args.json:
        sys.stdout.write(json.dumps({"timed": False, "why": NO_GPU, "cases": [asdict(f) for f in facts]}) + "\n")
    else:
        say(f"{NO_GPU}\n\n{offline_text(facts)}\n\n{NO_GPU}")


def main(argv: Sequence[str] | None = None) -> int:
    """The benchmark of MLPs; see ``run``."""
    return run("mlp", argv)


def weightnorm_main(argv: Sequence[str] | None = None) -> int:
    """The benchmark of MLPs with weight norm; see ``run``."""
    return run("weightnorm", argv)
