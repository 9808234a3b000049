"""One writer per statement kind of the tile program, but for the reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megafuse.codegen.names import Namer
from megafuse.codegen.program import (
    Compute,
    Convert,
    Index,
    Inside,
    Level,
    Load,
    Operand,
    Statement,
    Store,
    Within,
)
from megafuse.codegen.triton.frame import Frame, buffer_name, join_sum
from megafuse.codegen.triton.ops import CASTS_LITERALS, bound, template
from megafuse.codegen.triton.values import HALVES, TYPES, Value, convert, literal, plain_literal
from megafuse.codegen.walk import has_cols, has_rows, join_levels
from megafuse.codegen.writer import Writer, join_tests
from megafuse.core.dtypes import DType


class Body:
    """Writes the statements of one phase and knows its values.

    ``pairs``: conversions from and to 16-bit types are written for two elements at a time. The compiler finds pairs by
    itself where a rounded value is only stored, but not where it is widened at once.
    """

    def __init__(self, writer: Writer, frame: Frame, namer: Namer, fast: bool, pairs: bool = False) -> None:
        self.writer, self.frame, self.namer, self.fast, self.pairs = writer, frame, namer, fast, pairs
        self.values: dict[str, Value] = {}
        self.bounds: dict[str, str] = {}  # what is known of a value's range; see ``ops.bound``
        self.parts: dict[int, str] = {}  # the numbers of the parts of a sum, by how many there are

    def define(self, dst: str, level: Level, dtype: DType, pad: float | None = None) -> Value:
        """Name the variables of a new value; a value defined again (in a later pass) keeps its names."""
        copies = len(self.frame.pieces) if has_cols(level) else 1
        old = self.values.get(dst)
        names = old.names if old and old.level is level else self.namer.claim(dst, copies)
        self.values[dst] = Value(names, level, dtype, pad)
        return self.values[dst]

    def part(self, width: int) -> str:
        """The variable that numbers ``width`` parts of a sum."""
        if width not in self.parts:
            self.parts[width] = self.namer.one("part")
            self.writer.assign(self.parts[width], f"tl.arange(0, {width})")
        return self.parts[width]

    def operand(self, arg: Operand, dtype: DType, level: Level, piece: int, beside: bool = False) -> str:
        """Text of an operand in one column piece."""
        return self.values[arg].name(piece) if isinstance(arg, str) else literal(arg, dtype, level, beside)

    def write(self, statement: Statement) -> None:
        """Write one statement (no reduction), once per column piece where it varies along the columns."""
        _WRITERS[type(statement)](self, statement)


def _load(body: Body, node: Load) -> None:
    frame = body.frame
    padded = has_cols(node.level) and any(piece.padded for piece in frame.pieces)
    value = body.define(node.dst, node.level, node.dtype, float(node.other) if padded else None)
    for piece, name in enumerate(value.names):
        if node.parts > 1:
            _load_sum(body, node, name, piece)
            continue
        args = [_address(body, node, piece)]
        tests = [body.values[lookup.within].name(piece) for lookup in node.lookups]
        mask = frame.mask(node.level, node.guards, piece, tests)
        if mask:
            other = int(node.other) if node.dtype is DType.BOOL else node.other
            args += [f"mask={mask}", f"other={_other(other, node.dtype)}"]
        if node.reread or node.passing:
            args.append(f'eviction_policy="{"evict_last" if node.reread else "evict_first"}"')
        tail = ") != 0" if node.dtype is DType.BOOL else ")"
        body.writer.call(f"{name} = tl.load(", args, tail)


def _load_sum(body: Body, node: Load, name: str, piece: int) -> None:
    """A sum of several parts, which stand along a last dim of the block that is loaded."""
    frame, width = body.frame, 1 << (node.parts - 1).bit_length()
    rank = 0 if frame.shape(node.level, piece) == "()" else 1 if frame.flat else 2
    behind, before = f"[{':, ' * rank}None]", f"[{'None, ' * rank}:]"
    lined = f"{body.part(width)}{before if rank else ''}"
    far = f"{lined}.to(tl.int64)" if frame.params[node.buffer].wide else lined
    address = _address(body, node, piece)
    args = [f"{f'({address}){behind}' if rank else address} + {far} * {node.step}"]
    mask = frame.mask(node.level, (), piece)
    tests = [f"({mask}){behind}"] * bool(mask) + [f"{lined} < {node.parts}"] * (width != node.parts)
    args += [f"mask={join_tests(tests)}", "other=0.0"] if tests else []
    parts = body.namer.one(f"{name}_parts")
    body.writer.call(f"{parts} = tl.load(", args)
    body.writer.assign(name, f"tl.sum({parts}, {rank})")


def _address(body: Body, node: Load, piece: int) -> str:
    """The address (block) of a load. Rows by index stand first: what runs along the columns is added to them."""
    frame = body.frame
    if not node.lookups:
        return frame.pointer(node.buffer, node.index, node.level, piece)
    wide = frame.params[node.buffer].wide
    terms = []
    for lookup in node.lookups:
        row = body.values[lookup.row]
        name = f"{row.name(piece)}.to(tl.int64)" if wide and row.dtype is not DType.I64 else row.name(piece)
        terms.append(name if lookup.stride == 1 else f"{name} * {lookup.stride}")
    rows = [body.values[lookup.row].level for lookup in node.lookups]
    level = frame.reach(node.index, Level.SCALAR)
    level = join_levels(level, any(map(has_rows, rows)), any(map(has_cols, rows)))
    text = join_sum([buffer_name(node.buffer), *terms, *frame.terms(node.index, piece, wide)])
    return frame.fit(text, level is node.level, node.level, piece)


def _other(value: float | int, dtype: DType) -> str:
    """A literal that an access converts to the buffer's type."""
    if dtype is DType.F64:
        return literal(value, dtype, Level.SCALAR, beside=True)
    return plain_literal(value, DType.I32 if dtype is DType.BOOL else dtype)


