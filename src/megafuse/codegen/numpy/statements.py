"""One writer per statement kind of the tile program, in NumPy: whole rows, exact columns, no masks but the guards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megafuse.codegen.affine import needed, runs
from megafuse.codegen.names import Namer
from megafuse.codegen.numpy.ops import BARE_LITERALS, template
from megafuse.codegen.program import (
    Affine,
    Axis,
    ColReduce,
    Compute,
    Convert,
    Guard,
    Index,
    Inside,
    Load,
    Operand,
    Phase,
    RowReduce,
    Statement,
    Store,
    Within,
)
from megafuse.codegen.walk import axis_sizes, has_cols
from megafuse.codegen.writer import Writer, join_tests
from megafuse.core.dtypes import DType
from megafuse.core.sizes import is_open

TYPES = {
    DType.F64: "np.float64",
    DType.F32: "np.float32",
    DType.BF16: "ml_dtypes.bfloat16",
    DType.F16: "np.float16",
    DType.I64: "np.int64",
    DType.I32: "np.int32",
    DType.I16: "np.int16",
    DType.I8: "np.int8",
    DType.U8: "np.uint8",
    DType.BOOL: "np.bool_",
}


@dataclass(frozen=True)
class Value:
    """A value's variable, its type, and whether its array really has all rows and all columns."""

    name: str
    dtype: DType
    rows: bool
    cols: bool


class Body:
    """Writes the statements of one phase. ``axes`` are the row axes (fixed ones too where these are vectorised)."""

    def __init__(self, writer: Writer, phase: Phase, namer: Namer, fixed: Sequence[Axis], rows: Sequence[Axis]) -> None:
        self.writer, self.phase, self.namer = writer, phase, namer
        self.spaces = (("fixed", tuple(fixed)), ("row", tuple(rows)), ("col", phase.cols))
        self.dtypes: dict[str, DType] = {}
        self.buffers: dict[str, str] = {}
        self.values: dict[str, Value] = {}

    def define(self, dst: str, dtype: DType, rows: bool, cols: bool) -> str:
        """Name a new value's variable; a value defined again (in a later pass) keeps its name."""
        name = self.values[dst].name if dst in self.values else self.namer.one(dst)
        self.values[dst] = Value(name, dtype, rows, cols)
        return name

    def index(self, affine: Affine) -> str:
        """Text of an index expression, made from the flattened indices ``fixed``, ``row`` and ``col``."""
        terms = []
        for flat, axes in self.spaces:
            for run in runs(affine, axes):
                text = f"{flat} // {run.below}" if run.below != 1 else flat
                text = f"{text} % {run.size}" if run.first else text
                terms.append(text if run.stride == 1 else f"{_group(text)} * {run.stride}")
        chunk = sum(stride for name, stride in affine.terms if name == "chunk") if self.phase.num_chunks != 1 else 0
        terms += [f"chunk * {chunk}" if chunk != 1 else "chunk"] * bool(chunk)
        terms += [str(affine.const)] if affine.const or not terms else []
        return " + ".join(terms).replace("+ -", "- ")

    def spans(self, affines: Sequence[Affine]) -> tuple[bool, bool]:
        """Whether arrays made from these indices have all rows and all columns."""
        rows, cols = self.spaces[1][1], self.spaces[2][1]
        return any(runs(a, rows) for a in affines), any(runs(a, cols) for a in affines)

    def inside(self, guards: Sequence[Guard], more: Sequence[str] = ()) -> str:
        """Text of the guards that can fail and of more tests; empty where none can."""
        tests: list[str] = []
        sizes = axis_sizes(self.phase)
        for guard in guards:
            low, high = needed(guard, sizes)
            const = guard.index.const
            index = self.index(Affine(guard.index.terms))
            tests += [f"{index} >= {guard.lo - const}"] * low + [f"{index} < {guard.hi - const}"] * high
        return join_tests([*tests, *more])

    def full(self, name: str, rows: bool, cols: bool) -> str:
        """A value broadcast to all rows and/or all columns where it lacks them."""
        value = self.values[name]
        if (value.rows or not rows) and (value.cols or not cols):
            return value.name
        shape = f"({'len(row)' if rows or value.rows else 1}, {self.phase.num_cols if cols or value.cols else 1})"
        return f"np.broadcast_to({value.name}, {shape})"

    def write(self, statement: Statement) -> None:
        """Write one statement."""
        _WRITERS[type(statement)](self, statement)


