"""Every error megafuse raises: what happened, where in the user's code, and what to do."""

from __future__ import annotations


class MegafuseError(Exception):
    """Base class. The text is ``what``, then ``at where``, then ``hint``, each on its own line."""

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        lines = [what]
        if where:
            lines.append(f"  at {where}")
        if hint:
            lines.append(f"  what to do: {hint}")
        super().__init__("\n".join(lines))


class InputError(MegafuseError, ValueError):
    """An argument given by the user is not usable; the message names it."""


class UnsupportedError(MegafuseError):
    """``strict=True`` and something would not run in a generated kernel."""


class CaptureError(MegafuseError):
    """PyTorch could not trace the callable into a forward+backward graph."""


class TargetError(MegafuseError, RuntimeError):
    """The requested target (GPU, interpreter, compiler) is not available here."""


class VerifyError(MegafuseError, AssertionError):
    """An intermediate value broke an invariant: a bug in megafuse, never the user's fault."""


class CheckError(MegafuseError, AssertionError):
    """A fused result disagreed with the original by the acceptance rule, or was not repeatable."""


class LaunchError(MegafuseError, RuntimeError):
    """A call to a fused step does not satisfy what its binding assumed."""
