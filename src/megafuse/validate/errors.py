"""Errors of validation beyond those of ``megafuse.core.errors`` (``InputError``, ``CheckError``)."""

from __future__ import annotations

from megafuse.core.errors import MegafuseError


class OracleError(MegafuseError, RuntimeError):
    """The fp64 oracle cannot run this module; the message names the op."""


class FaultNotPlanted(MegafuseError, ValueError):
    """A planted fault left its artifact unchanged, so a test that expects red would prove nothing."""