def _group(text: str) -> str:
    return text if text.isidentifier() else f"({text})"


def number(value: float | int | bool, dtype: DType) -> str:
    """Python text of a literal."""
    if is_open(value):
        return str(value)
    if not dtype.is_float:
        return repr(bool(value)) if dtype is DType.BOOL else repr(int(value))
    if math.isfinite(value):
        return repr(float(value))
    return "np.nan" if math.isnan(value) else "np.inf" if value > 0 else "-np.inf"


def typed(value: float | int | bool, dtype: DType) -> str:
    """A literal of exactly this type."""
    return f"{TYPES[dtype]}({number(value, dtype)})"


def convert(text: str, src: DType, dst: DType) -> str:
    """``text`` of type ``src`` as ``dst``, through fp32 where a 16-bit float meets another type."""
    if src is dst:
        return text
    halves = (DType.BF16, DType.F16)
    if src in halves and dst is not DType.F32:
        text, src = f"{text}.astype(np.float32)", DType.F32
    if dst is DType.BOOL:
        return f"{text} != 0"
    if dst in halves and src is not DType.F32:
        text = f"{text}.astype(np.float32)"
    return f"{text}.astype({TYPES[dst]})"


def _load(body: Body, node: Load) -> None:
    offsets = body.index(node.index)
    inside = body.inside(node.guards, [body.values[lookup.within].name for lookup in node.lookups])
    rows, cols = body.spans([node.index, *(guard.index for guard in node.guards)])
    buffer = body.buffers[node.buffer]
    if node.lookups:
        found = [body.values[lookup.row] for lookup in node.lookups]
        rows, cols = rows or any(v.rows for v in found), cols or any(v.cols for v in found)
        steps = [_step(row, lookup.stride) for row, lookup in zip(found, node.lookups, strict=True)]
        offsets = " + ".join([*steps, *([offsets] if offsets != "0" else [])]).replace("+ -", "- ")
    name = body.define(node.dst, node.dtype, rows, cols)
    if node.parts > 1:
        at = f"np.asarray({offsets})[..., None] + np.arange({node.parts}) * {node.step}"
        body.writer.assign(name, f"{buffer}[{at}].sum(axis=-1, dtype={TYPES[node.dtype]})")
    elif inside:
        body.writer.call(f"{name} = _load(", [buffer, offsets, inside, number(node.other, node.dtype)])
    else:
        body.writer.assign(name, f"{buffer}[{offsets}]")


def _step(row: Value, stride: int) -> str:
    """What an integer that was read adds to an offset."""
    name = row.name if row.dtype is DType.I64 else f"{row.name}.astype(np.int64)"
    return name if stride == 1 else f"{name} * {stride}"


def _index(body: Body, node: Index) -> None:
    rows, cols = body.spans([node.index])
    name = body.define(node.dst, node.dtype, rows, cols)
    body.writer.assign(name, f"np.asarray({body.index(node.index)}, {TYPES[node.dtype]})")


def _inside(body: Body, node: Inside) -> None:
    rows, cols = body.spans([guard.index for guard in node.guards])
    text = body.inside(node.guards) or "np.True_"
    name = body.define(node.dst, DType.BOOL, rows and text != "np.True_", cols and text != "np.True_")
    body.writer.assign(name, text)


