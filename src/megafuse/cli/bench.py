"""``megafuse bench NAME ...``: the benchmarks, each with the options that it has as a script."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from megafuse.core.errors import InputError

# name -> module and function, loaded when it runs, and what it is about
BENCHES: dict[str, tuple[str, str, str]] = {
    "mlp": (
        "megafuse.bench.mlp",
        "main",
        "MLPs of any widths beside eager and torch.compile, with and without launch overhead",
    ),
    "weightnorm": ("megafuse.bench.mlp", "weightnorm_main", "the same for MLPs with weight norm"),
    "rank_mixer": ("megafuse.bench.rank_mixer", "main", "the RankMixer block"),
    "workloads": ("megafuse.bench.workloads", "main", "the modules of megafuse.workloads"),
    "tuning": ("megafuse.bench.tuning", "main", "the block before and after tuning"),
    "host": ("megafuse.bench.host", "main", "what calls cost the host"),
}


def bench_list() -> str:
    """One line for each benchmark."""
    lines = [f"  {name:12} {about}" for name, (_, _, about) in BENCHES.items()]
    return "\n".join(["usage: megafuse bench NAME [options]; megafuse bench NAME --help lists them", *lines])


def run_bench(name: str, options: Sequence[str]) -> int:
    """Run one; its exit status.

    Raises:
        InputError: there is no such benchmark.
    """
    if name not in BENCHES:
        raise InputError(f"no benchmark {name!r}", hint=f"use one of {', '.join(BENCHES)}")
    module, function, _ = BENCHES[name]
    status: int = getattr(import_module(module), function)(list(options))
    return status