def _index(body: Body, node: Index) -> None:
    frame = body.frame
    value = body.define(node.dst, node.level, node.dtype)
    for piece, name in enumerate(value.names):
        terms = frame.terms(node.index, piece, wide=node.dtype is DType.I64)
        if not terms or terms == [str(node.index.const)]:
            number = plain_literal(node.index.const, node.dtype)
            shape = frame.shape(node.level, piece)
            body.writer.assign(name, f"tl.full({shape}, {number}, {TYPES[node.dtype]})")
            continue
        text = join_sum(terms)
        if node.dtype is not DType.I32:
            text = convert(text if len(terms) == 1 and text.isidentifier() else f"({text})", DType.I32, node.dtype)
        body.writer.assign(name, frame.fit(text, frame.covers(node.index, node.level), node.level, piece))


def _inside(body: Body, node: Inside) -> None:
    frame = body.frame
    value = body.define(node.dst, node.level, DType.BOOL)
    rows = any(frame.covers(guard.index, Level.ROW) for guard in node.guards)
    cols = any(frame.covers(guard.index, Level.COL) for guard in node.guards)
    covered = (rows or not has_rows(node.level)) and (cols or not has_cols(node.level))
    for piece, name in enumerate(value.names):
        tests = frame.guard_tests(node.guards, piece)
        if not tests:
            body.writer.assign(name, f"tl.full({frame.shape(node.level, piece)}, True, tl.int1)")
            continue
        body.writer.assign(name, frame.fit(join_tests(tests), covered, node.level, piece))


def _within(body: Body, node: Within) -> None:
    value = body.define(node.dst, node.level, DType.BOOL)
    for piece, name in enumerate(value.names):
        src = body.operand(node.src, node.src_dtype, node.level, piece)
        body.writer.assign(name, f"({src} >= 0) & ({src} < {node.size!r})")


