"""The process that runs under Nsight Compute: one step of one rival between profiler start and stop.

``python -m megafuse.bench.ncu_worker '{"source": {...}, "rival": "megafuse"}'``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from megafuse.bench.cases import make_case
from megafuse.bench.rivals import MAKERS
from megafuse.bench.step import make_step
from megafuse.runtime.timer import FLUSH_BYTES, require_cuda

WARMUP = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Make the case and the rival, warm up, flush the L2 cache, profile one step."""
    spec = json.loads((sys.argv[1:] if argv is None else list(argv))[0])
    require_cuda()
    case = make_case(spec["source"])
    step = make_step(case, MAKERS[spec["rival"]](case))
    for _ in range(WARMUP):
        step()
    case.clear_gradients()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    flush.zero_()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    step()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
