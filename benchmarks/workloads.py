"""Validate and time the package's workloads against eager: ``python benchmarks/workloads.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from megafuse.bench.workloads import main

if __name__ == "__main__":
    raise SystemExit(main())
