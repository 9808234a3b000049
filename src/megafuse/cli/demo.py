"""``megafuse demo``: the plan, the checks, and what it costs: measured on a GPU, predicted and compiled without one."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console

from megafuse.bench.record import git_commit
from megafuse.cli.demo_cpu import demo_without_gpu
from megafuse.cli.demo_gpu import demo_with_gpu
from megafuse.cli.selection import Selection
from megafuse.cli.targets import pick_device
from megafuse.runtime.environment import environment

PLAIN_WIDTH = 120  # columns where the output is no terminal


def run_demo(selection: Selection, record: Path, *, traffic: bool = True) -> bool:
    """Run the demo and write its record; True if every check passed. ``traffic``: measure that too on a GPU."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    start = time.perf_counter()
    device = pick_device(selection)
    if device == "cuda":
        facts = demo_with_gpu(selection, console, traffic=traffic)
    else:
        facts = demo_without_gpu(selection, console)
    seconds = time.perf_counter() - start
    ok = all(c["ok"] for c in facts["checks"])
    body = {
        "kind": "demo",
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "environment": environment(),
        "selection": {k: str(v) if isinstance(v, Path) else v for k, v in vars(selection).items()},
        "seconds": seconds,
        "ok": ok,
        **facts,
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(body, indent=1, default=str) + "\n")
    console.print(f"\n{'all checks passed' if ok else 'CHECKS FAILED'} in {seconds:.0f} s; record: {record.resolve()}")
    return ok
