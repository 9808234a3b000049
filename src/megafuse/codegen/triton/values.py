"""Values in Triton text: element types, literals and conversions."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from megafuse.codegen.program import Level, Param
from megafuse.core.dtypes import DType

TYPES = {
    DType.F64: "tl.float64",
    DType.F32: "tl.float32",
    DType.BF16: "tl.bfloat16",
    DType.F16: "tl.float16",
    DType.I64: "tl.int64",
    DType.I32: "tl.int32",
    DType.I16: "tl.int16",
    DType.I8: "tl.int8",
    DType.U8: "tl.uint8",
    DType.BOOL: "tl.int1",
}
HALVES = (DType.BF16, DType.F16)
INT_BITS = {DType.I64: 64, DType.I32: 32, DType.I16: 16, DType.I8: 8}
_MIN_NORMAL, _MAX_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True)
class Value:
    """A value of the tile program as Triton variables: one per column piece where it varies along the columns.

    ``pad`` is what columns outside the tile are known to hold (the ``other`` of a masked load), if anything.
    """

    names: tuple[str, ...]
    level: Level
    dtype: DType
    pad: float | None = None

    def name(self, piece: int) -> str:
        """The variable to use in column piece ``piece``."""
        return self.names[piece if len(self.names) > 1 else 0]


def plain_literal(value: float | int | bool, dtype: DType) -> str:
    """Python text of ``value`` as an element of ``dtype``."""
    if not dtype.is_float:
        return repr(bool(value)) if dtype is DType.BOOL else repr(int(value))
    number = float(value)
    if math.isfinite(number):
        return repr(number)
    return f'float("{"nan" if math.isnan(number) else "inf" if number > 0 else "-inf"}")'


def keeps_type(value: float | int | bool, dtype: DType, beside: bool) -> bool:
    """Whether Triton itself gives the bare literal type ``dtype``: fp32 for normal floats, int32 for small integers.

    ``beside`` an operand of its type, a literal is converted to that type: enough for 64-bit integers, and for fp64 if
    nothing is lost on the way through fp32.
    """
    if dtype in (DType.I32, DType.I64):
        return (dtype is DType.I64 and beside) or (dtype is DType.I32 and -(2**31) <= int(value) < 2**31)
    if not dtype.is_float or not (dtype is DType.F32 or beside):
        return False
    size = abs(float(value))
    if dtype is DType.F64 and math.isfinite(size) and size <= _MAX_FLOAT and not _is_fp32(size):
        return False
    return size == 0 or not math.isfinite(size) or _MIN_NORMAL <= size <= _MAX_FLOAT


def _is_fp32(value: float) -> bool:
    return struct.unpack("f", struct.pack("f", value))[0] == value


def literal(value: float | int | bool, dtype: DType, level: Level, beside: bool = False) -> str:
    """A literal that has type ``dtype`` exactly, ``beside`` an operand of that type or anywhere.

    Triton takes Python floats as fp32, so other fp64 literals are written as full tensors.
    """
    text = plain_literal(value, dtype)
    if keeps_type(value, dtype, beside):
        return text
    return f"tl.full((), {text}, {TYPES[dtype]})"


def convert(text: str, src: DType, dst: DType) -> str:
    """``text`` (a name or a call) of type ``src`` as ``dst``, through fp32 where a 16-bit float meets another type."""
    if src is dst:
        return text
    if src in HALVES and dst is not DType.F32:
        text, src = f"{text}.to(tl.float32)", DType.F32
    if dst is DType.BOOL:
        return f"{text} != 0"
    if dst in HALVES and src is not DType.F32:
        text = f"{text}.to(tl.float32)"
    return f"{text}.to({TYPES[dst]})"


def neutral(fn: str, dtype: DType) -> float | int:
    """The element that a reduction leaves unchanged."""
    if fn in ("sum", "prod"):
        return 0 if fn == "sum" else 1
    if dtype.is_float:
        return -math.inf if fn == "max" else math.inf
    if dtype in (DType.BOOL, DType.U8):
        return 0 if fn == "max" else (1 if dtype is DType.BOOL else 255)
    half = 1 << (INT_BITS[dtype] - 1)
    return -half if fn == "max" else half - 1


def in_halves(params: Iterable[Param]) -> bool:
    """Whether a kernel reads or writes some 16-bit type: errors far below that type's rounding are allowed then."""
    return any(param.dtype in HALVES for param in params)
