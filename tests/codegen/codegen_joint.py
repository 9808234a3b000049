"""Tile programs for what is shared: joint sums, roundings on the way, values kept over a row loop, one launch."""

from __future__ import annotations

import dataclasses

import numpy as np

from codegen_blocks import COL, F32, NP, ROW, SCALAR, TILE, Block, Case, index, normal, param, wide
from codegen_programs import gelu_grid, layer_norm_backward, reductions, softmax
from codegen_running import EXACT
from megafuse.codegen.program import Axis, Convert, Level, Param, Pass, Phase, TileProgram
from megafuse.core.dtypes import DType

# Halfway between bf16 neighbours (to even), next to halfway, subnormal in fp32 and in bf16, overflow, and no numbers.
EDGES = (
    1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-8 + 2.0**-23, 1 + 2.0**-8 - 2.0**-23, 1e-40, 3e-45, -1e-39,
    2.0**-126, 2.0**-134, 3 * 2.0**-134, 3.4e38, -3.39e38, 65519.0, 65520.0, 6e-8, np.inf, -np.inf, np.nan, 0.0, -0.0,
)  # fmt: skip


def joint_sums(dtype: DType, count: int, cols: int, pieces: tuple[int, ...]) -> Case:
    """Sums over the columns of ``x``, ``x^2``, ``x^3``, ... that stand side by side."""
    rows, at, b = 7, index(r=cols, c=1), Block()
    b.load("x", "x", at, TILE, dtype)
    powers = ["x"]
    for n in range(2, count + 1):
        powers.append(b.map(f"x{n}", "mul", powers[-1], "x"))
    sums = [b.reduce(f"sum_{power}", "sum", power) for power in powers]
    for n, name in enumerate(sums, 1):
        b.store(f"s{n}", index(r=1), name, ROW, F32)
    phase = Phase("sums", (), (Axis("r", rows),), (Axis("c", cols),), 2, 4, b.done(), pieces)
    names = [f"s{n}" for n in range(1, count + 1)]
    params = (param("x", dtype, (rows, cols)), *(param(name, F32, (rows,), True) for name in names))
    name = f"joint_sums_{dtype.value}_{count}_{'_'.join(map(str, pieces))}"
    x = normal(name, (rows, cols), dtype)
    expected = {name: (wide(x) ** n).sum(1) for n, name in enumerate(names, 1)}
    return Case(name, TileProgram(name, ("Sums of powers.",), params, (phase,), 2), {"x": x}, expected, 1e-4)


def rounding(through: DType, rows: int, cols: int, pieces: tuple[int, ...]) -> Case:
    """fp32 values of every level, rounded to ``through`` and back."""
    b = Block()
    shapes: dict[Level, tuple[int, ...]] = {TILE: (rows, cols), ROW: (rows,), COL: (cols,), SCALAR: (1,)}
    places = {TILE: index(r=cols, c=1), ROW: index(r=1), COL: index(c=1), SCALAR: index()}
    inputs, params, expected = {}, [], {}
    for level, shape in shapes.items():
        name, size = f"in_{level.value}", int(np.prod(shape))
        x = np.resize(np.array(EDGES, np.float32), size)
        x[len(EDGES) :] = normal(name, (size,), F32)[len(EDGES) :]
        inputs[name] = x.reshape(shape)
        b.load(f"x_{level.value}", name, places[level], level, F32)
        b.items.append(Convert(f"y_{level.value}", f"x_{level.value}", level, F32, F32, through))
        b.store(f"out_{level.value}", places[level], f"y_{level.value}", level, F32)
        params += [param(name, F32, shape), param(f"out_{level.value}", F32, shape, True)]
        with np.errstate(over="ignore"):
            expected[f"out_{level.value}"] = x.astype(NP[through]).astype(np.float32)
    phase = Phase("round", (), (Axis("r", rows),), (Axis("c", cols),), 2, 4, b.done(), pieces)
    name = f"rounding_{through.value}_{cols}"
    program = TileProgram(name, (f"Through {through.value}.",), tuple(params), (phase,), 1)
    return Case(name, program, inputs, expected, EXACT)


