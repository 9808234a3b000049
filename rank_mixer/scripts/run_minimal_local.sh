#!/usr/bin/env bash
# Smallest run of the production shape: the bmm backend, one warmup and one measurement.
# Environment: NPROC (default 8; use NPROC=1 for one GPU), WARMUP (default 1), NUM_TESTS (default 1).
# Further arguments go to the entry point and override what is set here.
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" \
    --gemm-backend bmm --warmup "${WARMUP:-1}" --num-tests "${NUM_TESTS:-1}" "$@"
