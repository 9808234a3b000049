"""Benchmark entry point: repeated forward and backward of one RankMixer block on a GPU, EP=1, eager.

Run it from ``rank_mixer/``, as a script or as a module::

    python rank_mixer_src/bench_rank_mixer.py --gemm-backend grouped
    python -m rank_mixer_src.bench_rank_mixer --list-backends
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder on sys.path, the package needs its parent
    _HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if entry != str(_HERE))]

from rank_mixer_src.config import DTYPES, FFN_TYPES, MOE_EXPERTS, ConfigError, WorkloadConfig
from rank_mixer_src.gemm import GEMM_BACKENDS
from rank_mixer_src.runner import format_result, run_benchmark
from rank_mixer_src.worker import DeviceError, read_worker

BACKEND_NOTES = {
    "bmm": "torch.bmm over the token axis, on the transposed view of the input",
    "grouped": "grouped GEMM on packed rows: equal-size groups use torch.bmm, variable-size groups torch.matmul",
}


def build_parser() -> argparse.ArgumentParser:
    """The parser; option names are never abbreviated, so an option it does not know fails."""
    default = WorkloadConfig()
    parser = argparse.ArgumentParser(
        prog="bench_rank_mixer.py",
        description="Time forward+backward of one RankMixer block (EP=1, eager, L2 flushed before each measurement).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--batch-size", type=int, default=default.batch_size, help="B")
    parser.add_argument("--tokens", type=int, default=default.tokens, help="T")
    parser.add_argument("--dim", type=int, default=default.dim, help="D, a multiple of T")
    parser.add_argument("--k", type=int, default=default.k, help="hidden factor, H = k * D")
    parser.add_argument("--ffn-type", choices=FFN_TYPES, default=default.ffn_type, help="FFN; sparse_moe: not yet")
    parser.add_argument("--gemm-backend", choices=sorted(GEMM_BACKENDS), default=default.gemm_backend, help="products")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default=default.dtype, help="working dtype")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 in float32 matrix products")
    parser.add_argument("--warmup", type=int, default=default.warmup, help="untimed steps")
    parser.add_argument("--num-tests", type=int, default=default.num_tests, help="measured steps")
    parser.add_argument("--seed", type=int, default=default.seed, help="process seed is seed + rank")
    parser.add_argument("--moe-experts", type=int, choices=MOE_EXPERTS, default=MOE_EXPERTS[0], help="sparse_moe only")
    parser.add_argument("--list-backends", action="store_true", help="print the GEMM backends and stop")
    return parser


def make_config(parser: argparse.ArgumentParser, args: argparse.Namespace) -> WorkloadConfig:
    """Turn parsed arguments into a config; a value that does not fit ends the process as a parser error."""
    settings = {name: value for name, value in vars(args).items() if name not in ("list_backends", "moe_experts")}
    try:
        return WorkloadConfig(**settings)
    except ConfigError as error:
        parser.error(f"argument --{error.argument.replace('_', '-')}: {error.problem}")


def list_backends() -> str:
    """One line per GEMM backend."""
    return "\n".join(f"{name}: {BACKEND_NOTES[name]}" for name in sorted(GEMM_BACKENDS))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status (2: bad arguments, 1: no GPU for this worker)."""
    parser = build_parser()
    args = parser.parse_args(argv)
    worker = read_worker()
    if args.list_backends:
        if worker.rank == 0:
            print(list_backends())
        return 0
    config = make_config(parser, args)
    if config.tf32 and config.dtype != "float32":
        print(f"note: --tf32 has no effect on {config.dtype} products", file=sys.stderr)
    try:
        result = run_benchmark(config, worker)
    except DeviceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(format_result(config, worker, result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
