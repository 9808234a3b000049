"""Reductions in Triton text: over the columns of a tile, over its rows, and running ones inside loops."""

from __future__ import annotations

import functools
from dataclasses import replace

from megafuse.codegen.program import ColReduce, Level, Load, RowReduce
from megafuse.codegen.triton.frame import Frame
from megafuse.codegen.triton.helpers import MOST_SUMS
from megafuse.codegen.triton.ops import template
from megafuse.codegen.triton.statements import Body
from megafuse.codegen.triton.values import HALVES, TYPES, convert, literal, neutral, plain_literal
from megafuse.codegen.walk import has_cols, has_rows, result_level, statements
from megafuse.core.device import ACCESS_BYTES
from megafuse.core.dtypes import DType
from megafuse.core.sizes import divides, is_open

_COMBINE = {"max": "_max", "min": "_min", "prod": "_prod"}
_SMALL = (DType.BOOL, DType.I8, DType.I16, DType.U8)  # reduced as int32
_PARTS = 96  # longer sums of per-piece reductions get a line per piece
_CONVERSION = 12  # letters that a conversion of the result takes of such a line
_TARGETS = 40  # joint sums whose names have more letters are unpacked into short names


def held(dtype: DType) -> DType:
    """The type in which partial results of a reduction are held."""
    return DType.I32 if dtype in _SMALL else DType.F32 if dtype in HALVES else dtype


def tile_values(body: Body, src: str, fn: str, dtype: DType, piece: int, rows: bool) -> str:
    """``src`` as a reduction takes it: in the type that holds partial results, neutral outside the tile.

    Outside are the rows beyond the loop (``rows``), or the columns beyond the last.
    """
    frame, value = body.frame, body.values[src]
    if rows:
        mask = frame.row_mask if frame.ragged else ""
    else:
        inert = value.pad is not None and value.pad == neutral(fn, value.dtype)
        mask = frame.col_masks[piece] if frame.pieces[piece].padded and has_cols(value.level) and not inert else ""
    name = value.name(piece)
    text = convert(name, value.dtype, held(dtype))
    if not mask:
        return text
    return f"tl.where({mask}, {text}, {literal(neutral(fn, dtype), held(dtype), Level.ROW, beside=True)})"


def combine(fn: str, a: str, b: str) -> str:
    """Text that combines two partial results of a reduction."""
    return f"{a} + {b}" if fn == "sum" else f"{a} * {b}" if fn == "prod" else f"{_COMBINE[fn]}({a}, {b})"


def reduced(fn: str, text: str, axis: int | None) -> str:
    """A reduction of a block along ``axis`` (which is kept), or of the whole block to a scalar."""
    keep = "" if axis is None else ", keep_dims=True"
    if fn == "sum":
        return f"tl.sum({text}{'' if axis is None else f', {axis}'}{keep})"
    return f"tl.reduce({text}, {axis}, {_COMBINE[fn]}{keep})"


def final(text: str, dtype: DType) -> str:
    """A reduction's result, from the type that held the partial results."""
    return convert(text if text.isidentifier() or held(dtype) is dtype else f"({text})", held(dtype), dtype)


def can_join(node: RowReduce) -> bool:
    """Sums of tiles can be done several at once; one exchange between warps then serves all.

    Not those of small types, whose totals are of another type than the partial results.
    """
    return node.fn == "sum" and node.src_level is Level.TILE and node.dtype not in _SMALL


def row_reduces(body: Body, nodes: list[RowReduce]) -> None:
    """Reductions over the columns held in the tile, done together."""
    for at in range(0, len(nodes), MOST_SUMS):
        some = nodes[at : at + MOST_SUMS]
        if len(some) > 1:
            _joint_reduce(body, some)
        elif has_cols(body.values[some[0].src].level):
            _single_reduce(body, some[0], _folded(body, some[0]))
        else:
            _constant_reduce(body, some[0], result_level(some[0]))


def _joint_reduce(body: Body, nodes: list[RowReduce]) -> None:
    """Sums of tiles, all pieces of one width in one reduction."""
    parts = [_folded(body, node) for node in nodes]
    names = [body.define(node.dst, result_level(node), node.dtype).names[0] for node in nodes]
    short = sum(map(len, names)) < _TARGETS
    totals = []
    for operands in zip(*parts, strict=True):
        if len(parts[0]) == 1 and short:
            targets = names
        else:
            targets = [body.namer.one(f"{name}_part" if short else "part") for name in names]
        axis = 0 if body.frame.flat else body.frame.col_axis
        args = [f"({', '.join(operands)})", str(axis), f"_sum{len(nodes)}"]
        args += [] if body.frame.flat else ["keep_dims=True"]
        body.writer.call(f"{', '.join(targets)} = tl.reduce(", args)
        totals.append(targets)
    if totals[0] is not names:
        for name, summands in zip(names, zip(*totals, strict=True), strict=True):
            body.writer.assign(name, " + ".join(summands))


