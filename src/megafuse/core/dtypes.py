"""Element types, their sizes and their arithmetic rules."""

from __future__ import annotations

import enum


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
