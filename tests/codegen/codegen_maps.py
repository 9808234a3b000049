"""One tile program per element type that stores every pointwise function of ``ir.ops`` at edge values."""

from __future__ import annotations

import numpy as np

from codegen_blocks import NP, TILE, Block, Case, index, param
from megafuse.codegen.program import Axis, Convert, Phase, TileProgram
from megafuse.core.dtypes import DType
from megafuse.ir.numeric import FUNCTIONS
from megafuse.ir.ops import MAP_FNS

EDGES = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    3.0,
    -7.25,
    1e-40,
    -1e-40,
    1e-3,
    -1e-5,
    11.3,
    -20.0,
    60.0,
    1e20,
)
SPECIAL = (np.inf, -np.inf, np.nan)
FLOAT_ONLY = frozenset(
    "sqrt rsqrt recip exp exp2 expm1 log log2 log1p log10 sin cos tan tanh sigmoid erf erfc asin acos atan sinh cosh "
    "asinh acosh atanh lgamma digamma erfinv erfcx ndtri pow fmod remainder floordiv atan2 copysign hypot nextafter "
    "div floor ceil round trunc "
    "isnan isinf".split()
)
INT_TOO = frozenset("pow fmod remainder floordiv div floor ceil round trunc".split())
FLUSHING = frozenset("pow atan2 hypot ndtri".split())  # on a GPU these may take subnormal fp32 arguments for zero
KEEP_ZERO = frozenset("neg floor ceil round trunc copysign".split())  # of results 0 the sign is checked too
BITS = frozenset("and or xor not".split())


def functions(dtype: DType) -> list[str]:
    """The functions defined on a type."""
    if dtype is DType.BOOL:
        return [fn for fn in MAP_FNS if fn not in FLOAT_ONLY | {"neg", "sub", "shl", "shr"}]
    if dtype.is_float:
        return [fn for fn in MAP_FNS if fn not in BITS | {"shl", "shr"}]
    return [fn for fn in MAP_FNS if fn in INT_TOO or fn not in FLOAT_ONLY]


def _inputs(dtype: DType) -> list[np.ndarray]:
    if dtype is DType.BOOL:
        pairs = np.array([(a, b) for a in (0, 1) for b in (0, 1)], bool)
        return [pairs[:, 0], pairs[:, 1], pairs[:, 0]]
    if dtype.is_float:
        values = np.array([*EDGES, *SPECIAL], NP[dtype])
        others = np.array([2.0, -3.0, 0.0, 0.7, np.inf, np.nan], NP[dtype])
    elif dtype is DType.U8:
        values, others = np.array([0, 1, 7, 200, 255], np.uint8), np.array([1, 2, 5, 7], np.uint8)
    else:
        values, others = np.array([0, 1, -1, 7, -7, 100, -128], NP[dtype]), np.array([1, 2, 3, 5, -2], NP[dtype])
    a, b = (grid.ravel() for grid in np.meshgrid(values, others, indexing="ij"))
    return [a, b, a > b]


def _call(
    fn: str, dtype: DType, a: np.ndarray, b: np.ndarray, choice: np.ndarray
) -> tuple[tuple[str, ...], np.ndarray]:
    """Operand names and the expected result."""
    if fn == "where":
        return ["choice", "a", "b"], np.where(choice, a, b)
    names = ["a", "shift" if fn in ("shl", "shr") else "b"][: MAP_FNS[fn].arity]
    other = np.abs(b) % 7 if fn in ("shl", "shr") else b
    wide = dtype is DType.F32 and fn != "nextafter"
    exact = [v.astype(np.float64) if wide else v for v in (a, other)]
    with np.errstate(all="ignore"):
        want = np.asarray(FUNCTIONS[fn](*exact[: len(names)]))
        return names, want.astype(np.float32) if dtype is DType.F32 and want.dtype == np.float64 else want


def _without_subnormals(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(0, x), x).astype(x.dtype)


def map_case(dtype: DType) -> Case:
    """All functions of one type, as one program."""
    a, b, choice = _inputs(dtype)
    size, block, at = a.size, Block(), index(c=1)
    shift = b if dtype.is_float else np.abs(b.astype(np.int64)) % 7
    inputs = {"a": a, "b": b, "choice": choice, "shift": shift.astype(NP[dtype])}
    block.load("a", "a", at, TILE, dtype)
    block.load("b", "b", at, TILE, dtype)
    block.load("choice", "choice", at, TILE, DType.BOOL)
    if "shl" in functions(dtype):
        block.load("shift", "shift", at, TILE, dtype)
    outs, expected, flushed = [], {}, {}
    for fn in functions(dtype):
        names, want = _call(fn, dtype, a, b, choice)
        if dtype is DType.F32 and fn in FLUSHING:
            flushed[f"{fn}_to"] = _call(fn, dtype, _without_subnormals(a), _without_subnormals(b), choice)[1]
        out = DType.BOOL if MAP_FNS[fn].result == "bool" else dtype
        block.map(f"{fn}_value", fn, *names, arg=dtype, out=out)
        block.store(f"{fn}_to", at, f"{fn}_value", TILE, out)
        outs.append(param(f"{fn}_to", out, (size,), True))
        expected[f"{fn}_to"] = want
        if dtype.is_float and fn in KEEP_ZERO:
            block.map(f"{fn}_inverse", "div", 1.0, f"{fn}_value", arg=dtype, out=dtype)
            block.store(f"over_{fn}_to", at, f"{fn}_inverse", TILE, dtype)
            outs.append(param(f"over_{fn}_to", dtype, (size,), True))
            with np.errstate(all="ignore"):
                expected[f"over_{fn}_to"] = 1 / want.astype(NP[dtype])
    for target in (DType.F32, DType.F64, DType.I64, DType.I32, DType.U8, DType.BOOL, DType.F16):
        if dtype.is_float and not target.is_float and target is not DType.BOOL:
            continue
        block.items.append(Convert(f"as_{target.value}", "a", TILE, dtype, target))
        block.store(f"to_{target.value}", at, f"as_{target.value}", TILE, DType.F32 if target.is_float else target)
        outs.append(param(f"to_{target.value}", target, (size,), True))
        with np.errstate(all="ignore"):
            expected[f"to_{target.value}"] = (a != 0) if target is DType.BOOL else a.astype(NP[target])
    width = 1 << (size - 1).bit_length()
    phase = Phase("maps", (), (), (Axis("c", size),), 1, 1, block.done(), (width,))
    params = (*(param(n, DType.BOOL if n == "choice" else dtype, (size,)) for n in inputs), *outs)
    name = f"maps_{dtype.value}"
    program = TileProgram(name, (f"Every pointwise function on {dtype.value}.",), params, (phase,), 1)
    return Case(name, program, inputs, expected, tolerance=2e-6, flushed=flushed)


def map_cases() -> list[Case]:
    """The program of every type that arithmetic is done in."""
    return [map_case(dtype) for dtype in DType if dtype.compute is dtype]
