"""Hand-built chain programs with their inputs and NumPy references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from codegen_blocks import COL, F32, NP, ROW, TILE, Block, Case, index, param, rng, wide
from codegen_running import EXACT
from megafuse.codegen.chain_program import ChainProgram, Product, RowSums
from megafuse.codegen.dot_program import Matrices
from megafuse.codegen.program import Affine, Axis, ColReduce, Convert, Load, Lookup, Phase, Within
from megafuse.core.dtypes import DType
from megafuse.ir.chain import block

TABLE = 9  # rows of a table


@dataclass(frozen=True)
class Chain:
    """``h = relu(x @ w1^T + b1)``, ``y = h @ w2``; sums over the rows of ``x^T h`` and of ``h``, per chunk.

    ``by_index``: the rows of ``x`` are those of a table at given integers, 0 outside of it. ``problems``: each has
    rows, matrices, a bias and sums of its own; ``x`` holds ``[rows, problems, K]``, ``y`` ``[problems, rows, N]``.
    """

    name: str
    dtype: DType
    rows: int
    widths: tuple[int, int, int]
    row_tile: int
    rows_per_chunk: int
    held: bool = True
    turned: bool = False
    early: bool = False
    first: int = 0
    by_index: bool = False
    shares: int = 1
    problems: int = 1
    twice: bool = False  # another sum over the rows, of h^T @ x

    @property
    def chunks(self) -> int:
        """Programs of each problem."""
        return -(-self.rows // self.rows_per_chunk)

    def case(self) -> Case:
        inputs, expected = self._arrays()
        signs = EXACT if self.rows_per_chunk > 1 else 0.0  # products of one row are not added to 0
        return Case(self.name, self.program(), inputs, expected, signs)  # type: ignore[arg-type]

    def program(self) -> ChainProgram:
        (k, n, o), dtype, rows, several = self.widths, self.dtype, self.rows, self._several
        height = TABLE if self.by_index else rows
        params = (
            param("x", dtype, (height, *several, k)), param("w1", dtype, (*several, n, k)),
            param("b1", dtype, (*several, n)), param("w2", dtype, (*several, n, o)),
            param("y", dtype, (*several, rows, o), written=True),
            param("dw", F32, (self.chunks, *several, k, n), written=True),
            param("db", F32, (self.chunks, *several, n), written=True),
        )  # fmt: skip
        params = (param("i", DType.I64, (rows,)), *params) if self.by_index else params
        load, act, out = self._loaded(), Block(), Block()
        act.note("src[mlp.py:7]: h = relu(x @ w1.T + b1)")
        act.load("b1_v1", "b1", self._index(n, c=1), COL, dtype)
        act.map("z", "add", "acc0", "b1_v1")
        act.items.append(Convert("z0", "z", TILE, F32, F32, dtype if dtype is not F32 else None))
        act.map("h", "maximum", "z0", 0.0)
        act.items.append(Convert("h0", "h", TILE, F32, dtype))
        at = self._index(n, chunk=self.problems * n, c=1) if self.chunks > 1 else self._index(n, c=1)
        act.items.append(ColReduce("acc_db", "h", TILE, "sum", F32, "db", at, F32))
        out.store("y", self._index(rows * o, r=o, c=1), "acc1", TILE, dtype)
        sums = Matrices("dw", (k * n if self.chunks * self.problems > 1 else 0, n, 1))
        step = int(self.problems > 1)  # between matrices, times their size
        stages = (
            self._phase(load, k),
            Product("acc0", "x_v1", Matrices("w1", (step * n * k, 1, k)), k, n, dtype),
            self._phase(act, n),
            RowSums("sums0", "x_v1", "h0", k, n, sums, dtype),
            Product("acc1", "h0", Matrices("w2", (step * n * o, o, 1)), n, o, dtype),
            self._phase(out, o),
        )
        if self.twice:
            params = (*params, param("dwt", F32, (self.chunks, *self._several, n, k), written=True))
            turned = Matrices("dwt", (k * n if self.chunks * self.problems > 1 else 0, k, 1))
            stages = (*stages, RowSums("sums1", "h0", "x_v1", n, k, turned, dtype))
        return ChainProgram(
            self.name, ("A chain of two products.",), params, stages, num_warps=4, held=self.held, turned=self.turned,
            early=self.early, first=self.first, shares=self.shares,
        )  # fmt: skip

    def _loaded(self) -> Block:
        load, k = Block(), self.widths[0]
        if not self.by_index:
            load.load("x_v1", "x", self._index(k, r=self.problems * k, c=1), TILE, self.dtype)
            return load
        load.load("i_v1", "i", index(r=1), ROW, DType.I64)
        load.items.append(Within("within0", "i_v1", TABLE, ROW, DType.I64))
        found = (Lookup("i_v1", "within0", k),)
        load.items.append(Load("x_found", "x", index(c=1), TILE, self.dtype, lookups=found))
        load.map("x_v1", "where", "within0", "x_found", 0.0, arg=self.dtype, out=self.dtype)
        return load

    @property
    def _several(self) -> tuple[int, ...]:
        """The dim of the problems, if there are several."""
        return (self.problems,) if self.problems > 1 else ()

    def _index(self, step: int, **terms: int) -> Affine:
        """An index that moves by ``step`` from problem to problem."""
        return index(**({"p": step} if self.problems > 1 else {}), **terms)

    def _phase(self, build: Block, cols: int) -> Phase:
        return Phase(
            "phase", tuple(Axis("p", n) for n in self._several), (Axis("r", self.rows),), (Axis("c", cols),),
            self.row_tile, self.rows_per_chunk, build.done(), (block(cols),),
        )  # fmt: skip

    def _arrays(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Whole numbers and eighths, whose sums of products are exact in fp32, in any order."""
        k, n, o = self.widths
        several, height = self._several, TABLE if self.by_index else self.rows
        shapes = {"x": (height, *several, k), "w1": (*several, n, k), "b1": (*several, n), "w2": (*several, n, o)}
        inputs = {
            name: (rng(self.name + name).integers(-3, 4, shape) / (1 if name[0] == "x" else 8)).astype(NP[self.dtype])
            for name, shape in shapes.items()
        }

        def rounded(x: np.ndarray) -> np.ndarray:
            return wide(x.astype(np.float32).astype(NP[self.dtype]))

        x, w1, b1, w2 = (wide(inputs[name]) for name in shapes)
        if self.by_index:
            at = inputs["i"] = rng(self.name).integers(-1, TABLE + 1, self.rows)
            x = np.where(((at >= 0) & (at < TABLE))[:, None], x[at.clip(0, TABLE - 1)], 0.0)
        x, w1, b1 = x.swapaxes(0, -2), w1.swapaxes(-1, -2), b1[..., None, :]
        h = np.maximum(rounded(x @ w1 + b1), 0)
        cuts = range(self.rows_per_chunk, self.rows, self.rows_per_chunk)
        parts = list(zip(np.split(x, cuts, -2), np.split(h, cuts, -2), strict=True))
        dw = np.stack([a.swapaxes(-1, -2) @ b for a, b in parts])
        results = {"y": rounded(h @ w2), "dw": dw, "db": np.stack([b.sum(-2) for _, b in parts])}
        return inputs, results | ({"dwt": dw.swapaxes(-1, -2)} if self.twice else {})


