"""Make the reference workload importable: its folder goes on ``sys.path``."""

import sys
from pathlib import Path

RANK_MIXER_ROOT = Path(__file__).resolve().parents[2] / "rank_mixer"

if str(RANK_MIXER_ROOT) not in sys.path:
    sys.path.insert(0, str(RANK_MIXER_ROOT))
