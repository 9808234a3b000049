"""Public CUDA run: the full block, forward and backward, at (B, T, D, k) = (4, 16, 128, 2).

It shows that the workload runs and reports times. It is no numerical acceptance of a candidate.
"""

from __future__ import annotations

import math
import sys

from rank_mixer_src.config import WorkloadConfig
from rank_mixer_src.runner import format_result, run_benchmark
from rank_mixer_src.worker import DeviceError, Worker

PUBLIC_CONFIG = WorkloadConfig(
    batch_size=4,
    tokens=16,
    dim=128,
    k=2,
    ffn_type="dense_v2",
    gemm_backend="bmm",
    warmup=2,
    num_tests=3,
    seed=7101,
)


def main() -> int:
    """Run the public configuration on one GPU; returns the exit status."""
    worker = Worker()
    try:
        result = run_benchmark(PUBLIC_CONFIG, worker)
    except DeviceError as error:
        print(f"public_check: error: {error}", file=sys.stderr)
        return 1
    print(format_result(PUBLIC_CONFIG, worker, result))
    if not all(math.isfinite(seconds) and seconds > 0 for seconds in result.raw_s):
        print("public_check: error: a measured duration is not a positive number", file=sys.stderr)
        return 1
    print("public_check: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
