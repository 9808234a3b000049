"""Element types, their sizes, their arithmetic rules and their spellings."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable

from megafuse.core.errors import InputError


class DType(enum.Enum):
    """An element type. ``value`` is the name used in printed graphs and generated code."""

    F64 = "f64"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"

    @property
    def size(self) -> int:
        """Bytes per element in memory."""
        return _SIZES[self]

    @property
    def is_float(self) -> bool:
        """True for the four floating-point types."""
        return self in _FLOATS

    @property
    def compute(self) -> DType:
        """The type in which arithmetic on this type is done: fp32 for 16-bit floats, otherwise itself."""
        return DType.F32 if self in (DType.BF16, DType.F16) else self

    @property
    def eps(self) -> float:
        """Distance from 1.0 to the next larger number; floating types only."""
        return _EPS[self]


_SIZES = {
    DType.F64: 8, DType.F32: 4, DType.BF16: 2, DType.F16: 2, DType.I64: 8,
    DType.I32: 4, DType.I16: 2, DType.I8: 1, DType.U8: 1, DType.BOOL: 1,
}  # fmt: skip
_FLOATS = frozenset({DType.F64, DType.F32, DType.BF16, DType.F16})
_EPS = {DType.F64: 2.0**-52, DType.F32: 2.0**-23, DType.BF16: 2.0**-7, DType.F16: 2.0**-10}

_LONG = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64",
         "tf32": "tfloat32"}  # fmt: skip


def spelled(text: str, known: Iterable[str], option: str) -> str:
    """The one of ``known`` that means what ``text`` does, be it written short (``bf16``) or long (``bfloat16``).

    Raises:
        InputError: there is none; the message lists those that are known, and names ``option``.
    """
    names = {_LONG.get(name, name): name for name in known}
    found = names.get(_LONG.get(text, text))
    if found is None:
        listed = ", ".join(name + _others(name) for name in names.values())
        raise InputError(f"argument {option}: unknown element type {text!r}", hint=f"use one of {listed}")
    return found


def spelled_list(text: str, known: Collection[str], option: str) -> list[str]:
    """Those of ``known`` that a comma-separated list means, each once; see ``spelled``.

    Raises:
        InputError: one of them is not known, or there is none.
    """
    return list(dict.fromkeys(spelled(part.strip(), known, option) for part in text.strip(", ").split(",")))


def _others(name: str) -> str:
    """The other spellings of a name, in brackets."""
    long = _LONG.get(name, name)
    others = [s for s in (long, *(s for s, meant in _LONG.items() if meant == long)) if s != name]
    return f" ({', '.join(others)})" if others else ""
