"""Readable, unique and stable identifiers for generated code."""

from __future__ import annotations

import keyword
import re

from megafuse.codegen.artifact import EARLY
from megafuse.ir.types import Origin

_OWN = ("tl", "triton", "libdevice", "np", "math", "ml_dtypes", "range", "float", "int", "min", "len", EARLY)
RESERVED = frozenset((*keyword.kwlist, *_OWN))


def identifier(text: str) -> str:
    """``text`` as a Python identifier: other characters become underscores."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII) or "value"
    return f"v_{name}" if name[0].isdigit() else name


def source_note(origin: Origin | None) -> str:
    """The comment that says where lines of a kernel come from; empty where that is not known."""
    if origin is None:
        return ""
    return f"src[{origin}]: {origin.code}" if origin.code else f"src[{origin}]"


class Namer:
    """Hands out names that are not taken yet.

    A name that must exist in several copies (one per column piece) is claimed with all of them at once, so that a value
    called ``x_0`` never meets piece 0 of a value called ``x``.
    """

    def __init__(self, taken: frozenset[str] = RESERVED) -> None:
        self._taken = set(taken)

    def copy(self) -> Namer:
        """A namer for another scope within this one: the names taken here are taken there."""
        return Namer(frozenset(self._taken))

    def claim(self, wish: str, pieces: int = 1) -> tuple[str, ...]:
        """Claim ``wish`` (for several pieces ``wish_0``, ``wish_1``, ...), with a number added where it is taken."""
        base, tries = identifier(wish), 1
        while True:
            stem = base if tries == 1 else f"{base}_v{tries}"
            names = (stem,) if pieces == 1 else tuple(f"{stem}_{i}" for i in range(pieces))
            if not self._taken.intersection(names):
                self._taken.update(names)
                return names
            tries += 1

    def one(self, wish: str) -> str:
        """Claim a single name."""
        return self.claim(wish)[0]
