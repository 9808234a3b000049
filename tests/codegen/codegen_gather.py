"""Tile programs with loads by index: integers of every level, alone and two at a time, in and outside of the table."""

from __future__ import annotations

import numpy as np

from codegen_blocks import COL, F32, NP, ROW, SCALAR, TILE, Block, Case, index, normal, param, rng, wide
from megafuse.codegen.program import Axis, Compute, Convert, Guard, Level, Load, Lookup, Phase, TileProgram, Within
from megafuse.core.dtypes import DType


def _read(
    b: Block,
    dst: str,
    places: dict[str, int],
    level: Level,
    dtype: DType,
    at: dict[str, int],
    guards: tuple[Guard, ...] = (),
) -> str:
    """``dst``, in fp32: the table where the named integers (with their strides) and axes say, NaN outside of it.

    Where a guard fails it is 0.
    """
    lookups = tuple(Lookup(name, f"{name}_within", stride) for name, stride in places.items())
    b.items.append(Load(f"{dst}_raw", "table", index(**at), level, dtype, guards, lookups=lookups))
    tests = [lookup.within for lookup in lookups]
    for n, test in enumerate(tests[1:]):
        both = f"{dst}_within{n}"
        b.items.append(Compute(both, "and", (tests[n], test), level, DType.BOOL, DType.BOOL))
        tests[n + 1] = both
    b.items.append(Compute(f"{dst}_found", "where", (tests[-1], f"{dst}_raw", np.nan), level, dtype, dtype))
    if dtype is F32:
        return f"{dst}_found"
    b.items.append(Convert(dst, f"{dst}_found", level, dtype, F32))
    return dst


def _table_at(table: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    i, j = np.broadcast_arrays(i, j)
    good = (i >= 0) & (i < table.shape[0]) & (j >= 0) & (j < table.shape[1])
    return np.where(good, wide(table)[np.where(good, i, 0), np.where(good, j, 0)], np.nan)


def gather(
    dtype: DType, kind: DType, tile: int, pieces: tuple[int, ...], block: int = 0, rows: int = 7, width: int = 11
) -> Case:
    """``y = table[i, j]`` for indices by row, by column, by element and single; then the sums of the good rows."""
    cols, height = width, 9
    b, step = Block(), {TILE: index(r=cols, c=1), ROW: index(r=1), COL: index(c=1), SCALAR: index()}
    sizes = {"by_row": (ROW, height), "by_col": (COL, width), "each": (TILE, height), "one": (SCALAR, height)}
    for name, (level, size) in sizes.items():
        b.items.append(Load(name, name, step[level], level, kind))
        b.items.append(Within(f"{name}_within", name, size, level, kind))
    outs = {
        "rows_out": _read(b, "a", {"by_row": width}, TILE, dtype, {"c": 1}),
        "cols_out": _read(b, "b", {"by_col": 1}, TILE, dtype, {"r": width}),
        "each_out": _read(b, "d", {"each": width}, TILE, dtype, {"c": 1}),
        "both_out": _read(b, "e", {"by_row": width, "by_col": 1}, TILE, dtype, {}),
        "cut_out": _read(b, "g", {"by_row": width}, TILE, dtype, {"c": 1}, (Guard(index(c=1), 0, cols - 4),)),
        "one_out": _read(b, "f", {"one": width}, COL, dtype, {"c": 1}),
    }
    for name, src in outs.items():
        level = COL if name == "one_out" else TILE
        b.store(name, step[level], src, level, F32)
    b.reduce("total", "sum", outs["rows_out"])
    b.store("total_out", index(r=1), "total", ROW, F32)
    phase = Phase("gather", (), (Axis("r", rows),), (Axis("c", cols),), tile, 2 * tile, b.done(), pieces, block)
    shapes = {"by_row": (rows,), "by_col": (cols,), "each": (rows, cols), "one": (1,)}
    written = {name: (cols,) if name == "one_out" else (rows, cols) for name in outs} | {"total_out": (rows,)}
    params = (
        param("table", dtype, (height, width), wide=kind is DType.I32),
        *(param(name, kind, shape) for name, shape in shapes.items()),
        *(param(name, F32, shape, True) for name, shape in written.items()),
    )
    name = f"gather_{dtype.value}_{kind.value}_{tile}{'_looped' if block else ''}"
    table = normal("table", (height, width), dtype)
    found = {n: rng(n).integers(-2, sizes[n][1] + 2, shape).astype(NP[kind]) for n, shape in shapes.items()}
    found["one"][0] = 3
    found["by_row"][:4] = (0, height - 1, height, -1)
    r, c = np.arange(rows)[:, None], np.arange(cols)[None, :]
    by_row, by_col = found["by_row"][:, None], found["by_col"][None, :]
    expected = {
        "rows_out": _table_at(table, by_row, c),
        "cols_out": _table_at(table, r, by_col),
        "each_out": _table_at(table, found["each"], c),
        "both_out": _table_at(table, by_row, by_col),
        "cut_out": np.where(
            c < cols - 4, _table_at(table, by_row, c), np.where((by_row >= 0) & (by_row < height), 0, np.nan)
        ),
        "one_out": _table_at(table, found["one"][0], c[0]),
    }
    expected["total_out"] = expected["rows_out"].sum(1)
    program = TileProgram(name, ("Loads by index.",), params, (phase,), 1)
    return Case(name, program, {"table": table, **found}, expected, 1e-5)


def gather_cases(dtype: DType) -> list[Case]:
    """Tiles of several rows, of one row, columns walked in blocks, and tiles that need no masks of their own."""
    return [
        gather(dtype, DType.I64, 4, (16,)),
        gather(dtype, DType.I32, 1, (8, 4)),
        gather(dtype, DType.I64, 2, (4,), block=4),
        gather(dtype, DType.I32, 4, (8,), rows=8, width=8),
    ]
