"""Time what the host does for each call, and show where that time goes: ``python benchmarks/host.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from megafuse.bench.host import main

if __name__ == "__main__":
    raise SystemExit(main())