def summed_loads(parts: int, rows: int, cols: int, pieces: tuple[int, ...], tile: int) -> Case:
    """Values of every level that are added up while they are loaded, and a sum over the columns that needs one."""
    b = Block()
    shapes: dict[Level, tuple[int, ...]] = {TILE: (rows, cols), ROW: (rows,), COL: (cols,), SCALAR: (1,)}
    places = {TILE: index(r=cols, c=1), ROW: index(r=1), COL: index(c=1), SCALAR: index()}
    name = f"summed_loads_{parts}_{rows}_{'_'.join(map(str, pieces))}"
    inputs, params = {}, []
    for level, shape in shapes.items():
        value = f"in_{level.value}"
        inputs[value] = normal(f"{name}_{value}", (parts, *shape), F32)
        b.load(f"x_{level.value}", value, places[level], level, F32, parts=parts, step=int(np.prod(shape)))
        params.append(param(value, F32, (parts, *shape)))
    b.map("row", "mul", "x_row", "x_scalar", level=ROW)
    b.map("col", "add", "x_tile", "x_col")
    b.map("y", "mul", "col", "row")
    b.reduce("total", "sum", "y")
    b.map("z", "sub", "y", "total")
    b.store("z", places[TILE], "z", TILE, F32)
    b.store("total", places[ROW], "total", ROW, F32)
    params += [param("z", F32, (rows, cols), True), param("total", F32, (rows,), True)]
    phase = Phase("add up", (), (Axis("r", rows),), (Axis("c", cols),), tile, tile, b.done(), pieces)
    program = TileProgram(name, (f"Sums of {parts}.",), tuple(params), (phase,), 2)
    added = {level: wide(inputs[f"in_{level.value}"]).sum(0) for level in shapes}
    y = (added[TILE] + added[COL]) * added[ROW][:, None] * added[SCALAR]
    return Case(name, program, inputs, {"z": y - y.sum(1, keepdims=True), "total": y.sum(1)}, 1e-4)


def summed_cases() -> list[Case]:
    """Single rows and several, the last ones missing; padded columns and parts, and none."""
    return [
        summed_loads(8, 5, 16, (16,), 1),
        summed_loads(13, 7, 20, (16, 4), 1),
        summed_loads(6, 7, 20, (32,), 4),
        summed_loads(33, 9, 4, (4,), 2),
        summed_loads(3, 1, 24, (16, 16), 1),
        summed_loads(8, 5, 1, (1,), 1),
    ]


def reloaded(dtype: DType) -> Case:
    """A backward of layer norm whose weight is loaded again in every row tile."""
    case = layer_norm_backward(dtype, 11, 20, (16, 4), 2, 4)
    phases = tuple(dataclasses.replace(phase, hoist=False) for phase in case.program.phases)
    name = f"{case.name}_reloaded"
    return dataclasses.replace(case, name=name, program=dataclasses.replace(case.program, name=name, phases=phases))


def apart(dtype: DType) -> Case:
    """Four kernels in one launch: looped columns, partial sums, columns over the grid, and two fixed axes in chunks."""
    parts = [softmax(dtype, 7, 150, 0, 2, block=64), layer_norm_backward(dtype, 11, 20, (16, 4), 2, 4)]
    parts += [gelu_grid(dtype, 5, 150), reductions(F32, 2, False)]
    own = [_prefixed(case.program, f"{letter}_") for letter, case in zip("abcd", parts, strict=True)]
    name, warps = f"apart_{dtype.value}", max(p.num_warps for p in own)
    phases, params = (tuple(x for p in own for x in getattr(p, field)) for field in ("phases", "params"))
    program = TileProgram(name, ("Four kernels side by side.",), params, phases, warps, apart=True)
    given, made = (
        {f"{letter}_{k}": v for letter, c in zip("abcd", parts, strict=True) for k, v in getattr(c, field).items()}
        for field in ("inputs", "expected")
    )
    return Case(name, program, given, made, max(case.tolerance for case in parts))


def _prefixed(program: TileProgram, prefix: str) -> TileProgram:
    """The same program on buffers whose names begin with ``prefix``."""
    names = {p.name for p in program.params}

    def new(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(new, value))
        if isinstance(value, Param):
            return dataclasses.replace(value, name=prefix + value.name)
        if isinstance(value, Phase):
            return dataclasses.replace(value, title=f"{prefix}{value.title}", passes=new(value.passes))
        if isinstance(value, Pass):
            return Pass(new(value.body))  # type: ignore[arg-type]
        if getattr(value, "buffer", None) in names:
            return dataclasses.replace(value, buffer=prefix + value.buffer)  # type: ignore[type-var, attr-defined]
        return value

    return dataclasses.replace(program, phases=new(program.phases), params=new(program.params))


def joint_cases(dtype: DType) -> list[Case]:
    """Programs on one 16- or 32-bit float type."""
    return [
        joint_sums(dtype, 2, 20, (32,)),
        joint_sums(dtype, 3, 20, (16, 4)),
        joint_sums(dtype, 4, 45, (16, 16, 16)),
        joint_sums(dtype, 9, 37, (32, 8)),
        reloaded(dtype),
        apart(dtype),
    ]


def rounding_cases(through: DType) -> list[Case]:
    """Narrow tiles (less than an element for each thread) and wide ones."""
    return [rounding(through, 5, 20, (16, 4)), rounding(through, 9, 300, (256, 64))]
