"""Validate and time MLPs against eager and torch.compile: ``python benchmarks/mlp.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from megafuse.bench.mlp import main

if __name__ == "__main__":
    raise SystemExit(main())
