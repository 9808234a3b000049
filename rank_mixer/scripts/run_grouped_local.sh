#!/usr/bin/env bash
# The production shape with the grouped GEMM backend.
# Environment: NPROC (default 8; use NPROC=1 for one GPU), WARMUP (default 1), NUM_TESTS (default 3).
# Further arguments go to the entry point and override what is set here.
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" \
    --gemm-backend grouped --warmup "${WARMUP:-1}" --num-tests "${NUM_TESTS:-3}" "$@"
