"""Hand-built tile programs with their inputs and NumPy references, shared by the printers' tests and their workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from codegen_blocks import COL, F32, NP, ROW, SCALAR, TILE, Block, Case, index, normal, param, rng, wide
from codegen_gather import gather_cases
from megafuse.codegen.program import Axis, ColReduce, Guard, Index, Inside, Load, Phase, TileProgram
from megafuse.core.dtypes import DType


def _statistics(b: Block, cols: int) -> None:
    b.note("mean and variance, two passes over the tile")
    b.reduce("sum_x", "sum", "x")
    b.map("mean", "mul", "sum_x", 1 / cols, level=ROW)
    b.map("diff", "sub", "x", "mean")
    b.map("square", "mul", "diff", "diff")
    b.reduce("sum_sq", "sum", "square")
    b.map("var", "mul", "sum_sq", 1 / cols, level=ROW)
    b.map("var_eps", "add", "var", 1e-5, level=ROW)
    b.map("rstd", "rsqrt", "var_eps", level=ROW)


def layer_norm(dtype: DType, rows: int, cols: int, pieces: tuple[int, ...], tile: int, chunk: int) -> Case:
    """``y = (x - mean) * rstd * gamma + beta`` over the columns; statistics stored in fp32."""
    at = index(r=cols, c=1)
    b = Block()
    b.note("src[block.py:31]: y = norm(x)")
    b.load("x", "x", at, TILE, dtype, reread=True)
    _statistics(b, cols)
    b.load("gamma", "gamma", index(c=1), COL, dtype)
    b.load("beta", "beta", index(c=1), COL, dtype)
    b.map("x_hat", "mul", "diff", "rstd")
    b.map("scaled", "mul", "x_hat", "gamma")
    b.map("y", "add", "scaled", "beta")
    b.note("store")
    b.store("y", at, "y", TILE, dtype)
    b.store("mean", index(r=1), "mean", ROW, F32)
    b.store("rstd", index(r=1), "rstd", ROW, F32)
    phase = Phase("normalise", (), (Axis("r", rows),), (Axis("c", cols),), tile, chunk, b.done(), pieces)
    params = (
        param("x", dtype, (rows, cols)),
        param("gamma", dtype, (cols,)),
        param("beta", dtype, (cols,)),
        param("y", dtype, (rows, cols), True),
        param("mean", F32, (rows,), True),
        param("rstd", F32, (rows,), True),
    )
    x, gamma, beta = (normal(n, p.shape, dtype) for n, p in zip(("x", "gamma", "beta"), params, strict=False))
    mean = wide(x).mean(1, keepdims=True)
    rstd = 1 / np.sqrt(wide(x).var(1, keepdims=True) + 1e-5)
    y = (wide(x) - mean) * rstd * wide(gamma) + wide(beta)
    doc = ("Layer norm over the columns.", "y = (x - mean) * rstd * gamma + beta")
    name = f"layer_norm_{dtype.value}_{cols}"
    program = TileProgram(name, doc, params, (phase,), 4)
    return Case(name, program, {"x": x, "gamma": gamma, "beta": beta}, {"y": y, "mean": mean, "rstd": rstd})


def layer_norm_backward(
    dtype: DType, rows: int, cols: int, pieces: tuple[int, ...], tile: int, chunk: int, stages: int = 1
) -> Case:
    """dx, and per-chunk partial sums of dgamma and dbeta."""
    at = index(r=cols, c=1)
    b = Block()
    b.note("src[block.py:31]: y = norm(x)")
    b.load("x", "x", at, TILE, dtype)
    b.load("dy", "dy", at, TILE, dtype)
    b.load("mean", "mean", index(r=1), ROW, F32)
    b.load("rstd", "rstd", index(r=1), ROW, F32)
    b.load("gamma", "gamma", index(c=1), COL, dtype)
    b.map("diff", "sub", "x", "mean")
    b.map("x_hat", "mul", "diff", "rstd")
    b.map("g", "mul", "dy", "gamma")
    b.map("g_x_hat", "mul", "g", "x_hat")
    b.reduce("sum_g", "sum", "g")
    b.reduce("sum_gx", "sum", "g_x_hat")
    b.map("mean_g", "mul", "sum_g", 1 / cols, level=ROW)
    b.map("mean_gx", "mul", "sum_gx", 1 / cols, level=ROW)
    b.map("part", "mul", "x_hat", "mean_gx")
    b.map("rest", "sub", "g", "mean_g")
    b.map("inner", "sub", "rest", "part")
    b.map("dx", "mul", "inner", "rstd")
    b.store("dx", at, "dx", TILE, dtype)
    b.note("partial sums for dgamma and dbeta")
    b.map("dy_x_hat", "mul", "dy", "x_hat")
    partial = index(chunk=cols, c=1)
    b.items.append(ColReduce("dgamma_acc", "dy_x_hat", TILE, "sum", F32, "dgamma", partial, F32))
    b.items.append(ColReduce("dbeta_acc", "dy", TILE, "sum", F32, "dbeta", partial, F32))
    b.items.append(ColReduce("peak_acc", "rstd", ROW, "max", F32, "peak", index(chunk=1), F32))
    phase = Phase("backward", (), (Axis("r", rows),), (Axis("c", cols),), tile, chunk, b.done(), pieces)
    chunks = phase.num_chunks
    params = (
        param("x", dtype, (rows, cols)),
        param("dy", dtype, (rows, cols)),
        param("mean", F32, (rows,)),
        param("rstd", F32, (rows,)),
        param("gamma", dtype, (cols,)),
        param("dx", dtype, (rows, cols), True),
        param("dgamma", F32, (chunks, cols), True),
        param("dbeta", F32, (chunks, cols), True),
        param("peak", F32, (chunks,), True),
    )
    x, dy, gamma = normal("x", (rows, cols), dtype), normal("dy", (rows, cols), dtype), normal("g", (cols,), dtype)
    mean = wide(x).mean(1, keepdims=True)
    rstd = 1 / np.sqrt(wide(x).var(1, keepdims=True) + 1e-5)
    x_hat, g = (wide(x) - mean) * rstd, wide(dy) * wide(gamma)
    dx = rstd * (g - g.mean(1, keepdims=True) - x_hat * (g * x_hat).mean(1, keepdims=True))
    spans = [slice(i * chunk, (i + 1) * chunk) for i in range(chunks)]
    expected = {
        "dx": dx,
        "dgamma": np.stack([(wide(dy) * x_hat)[s].sum(0) for s in spans]),
        "dbeta": np.stack([wide(dy)[s].sum(0) for s in spans]),
        "peak": np.stack([rstd[s].max() for s in spans]),
    }
    name = f"layer_norm_backward_{dtype.value}_{cols}_{tile}"
    program = TileProgram(name, ("Backward of layer norm over the columns.",), params, (phase,), 8, stages)
    inputs = {"x": x, "dy": dy, "mean": mean.astype(np.float32), "rstd": rstd.astype(np.float32), "gamma": gamma}
    return Case(name, program, inputs, expected)


def mixing(dtype: DType, batch: int, tokens: int, heads: int, width: int, padded: tuple[int, int]) -> Case:
    """Per sample: statistics of every token, then the normalised heads gathered: ``y[b,h,(t,j)] = n[b,t,(h,j)]``."""
    dim = heads * width
    b = Block()
    b.load("x", "x", index(b=tokens * dim, t=dim, c=1), TILE, dtype, reread=True)
    _statistics(b, dim)
    b.store("mean", index(b=tokens, t=1), "mean", ROW, F32)
    b.store("rstd", index(b=tokens, t=1), "rstd", ROW, F32)
    fixed = (Axis("b", batch),)
    first = Phase(
        "statistics", fixed, (Axis("t", tokens),), (Axis("c", dim),), 2, tokens + tokens % 2, b.done(), (padded[0],)
    )
    g = Block()
    g.note("src[block.py:40]: mixed = mix(norm(x))")
    g.load("x", "x", index(b=tokens * dim, t=dim, h=width, j=1), TILE, dtype)
    g.load("mean", "mean", index(b=tokens, t=1), COL, F32)
    g.load("rstd", "rstd", index(b=tokens, t=1), COL, F32)
    g.load("gamma", "gamma", index(h=width, j=1), TILE, dtype)
    g.map("diff", "sub", "x", "mean")
    g.map("x_hat", "mul", "diff", "rstd")
    g.map("y", "mul", "x_hat", "gamma")
    g.store("y", index(b=tokens * dim, h=tokens * width, t=width, j=1), "y", TILE, dtype)
    cols = (Axis("t", tokens), Axis("j", width))
    second = Phase("gather", fixed, (Axis("h", heads),), cols, 1, heads, g.done(), (padded[1],))
    params = (
        param("x", dtype, (batch, tokens, dim)),
        param("gamma", dtype, (dim,)),
        param("mean", F32, (batch, tokens), True),
        param("rstd", F32, (batch, tokens), True),
        param("y", dtype, (batch, heads, tokens * width), True),
    )
    x, gamma = normal("x", (batch, tokens, dim), dtype), normal("gamma", (dim,), dtype)
    mean = wide(x).mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(wide(x).var(-1, keepdims=True) + 1e-5)
    normed = ((wide(x) - mean) * rstd * wide(gamma)).reshape(batch, tokens, heads, width)
    y = normed.transpose(0, 2, 1, 3)
    name = f"mixing_{dtype.value}_{dim}"
    doc = ("Layer norm of tokens, then head mixing within a sample.",)
    program = TileProgram(name, doc, params, (first, second), 4)
    return Case(name, program, {"x": x, "gamma": gamma}, {"y": y, "mean": mean, "rstd": rstd})


def softmax(dtype: DType, rows: int, cols: int, width: int, tile: int, block: int = 0) -> Case:
    """Softmax over the columns; with ``block``, in three walks over column blocks."""
    at = index(r=cols, c=1)
    passes = []
    b = Block()

    def cut() -> None:
        nonlocal b
        if block:
            passes.append(b.done()[0])
            b = Block()
            b.load("x", "x", at, TILE, dtype)

    b.load("x", "x", at, TILE, dtype)
    b.reduce("peak", "max", "x")
    cut()
    b.map("shifted", "sub", "x", "peak")
    b.map("e", "exp", "shifted")
    b.reduce("total", "sum", "e")
    b.map("scale", "recip", "total", level=ROW)
    if block:
        cut()
        b.map("shifted", "sub", "x", "peak")
        b.map("e", "exp", "shifted")
    b.map("y", "mul", "e", "scale")
    b.store("y", at, "y", TILE, dtype)
    passes.append(b.done()[0])
    axes = ((), (Axis("r", rows),), (Axis("c", cols),))
    chunk = 2 * tile if block else tile
    phase = Phase("softmax", *axes, tile, chunk, tuple(passes), (block or width,), col_block=block)
    params = (param("x", dtype, (rows, cols)), param("y", dtype, (rows, cols), True))
    x = normal("x", (rows, cols), dtype)
    x[1, 2] = np.nan
    x[2, :3] = -np.inf
    e = np.exp(wide(x) - wide(x).max(1, keepdims=True))
    name = f"softmax_{dtype.value}_{cols}" + ("_looped" if block else "")
    program = TileProgram(name, ("Softmax over the columns.",), params, (phase,), 4)
    return Case(name, program, {"x": x}, {"y": e / e.sum(1, keepdims=True)})


def gelu_grid(dtype: DType, rows: int, cols: int) -> Case:
    """Elementwise tanh GELU, columns over the second grid axis."""
    at = index(r=cols, c=1)
    b = Block()
    b.load("x", "x", at, TILE, dtype)
    b.map("x2", "mul", "x", "x")
    b.map("x3", "mul", "x2", "x")
    b.map("cubic", "mul", "x3", 0.044715)
    b.map("poly", "add", "x", "cubic")
    b.map("arg", "mul", "poly", 0.7978845608028654)
    b.map("t", "tanh", "arg")
    b.map("t1", "add", "t", 1.0)
    b.map("half", "mul", "x", 0.5)
    b.map("y", "mul", "half", "t1")
    b.store("y", at, "y", TILE, dtype)
    axes = ((), (Axis("r", rows),), (Axis("c", cols),))
    phase = Phase("gelu", *axes, 2, 2, b.done(), (64,), col_grid=True)
    x = normal("x", (rows, cols), dtype)
    w = wide(x)
    y = 0.5 * w * (1 + np.tanh(0.7978845608028654 * (w + 0.044715 * w**3)))
    name = f"gelu_{dtype.value}_{cols}"
    params = (param("x", dtype, (rows, cols)), param("y", dtype, (rows, cols), True))
    return Case(name, TileProgram(name, ("Tanh GELU.",), params, (phase,), 1), {"x": x}, {"y": y})


def concat_pad(dtype: DType) -> Case:
    """``cat([a, b], 1)``, a row shift with zero padding, an iota and a bool mask in and out."""
    rows, left, right = 6, 5, 8
    cols = left + right
    b = Block()
    in_a = Guard(index(c=1), 0, left)
    in_b = Guard(index(c=1), left, cols)
    b.load("a", "a", index(r=left, c=1), TILE, dtype, guards=(in_a,))
    b.load("b", "b", index(-left, r=right, c=1), TILE, dtype, guards=(in_b,))
    b.items.append(Inside("is_a", (in_a,), COL))
    b.map("both", "where", "is_a", "a", "b")
    b.store("cat", index(r=cols, c=1), "both", TILE, dtype)
    shifted = (Guard(index(-1, r=1), 0, rows), in_a)
    b.load("up", "a", index(-left, r=left, c=1), TILE, dtype, guards=shifted, other=-1.0)
    b.store("up", index(r=cols, c=1), "up", TILE, dtype)
    b.store("b_copy", index(-left, r=right, c=1), "b", TILE, dtype, guards=(in_b,))
    b.items.append(Index("n", index(3, r=cols, c=1), TILE, DType.I64))
    b.load("keep", "keep", index(r=1), ROW, DType.BOOL)
    b.map("odd", "and", "n", 1, arg=DType.I64, out=DType.I64)
    b.map("is_odd", "eq", "odd", 1, arg=DType.I64, out=DType.BOOL)
    b.map("flag", "and", "is_odd", "keep", arg=DType.BOOL, out=DType.BOOL)
    b.map("number", "where", "flag", "n", -1, arg=DType.I64, out=DType.I64)
    b.store("number", index(r=cols, c=1), "number", TILE, DType.I64)
    b.store("flag", index(r=cols, c=1), "flag", TILE, DType.BOOL)
    phase = Phase("concat", (), (Axis("r", rows),), (Axis("c", cols),), 4, 4, b.done(), (16,))
    outs = [("cat", dtype), ("up", dtype), ("number", DType.I64), ("flag", DType.BOOL)]
    params = (
        param("a", dtype, (rows, left)),
        param("b", dtype, (rows, right)),
        param("keep", DType.BOOL, (rows,)),
        *(param(n, d, (rows, cols), True) for n, d in outs),
        param("b_copy", dtype, (rows, right), True),
    )
    a, bb = normal("a", (rows, left), dtype), normal("b", (rows, right), dtype)
    keep = np.arange(rows) % 3 != 1
    up = np.full((rows, cols), -1.0)
    up[1:, :left] = wide(a)[:-1]
    n = np.arange(rows * cols).reshape(rows, cols) + 3
    flag = (n % 2 == 1) & keep[:, None]
    expected = {
        "cat": np.concatenate([wide(a), wide(bb)], 1),
        "up": up,
        "number": np.where(flag, n, -1),
        "flag": flag,
        "b_copy": wide(bb),
    }
    name = f"concat_pad_{dtype.value}"
    program = TileProgram(name, ("Concat, shift, iota, bools.",), params, (phase,), 1)
    return Case(name, program, {"a": a, "b": bb, "keep": keep}, expected)


def concat_parts(dtype: DType) -> Case:
    """``cat([a, b, c], 1)`` written as one row: the part is found by remainders of the column."""
    rows, part = 7, 63
    names = ("a", "b", "c")
    b = Block()
    for at, name in enumerate(names):
        inside = (Guard(index(c=1), at * part, (at + 1) * part),)
        b.load(name, name, index(-at * part, q=part, c=1), TILE, dtype, guards=inside)
        b.items.append(Inside(f"is_{name}", inside, COL))
    b.map("bc", "where", "is_b", "b", "c")
    b.map("abc", "where", "is_a", "a", "bc")
    b.store("cat", index(q=3 * part, c=1), "abc", TILE, dtype)
    phase = Phase("concat", (), (), (Axis("q", rows), Axis("c", 3 * part)), 1, 1, b.done(), (2048,))
    inputs = {name: normal(name, (rows, part), dtype) for name in names}
    params = (*(param(n, dtype, (rows, part)) for n in names), param("cat", dtype, (rows, 3 * part), True))
    name = f"concat_parts_{dtype.value}"
    program = TileProgram(name, ("Concat of three parts.",), params, (phase,), 2)
    return Case(name, program, inputs, {"cat": np.concatenate([wide(i) for i in inputs.values()], 1)})


def reductions(dtype: DType, fixed: int, looped: bool, inner: int = 3) -> Case:
    """Every reduction, along rows and columns, from every level; two fixed axes and two loop axes, 64-bit offsets."""
    rows, cols, tile = 6, 11, 4
    at = index(f=2 * rows * cols, g=rows * cols, p=inner * cols, q=cols, c=1)
    b = Block()
    b.items.append(Load("x", "x", at, TILE, dtype))
    b.items.append(Load("v", "v", index(c=1), COL, dtype))
    b.items.append(Load("s", "s", index(f=1), SCALAR, dtype))
    outs: list[tuple[str, tuple[int, ...], np.ndarray]] = []
    x = _reduction_input(dtype, (fixed, 2, rows, cols))
    v, s = _reduction_input(dtype, (cols,)), _reduction_input(dtype, (fixed,))
    chunk = tile if not looped else 2 * tile
    spans = [slice(i, i + chunk) for i in range(0, rows, chunk)]
    place = {"f": 2 * len(spans), "g": len(spans), "chunk": 1}
    fns: dict[str, Callable[..., np.ndarray]] = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}
    for fn, np_fn in fns.items():
        if dtype is DType.BOOL and fn == "sum":
            continue
        b.reduce(f"x_{fn}", fn, "x", TILE, dtype)
        b.store(f"row_{fn}", index(f=2 * rows, g=rows, p=inner, q=1), f"x_{fn}", ROW, dtype)
        outs.append((f"row_{fn}", (fixed, 2, rows), np_fn(x, axis=-1)))
        b.reduce(f"v_{fn}", fn, "v", COL, dtype)
        b.store(f"vec_{fn}", index(), f"v_{fn}", SCALAR, dtype)
        outs.append((f"vec_{fn}", (1,), np_fn(v).reshape(1)))
        b.reduce(f"s_{fn}", fn, "s", SCALAR, dtype)
        b.store(f"one_{fn}", index(f=1), f"s_{fn}", SCALAR, dtype)
        outs.append((f"one_{fn}", (fixed,), np_fn(np.repeat(s[:, None], cols, 1), axis=1)))
        cells = index(**{k: n * cols for k, n in place.items()}, c=1)
        b.items.append(ColReduce(f"c_{fn}", "x", TILE, fn, dtype, f"col_{fn}", cells, dtype))
        parts = [np_fn(x[:, :, span], axis=2) for span in spans]
        outs.append((f"col_{fn}", (fixed, 2, len(spans), cols), np.stack(parts, 2)))
        b.items.append(ColReduce(f"r_{fn}", f"x_{fn}", ROW, fn, dtype, f"all_{fn}", index(**place), dtype))
        parts = [np_fn(np_fn(x[:, :, span], axis=3), axis=2) for span in spans]
        outs.append((f"all_{fn}", (fixed, 2, len(spans)), np.stack(parts, 2)))
    axes = ((Axis("f", fixed), Axis("g", 2)), (Axis("p", rows // inner), Axis("q", inner)), (Axis("c", cols),))
    phase = Phase("reduce", *axes, tile, chunk, b.done(), (8, 4))
    params = (
        param("x", dtype, x.shape, wide=True),
        param("v", dtype, v.shape),
        param("s", dtype, s.shape),
        *(param(name, dtype, shape, True) for name, shape, _ in outs),
    )
    name = f"reductions_{dtype.value}" + ("_looped" if looped else "")
    program = TileProgram(name, ("Reductions.",), params, (phase,), 1, 2 if looped else 1)
    return Case(name, program, {"x": x, "v": v, "s": s}, {n: value for n, _, value in outs}, 1e-4)


def _reduction_input(dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    if dtype is DType.BOOL:
        return rng(str(shape)).random(shape) < 0.6
    if not dtype.is_float:
        return rng(str(shape)).integers(-3, 4, shape).astype(NP[dtype])
    x = rng(str(shape)).uniform(0.5, 1.5, shape) * rng("sign").choice([-1, 1], shape)
    if x.ndim == 4:
        x[0, 1, 2, 3] = np.nan
    return x.astype(NP[dtype])


def cases(dtype: DType, narrow: bool = False) -> list[Case]:
    """The programs on one 16- or 32-bit float type; ``narrow``: with less columns, for Triton's slow interpreter."""
    whole, odd, pieces = (80, 75, (64, 16)) if narrow else (1280, 1197, (1024, 256))
    return [
        layer_norm(dtype, 7, whole, pieces, 2, 4),
        layer_norm(dtype, 9, 20, (32,), 4, 4),
        layer_norm(dtype, 5, odd, pieces, 1, 5),
        layer_norm_backward(dtype, 11, whole, pieces, 1, 3),
        layer_norm_backward(dtype, 11, 20, (16, 4), 2, 4),
        layer_norm_backward(dtype, 13, odd, pieces, 4, 8, stages=2),
        mixing(dtype, 3, 4, 2, 8, (16, 32)),
        mixing(dtype, 2, 3, 4, 5, (32, 16)),
        softmax(dtype, 7, 37, 64, 4),
        softmax(dtype, 7, 150, 0, 2, block=64),
        gelu_grid(dtype, 5, 150),
        concat_pad(dtype),
        concat_parts(dtype),
        *gather_cases(dtype),
    ]


def other_cases() -> list[Case]:
    """Programs on the other types."""
    kinds = ((DType.F32, False), (DType.F32, True), (DType.F64, True), (DType.I64, False), (DType.BOOL, False))
    made = [reductions(dtype, 2, looped) for dtype, looped in kinds]
    return [*made, *map(last_first, (layer_norm_backward(DType.F32, 11, 20, (16, 4), 2, 4), made[1]))]


def last_first(case: Case) -> Case:
    """``case`` with programs that start with the last rows."""
    name = f"{case.name}_last_first"
    return replace(case, name=name, program=replace(case.program, name=name, last_first=True))
