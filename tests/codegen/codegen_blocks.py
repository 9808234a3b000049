"""What hand-built tile programs are made of: cases, buffers, and a builder of statements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from megafuse.codegen.program import (
    Affine,
    Compute,
    Convert,
    Level,
    Load,
    Note,
    Operand,
    Param,
    Pass,
    RowReduce,
    Statement,
    Store,
    TileProgram,
)
from megafuse.core.dtypes import DType

Arrays = dict[str, np.ndarray]
NP = {
    DType.F64: np.float64,
    DType.F32: np.float32,
    DType.F16: np.float16,
    DType.BF16: ml_dtypes.bfloat16,
    DType.I64: np.int64,
    DType.I32: np.int32,
    DType.I16: np.int16,
    DType.I8: np.int8,
    DType.U8: np.uint8,
    DType.BOOL: np.bool_,
}
F32 = DType.F32
TILE, ROW, COL, SCALAR = Level.TILE, Level.ROW, Level.COL, Level.SCALAR


@dataclass(frozen=True)
class Case:
    """A program, its inputs by parameter name, and the expected outputs (worked in fp64) by parameter name.

    ``flushed``: what the outputs may be instead, element by element, where subnormal fp32 arguments count as zero.
    """

    name: str
    program: TileProgram
    inputs: Arrays
    expected: Mapping[str, np.ndarray]
    tolerance: float = 0.0  # 0: by the type of the output; codegen_running.EXACT: none
    flushed: Mapping[str, np.ndarray] = field(default_factory=dict)

    def arrays(self) -> Arrays:
        """Fresh flat arrays for a run: copies of the inputs, outputs filled with garbage."""
        return {
            p.name: self.inputs[p.name].reshape(-1).copy() if p.name in self.inputs else garbage(p)
            for p in self.program.params
        }


def garbage(param: Param) -> np.ndarray:
    """An array that no kernel would produce."""
    size = int(np.prod(param.shape))
    return np.full(size, 113 if param.dtype is not DType.BOOL else 1, NP[param.dtype])


def param(name: str, dtype: DType, shape: tuple[int, ...], written: bool = False, wide: bool = False) -> Param:
    """A contiguous buffer."""
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return Param(name, dtype, shape, strides, written, wide)


def index(const: int = 0, **terms: int) -> Affine:
    """``index(r=8, c=1)`` is ``8 * r + c``."""
    return Affine(tuple(terms.items()), const)


@dataclass
class Block:
    """Collects statements; every method returns the name of its result."""

    items: list[Statement | Note] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.items.append(Note(text))

    def load(self, dst: str, buffer: str, at: Affine, level: Level, dtype: DType, **more: object) -> str:
        """Load and, for 16-bit floats, convert to fp32."""
        raw = f"{dst}_{dtype.value}" if dtype.compute is not dtype else dst
        self.items.append(Load(raw, buffer, at, level, dtype, **more))  # type: ignore[arg-type]
        if raw != dst:
            self.items.append(Convert(dst, raw, level, dtype, F32))
        return dst

    def map(self, dst: str, fn: str, *args: Operand, level: Level = TILE, arg: DType = F32, out: DType = F32) -> str:
        self.items.append(Compute(dst, fn, args, level, out, arg))
        return dst

    def reduce(self, dst: str, fn: str, src: str, level: Level = TILE, dtype: DType = F32) -> str:
        self.items.append(RowReduce(dst, src, level, fn, dtype))
        return dst

    def store(self, buffer: str, at: Affine, src: Operand, level: Level, dtype: DType, **more: object) -> None:
        """Convert where the buffer is of a 16-bit type, and store."""
        if dtype.compute is not dtype and isinstance(src, str):
            self.items.append(Convert(f"{src}_out", src, level, F32, dtype))
            src = f"{src}_out"
        self.items.append(Store(buffer, at, src, level, **more))  # type: ignore[arg-type]

    def done(self) -> tuple[Pass, ...]:
        return (Pass(tuple(self.items)),)


def rng(name: str) -> np.random.Generator:
    """A generator seeded by the case's name."""
    return np.random.default_rng(sum(map(ord, name)))


def normal(name: str, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    return rng(name).standard_normal(shape).astype(np.float32).astype(NP[dtype])


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)
