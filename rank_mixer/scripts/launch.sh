#!/usr/bin/env bash
# Start the benchmark on NPROC independent GPU workers (default 8), EP disabled. All arguments go to the entry point.
#
# NPROC=1 runs plain Python; NPROC=1 USE_TORCHRUN=1, and every larger NPROC, goes through torchrun.
# PYTHON names the interpreter (default: python).
set -euo pipefail

NPROC="${NPROC:-8}"
USE_TORCHRUN="${USE_TORCHRUN:-0}"
PYTHON="${PYTHON:-python}"

if ! [[ "$NPROC" =~ ^[1-9][0-9]*$ ]]; then
    echo "error: NPROC must be a positive integer, got '$NPROC'" >&2
    exit 2
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
ENTRY=rank_mixer_src/bench_rank_mixer.py

if [[ "$NPROC" == 1 && "$USE_TORCHRUN" != 1 ]]; then
    exec "$PYTHON" "$ENTRY" "$@"
fi
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$NPROC" "$ENTRY" "$@"
