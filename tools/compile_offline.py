"""Compile the kernels of a few workloads at production sizes for sm_90, with no GPU; prints one JSON line each.

Usage: ``python tools/compile_offline.py``. Exit status 1 when a kernel does not compile or spills registers.
"""

from __future__ import annotations

import json
import sys

from megafuse.cli.selection import Selection
from megafuse.cli.targets import make_example
from megafuse.compiler import compile_call
from megafuse.runtime.device import target_spec
from megafuse.runtime.offline import compile_offline

ARCH = 90
CASES = [("rank_mixer_block", dtype) for dtype in ("bfloat16", "float16", "float32")]
CASES += [(name, "bfloat16") for name in ("hand_norm", "adaln", "swiglu_ffn", "log_softmax_head")]


def compile_workload(name: str, dtype: str) -> dict[str, object]:
    """Plan a workload at its GPU size and compile its kernels: how many, and which failed or spill registers."""
    example = make_example(Selection(workload=name), "full", "meta", dtype)
    compiled = compile_call(example.fn, example.args, example.kwargs, target_spec(ARCH))
    reports = compile_offline(compiled.artifact("triton").kernels, ARCH)
    failed = [f"{r.entry}: {r.error}" for r in reports if r.error]
    spilling = [r.entry for r in reports if r.spills]
    return {"name": name, "dtype": dtype, "kernels": len(reports), "failed": failed, "spilling": spilling}


def main() -> int:
    """Compile all cases."""
    wrong = False
    for name, dtype in CASES:
        found = compile_workload(name, dtype)
        wrong |= bool(found["failed"] or found["spilling"])
        print(json.dumps(found), flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
