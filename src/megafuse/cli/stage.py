"""The stages that can be shown."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """What ``megafuse show`` prints."""

    GRAPH = "graph"
    PLAN = "plan"
    SCHEDULE = "schedule"
    CODE = "code"
