"""megafuse: a PyTorch module in, the same module with fused, checked forward and backward GPU kernels out."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_ERRORS = (
    "CaptureError CheckError InputError LaunchError MegafuseError TargetError UnsupportedError VerifyError"
).split()
# public name -> module that has it; loaded on first use, so that `import megafuse` does not load PyTorch
_HOMES = {
    "NotFusedWarning": "megafuse.api",
    "TuningWarning": "megafuse.runtime.plan_store",
    "check": "megafuse.api",
    "fuse": "megafuse.api",
    "Explanation": "megafuse.explanation",
    "explain": "megafuse.explanation",
    **dict.fromkeys(_ERRORS, "megafuse.core.errors"),
}

_PACKAGES = ("nn",)

__all__ = [
    "CaptureError",
    "CheckError",
    "Explanation",
    "InputError",
    "LaunchError",
    "MegafuseError",
    "NotFusedWarning",
    "TargetError",
    "TuningWarning",
    "UnsupportedError",
    "VerifyError",
    "__version__",
    "check",
    "explain",
    "fuse",
    "nn",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name in _PACKAGES:
        return import_module(f"megafuse.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'megafuse' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
