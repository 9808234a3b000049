"""Hand-built dot programs with their inputs and NumPy references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from codegen_blocks import COL, F32, NP, TILE, Block, Case, garbage, index, normal, param, rng, wide
from codegen_running import EXACT
from megafuse.codegen.dot_program import PRODUCT, DotProgram, Matrices
from megafuse.codegen.program import Affine, Axis, ColReduce, Convert, Phase
from megafuse.core.dtypes import DType

Shape = tuple[int, int, int, int]  # P, M, N, K


@dataclass(frozen=True)
class Lay:
    """How matrices ``[P, rows, cols]`` lie: their dims in memory, outermost first (``p``, ``r``, ``c``).

    ``shared``: one matrix for all problems. ``skip``: elements before the first.
    """

    order: str = "prc"
    shared: bool = False
    skip: int = 0

    def strides(self, p: int, rows: int, cols: int) -> tuple[int, int, int]:
        sizes, step, found = {"p": 1 if self.shared else p, "r": rows, "c": cols}, 1, {}
        for dim in reversed(self.order):
            found[dim], step = step, step * sizes[dim]
        return 0 if self.shared else found["p"], found["r"], found["c"]

    def size(self, p: int, rows: int, cols: int) -> int:
        """Elements of the buffer."""
        return self.skip + (1 if self.shared else p) * rows * cols

    def of(self, buffer: np.ndarray, p: int, rows: int, cols: int) -> np.ndarray:
        """The matrices in a flat buffer."""
        steps = [s * buffer.itemsize for s in self.strides(p, rows, cols)]
        return np.lib.stride_tricks.as_strided(buffer[self.skip :], (p, rows, cols), steps)

    def at(self, p: int, rows: int, cols: int) -> Affine:
        """Where the epilogue's element ``[p, m, n]`` is."""
        steps = zip("pmn", self.strides(p, rows, cols), strict=True)
        return index(self.skip, **{name: step for name, step in steps if step})


PLAIN = Lay()


@dataclass(frozen=True)
class Tiling:
    """Block sizes and launch of a dot program."""

    rows: int = 64
    cols: int = 64
    depth: int = 32
    parts: int = 1
    programs: int = 3
    warps: int = 4
    stages: int = 2
    descriptors: bool = False
    tf32: bool = False
    group: int = 2


