"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_INNER = ("megafuse", "torch")


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the innermost line that is neither megafuse's nor PyTorch's, however deep the call is."""
    frame: FrameType | None = sys._getframe()
    level = 0
    while frame is not None and (not level or str(frame.f_globals.get("__name__", "")).partition(".")[0] in _INNER):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level + 1)
