"""``megafuse bench NAME ...``: the benchmarks, each with the options that it has as a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megafuse.bench import host, mlp, rank_mixer, tuning, workloads
from megafuse.core.errors import InputError

BENCHES: dict[str, tuple[Callable[[Sequence[str] | None], int], str]] = {
    "mlp": (mlp.main, "MLPs of any widths beside eager and torch.compile, with and without launch overhead"),
    "weightnorm": (mlp.weightnorm_main, "the same for MLPs with weight norm"),
    "rank_mixer": (rank_mixer.main, "the RankMixer block"),
    "workloads": (workloads.main, "the modules of megafuse.workloads"),
    "tuning": (tuning.main, "the block before and after tuning"),
    "host": (host.main, "what calls cost the host"),
}


def bench_list() -> str:
    """One line for each benchmark."""
    lines = [f"  {name:12} {about}" for name, (_, about) in BENCHES.items()]
    return "\n".join(["usage: megafuse bench NAME [options]; megafuse bench NAME --help lists them", *lines])


def run_bench(name: str, options: Sequence[str]) -> int:
    """Run one; its exit status.

    Raises:
        InputError: there is no such benchmark.
    """
    if name not in BENCHES:
        raise InputError(f"no benchmark {name!r}", hint=f"use one of {', '.join(BENCHES)}")
    return BENCHES[name][0](list(options))
