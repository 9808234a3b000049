"""Every error megafuse raises: what happened, where in the user's code, and what to do."""

from __future__ import annotations

from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)
_STAGE = "__megafuse_stage__"
_CALLERS = ("megafuse.capture", "megafuse.cli.targets")  # what calls the user's code
_INNER = ("torch", "megafuse", "importlib")


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


class NotFusableError(CaptureError):
    """The callable does something at each call that a captured step would leave out; ``fuse`` runs the original."""


class TargetError(MegafuseError, RuntimeError):
    """The requested target (GPU, interpreter, compiler) is not available here."""


class VerifyError(MegafuseError, AssertionError):
    """An intermediate value broke an invariant: a bug in megafuse, never the user's fault."""


class CheckError(MegafuseError, AssertionError):
    """A fused result disagreed with the original by the acceptance rule, or was not repeatable."""


class LaunchError(MegafuseError, RuntimeError):
    """A call to a fused step does not satisfy what its binding assumed."""


def users_error(error: Error, stage: str) -> Error:
    """``error``, marked as raised in the user's code at ``stage`` of ours; its traceback will say so."""
    if not hasattr(error, _STAGE):
        setattr(error, _STAGE, stage)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised in your code {stage}")
    return error


def stage_of(error: BaseException) -> str | None:
    """The stage at which an error of the user's arose; None for an error that is not the user's."""
    return getattr(error, _STAGE, None)


def trimmed(error: Error) -> Error:
    """A user's error with a traceback that starts where the user's code is called; other errors as they are."""
    tb, traced = error.__traceback__, False
    while tb is not None and stage_of(error) is not None:
        home = str(tb.tb_frame.f_globals.get("__name__", ""))
        if traced and home.partition(".")[0] not in _INNER:
            break
        traced = traced or home.startswith(_CALLERS)
        tb = tb.tb_next
    return error.with_traceback(tb)
