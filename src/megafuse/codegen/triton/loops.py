"""One phase in Triton text: its walk over rows, its walk over columns, and what stands outside each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from megafuse.codegen.program import ColReduce, Level, RowReduce
from megafuse.codegen.triton.frame import Definition
from megafuse.codegen.triton.reductions import Running, can_join, check_running, col_reduce, row_reduces
from megafuse.codegen.triton.statements import Body
from megafuse.codegen.walk import Noted, has_cols, noted, reads, result_level
from megafuse.codegen.writer import Writer

_WORD = re.compile(r"\b\w+\b")


def define_used(writer: Writer, definitions: Sequence[Definition], text: str) -> None:
    """Write those definitions that ``text`` needs, directly or through another definition."""
    used = set(_WORD.findall(text))
    kept: list[Definition] = []
    for definition in reversed(definitions):
        if definition.name in used:
            kept.append(definition)
            used.update(_WORD.findall(definition.text))
    for definition in reversed(kept):
        writer.assign(definition.name, definition.text)


def write_group(body: Body, items: Iterable[Noted], running: dict[str, Running]) -> None:
    """Write statements in order, each group under its comments; reductions in ``running`` as updates of their tiles."""
    group = 0
    queue = list(items)
    for n, item in enumerate(queue):
        if item.group != group:
            group = item.group
            for note in item.notes:
                body.writer.comment(note)
        node = item.statement
        if isinstance(node, RowReduce | ColReduce):
            name = node.acc if isinstance(node, ColReduce) else node.dst
            if name in running:
                running[name].step(node.src)
            elif isinstance(node, ColReduce):
                col_reduce(body, node)
            elif not _same_reduction(queue[n - 1] if n else None, item, running):
                row_reduces(body, _reduction_run(queue[n:], running))
        else:
            body.write(node)


def _same_reduction(first: Noted | None, second: Noted, running: dict[str, Running]) -> bool:
    """Two reductions, one right after the other, that one call can do together."""
    if first is None:
        return False
    a, b = first.statement, second.statement
    if not (isinstance(a, RowReduce) and isinstance(b, RowReduce)) or a.dst in running or b.dst in running:
        return False
    return (a.fn, a.dtype, a.src_level) == (b.fn, b.dtype, b.src_level) and a.dst != b.src and can_join(a)


def _reduction_run(queue: list[Noted], running: dict[str, Running]) -> list[RowReduce]:
    """The reduction at the head of ``queue`` and those right behind it that it is done together with."""
    run: list[RowReduce] = []
    for n, item in enumerate(queue):
        if n and not _same_reduction(queue[n - 1], item, running):
            break
        assert isinstance(item.statement, RowReduce)
        run.append(item.statement)
    return run


def write_phase(body: Body, num_stages: int) -> None:
    """Write the whole phase."""
    frame, writer = body.frame, body.writer
    inner = body.writer = writer.part()
    if frame.looped:
        _row_loop(body, num_stages)
    else:
        _row_tile(body, "", {}, frozenset())
    body.writer = writer
    if not frame.phase.col_block:
        first = f"{frame.col_program} * {frame.pieces[0].width}" if frame.phase.col_grid else ""
        define_used(writer, frame.col_definitions(first), inner.text)
    writer.add(inner)


def _row_loop(body: Body, num_stages: int) -> None:
    """The walk over row tiles; what does not vary along the rows is computed once, before it."""
    frame, writer = body.frame, body.writer
    items = [item for one in frame.phase.passes for item in noted(one)]
    running: dict[str, Running] = {}
    for item in items:
        if isinstance(item.statement, ColReduce):
            check_running(frame, item.statement)
            running.setdefault(item.statement.acc, Running(body, item.statement))
    hoist = frame.phase.hoist and not frame.phase.col_block
    hoisted = frozenset(id(item.statement) for item in items if hoist and _rowless(item))
    write_group(body, [item for item in items if id(item.statement) in hoisted], {})
    for reduction in running.values():
        reduction.start()
    rows = frame.phase.row_tile * frame.phase.abreast
    kind = f"tl.range(0, {frame.chunk_rows!r}, {rows}, num_stages={num_stages})"
    step = f", {rows}" if rows > 1 else ""
    plain = f"range(0, {frame.chunk_rows!r}{step})" if step else f"range({frame.chunk_rows!r})"
    first = frame.first_row
    with writer.block(f"for {first} in {kind if num_stages > 1 else plain}:"):
        _row_tile(body, first, running, hoisted)
    for reduction in running.values():
        reduction.finish()


def _rowless(item: Noted) -> bool:
    """Whether a statement's result is the same in all row tiles."""
    return not isinstance(item.statement, ColReduce) and result_level(item.statement) in (Level.SCALAR, Level.COL)


def _row_tile(body: Body, first: str, running: dict[str, Running], hoisted: frozenset[int]) -> None:
    """One tile of rows: its index variables, then every pass."""
    writer = body.writer
    inner = body.writer = writer.part()
    for one in body.frame.phase.passes:
        items = [item for item in noted(one) if id(item.statement) not in hoisted]
        if body.frame.phase.col_block:
            _column_loop(body, items, running)
        else:
            write_group(body, items, running)
    body.writer = writer
    define_used(writer, body.frame.row_definitions(first), inner.text)
    writer.add(inner)


def _column_loop(body: Body, items: list[Noted], running: dict[str, Running]) -> None:
    """One pass over column blocks: what does not vary along the columns stands before or after the loop."""
    before, inside, after = _split(items)
    write_group(body, before, running)
    if inside:
        mine = {
            item.statement.dst: Running(body, item.statement)
            for item in inside
            if isinstance(item.statement, RowReduce)
        }
        for reduction in mine.values():
            reduction.start()
        phase, writer = body.frame.phase, body.writer
        first = body.frame.first_col
        with writer.block(f"for {first} in range(0, {phase.num_cols!r}, {phase.col_block}):"):
            inner = body.writer = writer.part()
            write_group(body, inside, {**running, **mine})
            body.writer = writer
            define_used(writer, body.frame.col_definitions(first), inner.text)
            writer.add(inner)
        for reduction in mine.values():
            reduction.finish()
    write_group(body, after, running)


def _split(items: list[Noted]) -> tuple[list[Noted], list[Noted], list[Noted]]:
    """Statements before, inside and after a loop over columns.

    Raises:
        ValueError: a statement inside needs the result of a reduction of the same walk.
    """
    late: set[str] = set()
    before: list[Noted] = []
    inside: list[Noted] = []
    after: list[Noted] = []
    for item in items:
        node = item.statement
        depends = any(name in late for name in reads(node))
        loops = has_cols(node.src_level if isinstance(node, RowReduce | ColReduce) else node.level)
        if depends and loops:
            raise ValueError(f"looped columns: {node} needs a reduction of its own pass")
        (inside if loops else after if depends else before).append(item)
        dst = getattr(node, "dst", None)
        if dst is not None and (depends or (loops and isinstance(node, RowReduce))):
            late.add(dst)
    return before, inside, after
