#!/usr/bin/env bash
# The production shape with the entry point's defaults.
# Environment: NPROC (default 8; use NPROC=1 for one GPU), WARMUP (default 5), NUM_TESTS (default 20).
# Further arguments go to the entry point and override what is set here.
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" \
    --warmup "${WARMUP:-5}" --num-tests "${NUM_TESTS:-20}" "$@"
