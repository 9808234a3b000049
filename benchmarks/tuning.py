"""Tune the kernels of the RankMixer block and record the time of each before and after: ``--help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from megafuse.bench.tuning import main

if __name__ == "__main__":
    raise SystemExit(main())