def chains(dtype: DType) -> Iterator[Chain]:
    """One program and several, one row tile and several, ragged rows and widths, kinds of tiles and of loads."""
    t = dtype.value
    yield Chain(f"chain_whole_{t}", dtype, 32, (32, 64, 16), 32, 32)
    yield Chain(f"chain_odd_{t}", dtype, 37, (5, 20, 3), 16, 32)
    yield Chain(f"chain_walk_{t}", dtype, 100, (17, 33, 40), 16, 48, held=False)
    yield Chain(f"chain_one_{t}", dtype, 21, (16, 7, 16), 32, 32)
    yield Chain(f"chain_turned_{t}", dtype, 37, (5, 20, 3), 16, 32, turned=True)
    yield Chain(f"chain_early_{t}", dtype, 100, (17, 33, 40), 16, 48, early=True)
    yield Chain(f"chain_ahead_{t}", dtype, 96, (16, 32, 16), 16, 32, turned=True, early=True)
    yield Chain(f"chain_index_{t}", dtype, 100, (17, 33, 40), 16, 48, early=True, by_index=True)
    yield Chain(f"chain_early_sums_{t}", dtype, 100, (17, 33, 40), 16, 48, early=True, twice=True)
    yield Chain(f"chain_first_{t}", dtype, 37, (5, 20, 3), 16, 16, turned=True, first=2)
    if dtype is not F32:  # as tiles are chosen: registers hold no fp32 matrices of this size
        yield Chain(f"chain_first_index_{t}", dtype, 37, (17, 33, 40), 16, 16, by_index=True, first=2)
    yield Chain(f"chain_first_some_{t}", dtype, 32, (16, 32, 16), 32, 32, turned=True, shares=2, first=1)
    yield Chain(f"chain_uneven_{t}", dtype, 80, (16, 32, 16), 16, 32)
    yield Chain(f"chain_shared_{t}", dtype, 37, (5, 20, 3), 16, 16, shares=2)
    yield Chain(f"chain_shared_whole_{t}", dtype, 32, (16, 32, 16), 32, 32, turned=True, shares=3)
    yield Chain(f"chain_problems_{t}", dtype, 37, (5, 20, 3), 16, 32, problems=3)
    yield Chain(f"chain_problems_once_{t}", dtype, 13, (16, 32, 16), 16, 16, problems=5)
    yield Chain(f"chain_problems_walk_{t}", dtype, 100, (17, 33, 40), 16, 112, problems=2, held=False)
    yield Chain(f"chain_problems_turned_{t}", dtype, 96, (16, 32, 16), 16, 32, problems=3, turned=True, early=True)
    yield Chain(f"chain_problems_shared_{t}", dtype, 37, (5, 20, 3), 16, 16, problems=3, shares=2)
    if dtype is F32:
        yield Chain(f"chain_problems_rows_{t}", dtype, 5, (12, 16, 9), 1, 2, problems=3)
        yield Chain(f"chain_rows_{t}", dtype, 5, (12, 16, 9), 1, 2)
        yield Chain(f"chain_rows_shared_{t}", dtype, 5, (12, 16, 9), 1, 1, shares=2)