@dataclass(frozen=True)
class Product:
    """``h = a @ b + bias``, ``y = h * sigmoid(h) + residual``, every op rounded; in the parts asked for.

    With ``act`` both ``h`` and ``y`` are stored; with ``sums`` also those of ``y`` over the rows of each tile.
    """

    name: str
    dtype: DType
    shape: Shape
    a: Lay = PLAIN
    b: Lay = PLAIN
    out: Lay = PLAIN
    residual: Lay | None = None
    bias: bool = False
    act: bool = False
    sums: bool = False

    def case(self, tiling: Tiling) -> Case:
        program = self.program(tiling)
        inputs, expected = self._arrays(program)
        tolerance = 0.0 if self.act else EXACT
        return Case(self.name, program, inputs, expected, tolerance)  # type: ignore[arg-type]

    def program(self, tiling: Tiling) -> DotProgram:
        p, m, n, k = self.shape
        build, dtype = Block(), self.dtype
        params = [param("a", dtype, (self.a.size(p, m, k),)), param("b", dtype, (self.b.size(p, k, n),))]
        build.note("src[block.py:7]: h = x @ w + b")
        build.items.append(Convert("product", PRODUCT, TILE, F32, F32, dtype if dtype is not F32 else None))
        last = "product"
        if self.bias:
            params.append(param("bias", dtype, (p, n)))
            build.load("bias_x", "bias", index(p=n, n=1), COL, dtype)
            last = self._op(build, "h", "add", last, "bias_x")
        if self.act:
            params.append(param("hidden", dtype, (p, m, n), written=True))
            build.store("hidden", index(p=m * n, m=n, n=1), last, TILE, dtype)
            gate = self._op(build, "gate", "sigmoid", last)
            last = self._op(build, "active", "mul", last, gate)
        if self.residual is not None:
            params.append(param("residual", dtype, (self.residual.size(p, m, n),)))
            build.load("residual_x", "residual", self.residual.at(p, m, n), TILE, dtype)
            last = self._op(build, "y", "add", last, "residual_x")
        params.append(param("y", dtype, (self.out.size(p, m, n),), written=True))
        build.store("y", self.out.at(p, m, n), last, TILE, dtype)
        if self.sums:
            chunks = -(-m // tiling.rows)
            params.append(param("sums", F32, (p, chunks, n), written=True))
            at = index(p=chunks * n, chunk=n, n=1) if chunks > 1 else index(p=n, n=1)
            build.items.append(ColReduce("acc_sums", last, TILE, "sum", F32, "sums", at, F32))
        phase = Phase(
            "epilogue", (Axis("p", p),), (Axis("m", m),), (Axis("n", n),), tiling.rows, tiling.rows, build.done(),
            (tiling.cols // tiling.parts,), col_grid=True,
        )  # fmt: skip
        return DotProgram(
            self.name, ("h = a @ b and what follows.",), tuple(params),
            Matrices("a", self.a.strides(p, m, k), self.a.skip), Matrices("b", self.b.strides(p, k, n), self.b.skip),
            k, tiling.depth, tiling.parts, phase, tiling.programs, tiling.warps, tiling.stages, group=tiling.group,
            tf32=tiling.tf32, descriptors=tiling.descriptors,
        )  # fmt: skip

    def _op(self, build: Block, dst: str, fn: str, *args: str) -> str:
        build.map(dst, fn, *args)
        if self.dtype is F32:
            return dst
        build.items.append(Convert(f"{dst}_r", dst, TILE, F32, F32, self.dtype))
        return f"{dst}_r"

    def _arrays(self, program: DotProgram) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Inputs, and expected outputs by the reference's rounding after every op."""
        p, m, n, k = self.shape
        inputs = {x.name: normal(self.name + x.name, x.shape, x.dtype) for x in program.params if not x.written}
        # Whole numbers and eighths: their sums of products are exact in fp32, in any order. Triton may start the sum
        # of an fp32 product at the residual.
        for name in ("a", "b", *(["residual"] if self.residual is not None and self.dtype is F32 else [])):
            whole = rng(self.name + name).integers(-3, 4, inputs[name].shape) / (1 if name == "a" else 8)
            inputs[name] = whole.astype(NP[self.dtype])

        def op(x: np.ndarray) -> np.ndarray:
            return wide(x.astype(np.float32).astype(NP[self.dtype]))

        h = op(wide(self.a.of(inputs["a"], p, m, k)) @ wide(self.b.of(inputs["b"], p, k, n)))
        h = op(h + wide(inputs["bias"])[:, None, :]) if self.bias else h
        y = op(h * op(1 / (1 + np.exp(-h)))) if self.act else h
        y = op(y + wide(self.residual.of(inputs["residual"], p, m, n))) if self.residual is not None else y
        buffer = garbage(program.param("y"))
        self.out.of(buffer, p, m, n)[...] = y.astype(np.float32).astype(NP[self.dtype])
        rows = program.epilogue.row_tile
        sums = np.stack([y[:, at : at + rows].sum(1) for at in range(0, m, rows)], axis=1)
        return inputs, {"y": buffer, **({"hidden": h} if self.act else {}), **({"sums": sums} if self.sums else {})}


def products(dtype: DType) -> Iterator[tuple[Product, Tiling]]:
    """Every layout that the six products of a token-mixing block have, odd sizes, and all kinds of epilogues."""
    t = dtype.value
    strided, turned = Lay("rpc"), Lay("pcr")  # [rows, P, cols] as activations lie; transposed matrices
    yield Product(f"dot_plain_{t}", dtype, (1, 64, 64, 32)), Tiling()
    yield Product(f"dot_batch_{t}", dtype, (3, 96, 80, 48), a=strided, out=strided), Tiling()
    yield Product(f"dot_turned_{t}", dtype, (2, 64, 128, 64), a=turned, b=turned), Tiling(cols=128, parts=2)
    yield Product(f"dot_weight_grad_{t}", dtype, (2, 48, 64, 80), a=Lay("cpr"), b=strided), Tiling(depth=16)
    yield Product(f"dot_odd_{t}", dtype, (2, 37, 61, 29), residual=PLAIN, bias=True), Tiling(32, 64, 16, 2)
    yield Product(f"dot_shared_{t}", dtype, (3, 40, 24, 40), b=Lay(shared=True), bias=True), Tiling(16, 32, 16)
    yield Product(f"dot_skip_{t}", dtype, (2, 64, 64, 32), a=Lay(skip=8), residual=Lay("prc", skip=16)), Tiling()
    residual = Product(
        f"dot_residual_{t}", dtype, (3, 200, 136, 72), a=strided, residual=strided, bias=True, out=strided
    )
    yield residual, Tiling(64, 128, 32, 2, warps=8)
    yield Product(f"dot_act_{t}", dtype, (2, 150, 130, 64), a=strided, act=True, bias=True), Tiling(64, 128, 64, 4)
    yield Product(f"dot_out_turned_{t}", dtype, (2, 96, 64, 64), out=turned, residual=turned), Tiling(parts=2)
    yield Product(f"dot_narrow_{t}", dtype, (5, 1, 17, 33), act=True), Tiling(16, 32, 16, 2)
    summed = Product(f"dot_sums_{t}", dtype, (2, 200, 136, 72), a=strided, out=strided, act=True, bias=True, sums=True)
    yield summed, Tiling(64, 128, 32, 2, warps=8)
    yield Product(f"dot_sums_odd_{t}", dtype, (3, 37, 61, 29), sums=True), Tiling(16, 64, 16)
    yield Product(f"dot_sums_whole_{t}", dtype, (2, 48, 64, 32), sums=True), Tiling(64, 64, 32)


def dot_cases(dtype: DType, descriptors: bool = False) -> list[Case]:
    """All of them, as cases."""
    every = (*products(dtype), *parts(dtype))
    return [product.case(replace(tiling, descriptors=descriptors)) for product, tiling in every]


def production_cases() -> list[Case]:
    """The six products of a RankMixer step at its production size (B, T, D, k = 1024, 64, 1280, 2), to be compiled."""
    rows, flipped, turned = Lay("rpc"), Lay("cpr"), Lay("pcr")  # [B, T, D] activations, their transposes, weights'
    t, b, d, h = 64, 1024, 1280, 2560
    found = [
        Product("fwd1", DType.BF16, (t, b, 2 * h, d), a=rows, out=rows, bias=True),
        Product("fwd2", DType.BF16, (t, b, d, h), a=rows, out=rows, residual=rows, bias=True),
        Product("act", DType.BF16, (t, b, h, d), a=rows, out=rows, act=True, bias=True),
        Product("dh", DType.BF16, (t, b, h, d), a=rows, b=turned, out=rows),
        Product("dz", DType.BF16, (t, b, h, d), a=rows, b=turned, out=rows, residual=rows, act=True, sums=True),
        Product("dx", DType.BF16, (t, b, d, 2 * h), a=rows, b=turned, out=rows, residual=rows),
        Product("dwout", DType.BF16, (t, h, d, b), a=flipped, b=rows),
        Product("dw1", DType.BF16, (t, d, 2 * h, b), a=flipped, b=rows),
    ]
    tiling = Tiling(128, 256, 64, 2, programs=132, warps=8, stages=3, descriptors=True, group=8)
    narrow = Parts("split", DType.BF16, (1, 256, 512, 65536), a=Lay("cpr"), splits=32)
    tilings = {"dz": replace(tiling, parts=4)}  # what holds many values at a time is cut finer
    return [
        Case(f"production_{p.name}", p.program(tilings.get(p.name, tiling)), {}, {})  # type: ignore[arg-type]
        for p in (*found, narrow)
    ]


@dataclass(frozen=True)
class Parts(Product):
    """``part[s] = a[:, part s of K] @ b[part s of K, :]`` in fp32."""

    splits: int = 2

    def program(self, tiling: Tiling) -> DotProgram:
        p, m, n, k = self.shape
        inputs = (param("a", self.dtype, (self.a.size(p, m, k),)), param("b", self.dtype, (self.b.size(p, k, n),)))
        build = Block()
        build.store("y", index(s=p * m * n, p=m * n, m=n, n=1), PRODUCT, TILE, F32)
        phase = Phase(
            "epilogue", (Axis("s", self.splits), Axis("p", p)), (Axis("m", m),), (Axis("n", n),), tiling.rows,
            tiling.rows, build.done(), (tiling.cols // tiling.parts,), col_grid=True,
        )  # fmt: skip
        return DotProgram(
            self.name, ("Sums over parts of K.",), (*inputs, param("y", F32, (self.splits, p, m, n), written=True)),
            Matrices("a", self.a.strides(p, m, k), self.a.skip), Matrices("b", self.b.strides(p, k, n), self.b.skip),
            k, tiling.depth, tiling.parts, phase, tiling.programs, tiling.warps, tiling.stages, group=tiling.group,
            descriptors=tiling.descriptors, splits=self.splits,
        )  # fmt: skip

    def _arrays(self, program: DotProgram) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        p, m, n, k = self.shape
        inputs = {x.name: np.zeros(x.shape, NP[self.dtype]) for x in program.params if not x.written}
        for name in ("a", "b"):
            whole = rng(self.name + name).integers(-3, 4, inputs[name].shape) / (8 if name == "b" else 1)
            inputs[name] = whole.astype(NP[self.dtype])
        a, b = wide(self.a.of(inputs["a"], p, m, k)), wide(self.b.of(inputs["b"], p, k, n))
        cuts = [slice(at, at + program.span) for at in range(0, k, program.span)]
        return inputs, {"y": np.stack([a[..., cut] @ b[:, cut] for cut in cuts])}


def parts(dtype: DType) -> Iterator[tuple[Product, Tiling]]:
    """Products in parts of K: weight gradients, one and several, with a last part that is whole or not."""
    t, strided = dtype.value, Lay("rpc")
    yield Parts(f"dot_parts_{t}", dtype, (3, 48, 64, 320), a=Lay("cpr"), b=strided, splits=5), Tiling(depth=32)
    yield Parts(f"dot_parts_odd_{t}", dtype, (2, 37, 61, 299), splits=3), Tiling(32, 64, 16, 2)
    yield Parts(f"dot_parts_one_{t}", dtype, (1, 64, 64, 200), a=Lay("cpr"), splits=4), Tiling(64, 64, 32)
