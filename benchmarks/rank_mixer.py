"""Time the RankMixer block against its rivals: ``python benchmarks/rank_mixer.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from megafuse.bench.rank_mixer import main

if __name__ == "__main__":
    raise SystemExit(main())
