"""Benchmark of the RankMixer block: rivals validated, then measured section by section.

Step, graph, host, memory, traffic and kernel figures are defined in ``timing``, ``memory``, ``traffic`` and
``kernels``; ``gemm`` is the time of the unfused step's ``torch.bmm`` calls back to back with ``out=``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megafuse.bench.cases import DTYPES, SEED, parse_shapes
from megafuse.bench.guard import say
from megafuse.bench.parser import bench_parser
from megafuse.bench.run import add_common_options, failed, prepare_gpu, run_cases, settings_from
from megafuse.core.dtypes import spelled_list
from megafuse.core.errors import MegafuseError

PRODUCTION = "1024,64,1280,2"
#: Shapes named by the project's targets, production last; ``--shapes all`` runs them.
ALL_SHAPES = (
    "4,16,128,2;1,8,64,2;7,12,96,3;33,24,264,2;129,16,1040,2;64,64,64,3;3,40,1280,3;5,9,81,3;17,11,77,2;2,63,1197,3;"
    "1024,8,1280,2;256,32,512,2;1024,16,256,2;1024,64,1280,3;1024,64,1280,2"
)
SMALL_SHAPES = "4,16,128,2;256,32,512,2"
NAMED = {"production": PRODUCTION, "small": SMALL_SHAPES, "all": ALL_SHAPES}


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = bench_parser("rank_mixer", "Time the RankMixer block, forward and backward, on a GPU.")
    parser.add_argument("--shapes", default="production", help="B,T,D,k;... or production, small, all")
    parser.add_argument("--dtypes", default="bfloat16", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--seed", type=int, default=SEED, help="process seed of the workload")
    add_common_options(parser, rivals="eager,compile,megafuse", what="memory,step,graph,host")
    return parser


def sources(shapes: str, dtypes: str, seed: int) -> list[dict[str, Any]]:
    """The cases to run, shapes outside, dtypes inside.

    Raises:
        InputError: a shape or dtype is not usable.
    """
    wanted = spelled_list(dtypes, DTYPES, "--dtypes")
    parsed = parse_shapes(NAMED.get(shapes, shapes))
    return [{"kind": "rank_mixer", "shape": list(s), "dtype": d, "seed": seed} for s in parsed for d in wanted]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; exit status 0 if all was validated and measured, 1 if something did not validate, 2 for unusable options."""
    args = build_parser().parse_args(argv)
    try:
        listed, settings = sources(args.shapes, args.dtypes, args.seed), settings_from(args)
        prepare_gpu()
    except MegafuseError as error:
        say(f"error: {error}")
        return 2
    return int(failed(run_cases("rank_mixer", listed, settings, args)))