def _folded(body: Body, node: RowReduce) -> list[str]:
    """What is left to reduce of each piece: combined element by element first, where that takes no exchange."""
    pieces = body.frame.pieces
    texts = [tile_values(body, node.src, node.fn, node.dtype, p, rows=False) for p in range(len(pieces))]
    widths = [p.width for p in pieces]
    if len(widths) == 1 or not (len(set(widths)) == 1 or _tails_fold(body.frame)):
        return texts
    texts = [_narrowed(node.fn, text, width, min(widths)) for text, width in zip(texts, widths, strict=True)]
    name = body.namer.claim(f"{node.src}_all", 1)[0]
    body.writer.assign(name, functools.reduce(lambda a, b: combine(node.fn, a, b), texts))
    return [name]


def _tails_fold(frame: Frame) -> bool:
    """Whether those elements of a single row's widest piece that meet one of its narrowest lie in one thread.

    They are neighbours; a thread has whole accesses of them where columns come in such.
    """
    widths = [p.width for p in frame.pieces]
    together = max(widths) // min(widths)
    loads = (s for s in statements(frame.phase) if isinstance(s, Load) and s.level is Level.TILE)
    access = min([max(widths) // frame.threads, *(ACCESS_BYTES // s.dtype.size for s in loads)])
    return frame.flat and min(widths) >= frame.threads and together <= access and divides(access, frame.phase.num_cols)


def _narrowed(fn: str, text: str, width: int, least: int) -> str:
    """A block of ``width`` elements as one of ``least``: neighbours are combined."""
    if width == least:
        return text
    block = f"tl.reshape({text}, [{least}, {width // least}])"
    return f"tl.sum({block}, 1)" if fn == "sum" else f"tl.reduce({block}, 1, {_COMBINE[fn]})"


def _single_reduce(body: Body, node: RowReduce, texts: list[str]) -> None:
    name = body.define(node.dst, result_level(node), node.dtype).names[0]
    axis = _column_axis(body.frame, node)
    parts = [reduced(node.fn, text, axis) for text in texts]
    if sum(map(len, parts)) > _PARTS - (_CONVERSION if held(node.dtype) is not node.dtype else 0) and len(parts) > 1:
        names = body.namer.claim(f"{name}_part", len(parts))
        for part_name, part in zip(names, parts, strict=True):
            body.writer.assign(part_name, part)
        parts = list(names)
    text = functools.reduce(lambda a, b: combine(node.fn, a, b), parts)
    body.writer.assign(name, final(text, node.dtype))


def _column_axis(frame: Frame, node: RowReduce) -> int | None:
    """The axis of a tile that a reduction over columns takes, or None: the whole tile."""
    return frame.col_axis if result_level(node) is Level.ROW and not frame.flat else None


def _constant_reduce(body: Body, node: RowReduce, level: Level) -> None:
    """A reduction of one value repeated in every column."""
    src, count = body.values[node.src].name(0), body.frame.phase.num_cols
    name = body.define(node.dst, level, node.dtype).names[0]
    if node.fn in ("max", "min") or node.dtype is DType.BOOL:
        body.writer.assign(name, src)
        return
    if is_open(count):
        number = f"{count}.to({TYPES[node.dtype]})"
    else:
        number = literal(count, node.dtype, level, beside=node.fn == "sum")
    text = f"{src} * {number}" if node.fn == "sum" else template("pow", node.dtype, False).format(a=src, b=number)
    body.writer.assign(name, text)


class Running:
    """A reduction whose partial results live in tiles across the iterations of a loop.

    Over columns (``RowReduce``) the tiles are summed up along these when the loop is done, over rows along those.
    ``at_once``: each tile is reduced over its rows when it is there, and what lives on is a single row.
    """

    def __init__(self, body: Body, node: RowReduce | ColReduce, at_once: bool = False) -> None:
        self.body, self.node, self.rows, self.at_once = body, node, isinstance(node, ColReduce), at_once
        self.names: tuple[str, ...] = ()

    @property
    def _level(self) -> Level:
        """Level of the partial results: all that the source varies in, and the direction of the loop."""
        level = self.node.src_level
        if self.at_once:
            return Level.COL if has_cols(level) else Level.SCALAR
        tall = has_rows(level) or self.rows
        broad = has_cols(level) or not self.rows
        return Level.TILE if tall and broad else Level.ROW if tall else Level.COL

    def start(self) -> None:
        """Write the tiles of neutral elements, before the loop."""
        frame, node = self.body.frame, self.node
        wish = node.acc if isinstance(node, ColReduce) else f"{node.dst}_acc"
        copies = len(frame.pieces) if has_cols(self._level) else 1
        self.names = self.names or self.body.namer.claim(wish, copies)
        dtype = held(node.dtype)
        number = plain_literal(neutral(node.fn, node.dtype), dtype)
        for piece, name in enumerate(self.names):
            shape = frame.shape(self._level, piece)
            text = f"tl.zeros({shape}, " if node.fn == "sum" else f"tl.full({shape}, {number}, "
            self.body.writer.assign(name, f"{text}{TYPES[dtype]})")

    def step(self, src: str) -> None:
        """Write the update by a tile, inside the loop."""
        for piece, name in enumerate(self.names):
            if self.at_once:
                assert isinstance(self.node, ColReduce)
                text = _over_rows(self.body, self.node, _rows_of_tile(self.body, replace(self.node, src=src), piece))
            else:
                text = tile_values(self.body, src, self.node.fn, self.node.dtype, piece, self.rows)
            symbol = {"sum": "+", "prod": "*"}.get(self.node.fn)
            line = f"{name} {symbol}= {text}" if symbol else f"{name} = {combine(self.node.fn, name, text)}"
            self.body.writer.line(line)

    def finish(self) -> None:
        """Write the final reduction of the tiles, after the loop."""
        node = self.node
        if isinstance(node, ColReduce):
            finish_columns(self.body, node, self.names, summed=self.at_once)
            return
        level = result_level(node)
        name = self.body.define(node.dst, level, node.dtype).names[0]
        text = reduced(node.fn, self.names[0], _column_axis(self.body.frame, node))
        self.body.writer.assign(name, final(text, node.dtype))


def col_reduce(body: Body, node: ColReduce) -> None:
    """A reduction over the rows of the only tile."""
    pieces = range(len(body.frame.pieces) if has_cols(node.src_level) else 1)
    finish_columns(body, node, tuple(_rows_of_tile(body, node, piece) for piece in pieces))


def _rows_of_tile(body: Body, node: ColReduce, piece: int) -> str:
    """What a reduction over rows takes, with all rows of the tile."""
    level = Level.TILE if has_cols(node.src_level) else Level.ROW
    text = tile_values(body, node.src, node.fn, node.dtype, piece, rows=True)
    shaped = body.values[node.src].level is level or text.startswith("tl.where")
    return body.frame.fit(text, shaped, level, piece)


def _over_rows(body: Body, node: ColReduce, tile: str) -> str:
    """A tile reduced over its rows."""
    frame = body.frame
    return tile if frame.flat else reduced(node.fn, tile, frame.row_axis if has_cols(node.src_level) else None)


def finish_columns(body: Body, node: ColReduce, tiles: tuple[str, ...], summed: bool = False) -> None:
    """Reduce tiles over their rows, unless they are ``summed`` already, and store the result."""
    frame = body.frame
    level = Level.COL if has_cols(node.src_level) else Level.SCALAR
    names = body.define(f"{node.acc}_total", level, node.dtype).names
    for piece, (name, tile) in enumerate(zip(names, tiles, strict=True)):
        body.writer.assign(name, final(tile if summed else _over_rows(body, node, tile), node.dtype))
        args = [
            frame.pointer(node.buffer, node.index, level, piece),
            convert(name, node.dtype, node.store_dtype),
        ]
        mask = frame.mask(level, (), piece, [frame.owner] * bool(frame.owner))
        body.writer.call("tl.store(", args + [f"mask={mask}"] * bool(mask))


def check_running(frame: Frame, node: ColReduce) -> None:
    """Refuse a column reduction whose tiles would have to cover every column block at once.

    Raises:
        ValueError: the columns are walked inside a walk over several row tiles.
    """
    if frame.phase.col_block and frame.looped and has_cols(node.src_level):
        raise ValueError(f"column reduction {node.acc!r}: looped columns allow one row tile per chunk only")
