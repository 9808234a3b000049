"""``torch.compile(options=...)``: the options of :func:`megafuse.fuse` by the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafuse.api import FUSE_OPTIONS
from megafuse.compiler import Options
from megafuse.core.errors import InputError


def parse_options(options: Mapping[str, Any] | None, mode: str | None) -> Options:
    """The options of one ``torch.compile`` call.

    Raises:
        InputError: an option or its value is unknown, or ``mode`` is given.
    """
    if mode is not None:
        raise InputError(f"backend 'megafuse' has no mode {mode!r}", hint="leave out mode=")
    given = dict(options or {})
    unknown = [name for name in given if name not in FUSE_OPTIONS]
    if unknown:
        raise InputError(
            f"unknown option {unknown[0]!r} of backend 'megafuse'", hint=f"use one of {', '.join(FUSE_OPTIONS)}"
        )
    return Options(**given)
