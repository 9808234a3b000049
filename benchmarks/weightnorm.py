"""Validate and time MLPs with weight norm against eager and torch.compile: ``benchmarks/weightnorm.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from megafuse.bench.mlp import weightnorm_main

if __name__ == "__main__":
    raise SystemExit(weightnorm_main())