def _compute(body: Body, node: Compute) -> None:
    value = body.define(node.dst, node.level, node.dtype)
    known_of = body.bounds.get(str(node.args[0]), "")
    text = template(node.fn, node.arg_dtype, body.fast, known_of)
    body.bounds[node.dst] = bound(node.fn, known_of)
    known = node.args[1:] if node.fn == "where" else node.args
    beside = node.fn in CASTS_LITERALS and any(isinstance(arg, str) for arg in known)
    for piece, name in enumerate(value.names):
        args = [body.operand(arg, node.arg_dtype, node.level, piece, beside) for arg in node.args]
        if node.fn == "where" and not isinstance(node.args[0], str):
            args[0] = literal(node.args[0], DType.BOOL, node.level)
        operands = dict(zip("abc", args, strict=False))
        body.writer.assign(name, _fit_value(body, node, text.format(**operands, t=TYPES[node.arg_dtype]), piece))


def _fit_value(body: Body, node: Compute, text: str, piece: int) -> str:
    """Broadcast a result whose operands, taken together, vary less than its level says."""
    levels = [body.values[arg].level for arg in node.args if isinstance(arg, str)]
    rows, cols = any(map(has_rows, levels)), any(map(has_cols, levels))
    covered = (rows or not has_rows(node.level)) and (cols or not has_cols(node.level))
    return body.frame.fit(text, covered or node.level is Level.SCALAR, node.level, piece)


def _convert(body: Body, node: Convert) -> None:
    known = body.values[node.src].pad if isinstance(node.src, str) else None
    value = body.define(node.dst, node.level, node.dtype, known if known in (0.0, math.inf, -math.inf) else None)
    for piece, name in enumerate(value.names):
        if isinstance(node.src, str):
            text = _converted(body, node, piece)
            covered = body.values[node.src].level is node.level
        else:
            text = f"tl.full({body.frame.shape(node.level, piece)}, {_full_text(node.src, node.dtype)})"
            covered = True
        body.writer.assign(name, body.frame.fit(text, covered, node.level, piece))


def _converted(body: Body, node: Convert, piece: int) -> str:
    """A converted value. Roundings are done in pairs of elements, but for tiles of a single one."""
    assert isinstance(node.src, str)
    value = body.values[node.src]
    name = value.name(piece)
    rows = body.frame.phase.row_tile if has_rows(value.level) else 1
    cols = body.frame.pieces[piece].width if has_cols(value.level) else 1
    if node.through in HALVES:
        alone = "" if rows * cols > 1 else "_alone"
        return f"{_THROUGH[node.through, node.src_dtype, node.dtype]}{alone}({name})"
    if body.pairs and (node.src_dtype, node.dtype) in _PAIRS and rows * cols > 1:
        return f"{_PAIRS[node.src_dtype, node.dtype]}({name})"
    return convert(name, node.src_dtype, node.dtype)


_THROUGH = {
    (DType.BF16, DType.F32, DType.F32): "_round_bf16",
    (DType.F16, DType.F32, DType.F32): "_round_f16",
    (DType.BF16, DType.F32, DType.BF16): "_to_bf16",
    (DType.BF16, DType.BF16, DType.F32): "_widen_bf16",
}

_PAIRS = {
    (DType.F32, DType.F16): "_to_f16",
    (DType.F32, DType.BF16): "_to_bf16",
    (DType.BF16, DType.F32): "_widen_bf16",
}


def _full_text(value: float | int | bool, dtype: DType) -> str:
    return f"{plain_literal(value, dtype)}, {TYPES[dtype]}"


def _store(body: Body, node: Store) -> None:
    frame = body.frame
    dtype = frame.params[node.buffer].dtype
    level = frame.reach(node.index, node.level)
    copies = len(frame.pieces) if has_cols(level) else 1
    for piece in range(copies):
        if isinstance(node.src, str):
            value = body.values[node.src]
            text = convert(value.name(piece), value.dtype, dtype)
        else:
            text = _other(node.src, dtype)
        args = [frame.pointer(node.buffer, node.index, level, piece), text]
        mask = frame.mask(level, node.guards, piece, [frame.owner] * bool(frame.owner))
        args += [f"mask={mask}"] * bool(mask) + ['eviction_policy="evict_first"'] * node.passing
        body.writer.call("tl.store(", args)


_WRITERS: dict[type, Callable[[Body, Any], None]] = {
    Load: _load,
    Index: _index,
    Inside: _inside,
    Within: _within,
    Compute: _compute,
    Convert: _convert,
    Store: _store,
}
