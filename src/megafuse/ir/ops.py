"""The vocabulary of pointwise functions: arity, result type and cost class of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megafuse.core.dtypes import DType


@dataclass(frozen=True)
class MapFn:
    """One pointwise function. ``special`` counts special-function results (exp, log, division) it costs."""

    arity: int
    result: str = "same"  # "same" as the arguments, or "bool"
    special: int = 0


_UNARY = "neg abs sign floor ceil round trunc not".split()
_SPECIAL_1 = (
    "sqrt rsqrt recip exp exp2 expm1 log log2 log1p log10 sin cos tan tanh sigmoid erf erfc asin acos atan sinh cosh "
    "asinh acosh atanh lgamma digamma erfinv erfcx ndtri".split()
)
_BINARY = "add sub mul maximum minimum and or xor shl shr".split()
_BINARY_SPECIAL = "div pow fmod remainder floordiv atan2 copysign hypot nextafter".split()
_COMPARE = "eq ne lt le gt ge".split()

MAP_FNS: dict[str, MapFn] = {
    **{n: MapFn(1) for n in _UNARY},
    **{n: MapFn(1, special=1) for n in _SPECIAL_1},
    **{n: MapFn(2) for n in _BINARY},
    **{n: MapFn(2, special=1) for n in _BINARY_SPECIAL},
    **{n: MapFn(2, result="bool") for n in _COMPARE},
    "isnan": MapFn(1, result="bool"),
    "isinf": MapFn(1, result="bool"),
    "where": MapFn(3),
}
SPECIAL_COST = 15.0  # what a special function takes longer than an addition
REDUCE_FNS = ("sum", "max", "min", "prod")


def weight(kind: str, fn: str) -> float:
    """What one result of an instance (``ir.trace``) costs, in additions."""
    if kind == "map" and fn in MAP_FNS:
        return 1.0 + SPECIAL_COST * MAP_FNS[fn].special
    return 0.0 if kind == "const" else 1.0


def map_dtype(fn: str, dtypes: Sequence[DType]) -> DType:
    """Result type of ``fn``. Arguments of one map have one type, but for the condition of ``where``.

    ``max``/``maximum`` propagate NaN as PyTorch's do. ``remainder`` and ``floordiv`` floor as Python's do, ``fmod``
    truncates. ``round`` rounds half to even. Integer ``div`` truncates.

    Raises:
        ValueError: mixed argument types or a wrong number of arguments.
    """
    spec = MAP_FNS[fn]
    if len(dtypes) != spec.arity:
        raise ValueError(f"{fn} takes {spec.arity} arguments, got {len(dtypes)}")
    values = dtypes[1:] if fn == "where" else dtypes
    if len(set(values)) != 1 or (fn == "where" and dtypes[0] is not DType.BOOL):
        raise ValueError(f"{fn} got mixed argument types {[d.value for d in dtypes]}")
    return DType.BOOL if spec.result == "bool" else values[0]