def sums_alone(dtype: DType, rows: int, last_first: bool) -> Case:
    """Nothing but ``x^T @ g`` over the rows, which are loaded ahead; ``g`` lies by columns."""
    name, k, n, row_tile, chunk = f"chain_sums_{rows}_{dtype.value}", 20, 33, 16, 48
    params = (
        param("x", dtype, (rows, k)),
        param("g", dtype, (n, rows)),
        param("dw", F32, (-(-rows // chunk), k, n), written=True),
    )
    left, right = Block(), Block()
    left.items.append(Load("x_v1", "x", index(r=k, c=1), TILE, dtype))
    right.items.append(Load("g_v1", "g", index(r=1, c=rows), TILE, dtype))
    phases = (
        Phase("phase", (), (Axis("r", rows),), (Axis("c", w),), row_tile, chunk, part.done(), (block(w),))
        for part, w in ((left, k), (right, n))
    )
    sums = RowSums("sums0", "x_v1", "g_v1", k, n, Matrices("dw", (k * n, n, 1)), dtype)
    stages = (*phases, sums)
    program = ChainProgram(name, ("Sums alone.",), params, stages, 4, num_stages=3, last_first=last_first)
    inputs = {a: rng(name + a).integers(-3, 4, s).astype(NP[dtype]) for a, s in (("x", (rows, k)), ("g", (n, rows)))}
    cuts = range(chunk, rows, chunk)
    parts = zip(np.split(wide(inputs["x"]), cuts), np.split(wide(inputs["g"]).T, cuts), strict=True)
    return Case(name, program, inputs, {"dw": np.stack([a.T @ b for a, b in parts])}, EXACT)  # type: ignore[arg-type]


def chain_cases(dtype: DType) -> list[Case]:
    """All of them, as cases."""
    return [chain.case() for chain in chains(dtype)] + [
        sums_alone(dtype, rows, last_first) for rows, last_first in ((96, False), (100, True), (112, True))
    ]