def _within(body: Body, node: Within) -> None:
    src = _operand(body, node.src, node.src_dtype, bare=False)
    known = body.values.get(str(node.src))
    name = body.define(node.dst, DType.BOOL, known is not None and known.rows, known is not None and known.cols)
    body.writer.assign(name, f"({src} >= 0) & ({src} < {node.size!r})")


def _operand(body: Body, arg: Operand, dtype: DType, bare: bool) -> str:
    if isinstance(arg, str):
        return body.values[arg].name
    return number(arg, dtype) if bare else typed(arg, dtype)


def _compute(body: Body, node: Compute) -> None:
    known = [body.values[arg] for arg in node.args if isinstance(arg, str)]
    bare = node.fn in BARE_LITERALS and bool(known)
    args = [_operand(body, arg, node.arg_dtype, bare) for arg in node.args]
    if node.fn == "where" and not isinstance(node.args[0], str):
        args[0] = typed(node.args[0], DType.BOOL)
    text = template(node.fn, node.arg_dtype).format(**dict(zip("abc", args, strict=False)), t=TYPES[node.arg_dtype])
    name = body.define(node.dst, node.dtype, any(v.rows for v in known), any(v.cols for v in known))
    body.writer.assign(name, text)


def _convert(body: Body, node: Convert) -> None:
    if isinstance(node.src, str):
        value = body.values[node.src]
        middle = value.name if node.through is None else convert(value.name, value.dtype, node.through)
        text, rows, cols = convert(middle, node.through or value.dtype, node.dtype), value.rows, value.cols
    else:
        text, rows, cols = typed(node.src, node.dtype), False, False
    body.writer.assign(body.define(node.dst, node.dtype, rows, cols), text)


def _reduced(fn: str, text: str, dtype: DType, axis: str) -> str:
    exact = f", dtype={TYPES[dtype]}" if fn in ("sum", "prod") else ""
    return f"np.{fn}({text}, {axis}{exact})"


def _row_reduce(body: Body, node: RowReduce) -> None:
    """Reduce over the columns; one value repeated in every column is multiplied, as the other printers do."""
    value = body.values[node.src]
    if not has_cols(node.src_level) and node.fn == "sum":
        text = f"{value.name} * {number(body.phase.num_cols, node.dtype)}"
    elif not has_cols(node.src_level) and node.fn != "prod":
        text = value.name
    else:
        axis = "axis=1, keepdims=True" if value.rows else "axis=None"
        text = _reduced(node.fn, body.full(node.src, value.rows, True), node.dtype, axis)
    body.writer.assign(body.define(node.dst, node.dtype, value.rows, False), text)


def _col_reduce(body: Body, node: ColReduce) -> None:
    wide = has_cols(node.src_level)
    text = _reduced(
        node.fn, body.full(node.src, True, wide), node.dtype, "axis=0, keepdims=True" if wide else "axis=None"
    )
    name = body.define(node.acc, node.dtype, False, wide)
    body.writer.assign(name, text)
    body.writer.line(
        f"{body.buffers[node.buffer]}[{body.index(node.index)}] = {convert(name, node.dtype, node.store_dtype)}"
    )


def _store(body: Body, node: Store) -> None:
    buffer, dtype = body.buffers[node.buffer], body.dtypes[node.buffer]
    offsets, inside = body.index(node.index), body.inside(node.guards)
    if isinstance(node.src, str):
        value = body.values[node.src]
        text = convert(value.name, value.dtype, dtype)
        if (value.rows or value.cols) and not inside and not any(body.spans([node.index])):
            text = f"np.ravel({text})[0]"
    else:
        text = typed(node.src, dtype)
    if inside:
        body.writer.call("_store(", [buffer, offsets, inside, text])
    else:
        body.writer.line(f"{buffer}[{offsets}] = {text}")


_WRITERS: dict[type, Callable[[Body, Any], None]] = {
    Load: _load,
    Index: _index,
    Inside: _inside,
    Within: _within,
    Compute: _compute,
    Convert: _convert,
    RowReduce: _row_reduce,
    ColReduce: _col_reduce,
    Store: _store,
}
