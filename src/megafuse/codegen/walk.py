"""Walks over tile programs: what a statement reads, writes and indexes, and which comments belong to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megafuse.codegen.program import (
    Affine,
    ColReduce,
    Compute,
    Convert,
    Guard,
    Index,
    Inside,
    Level,
    Load,
    Note,
    Pass,
    Phase,
    RowReduce,
    Statement,
    Store,
    Within,
)


@dataclass(frozen=True)
class Noted:
    """A statement with the comments that stand above its group; ``group`` numbers the groups of a pass."""

    statement: Statement
    notes: tuple[str, ...]
    group: int


def noted(body: Pass) -> list[Noted]:
    """The statements of a pass, each with its comments."""
    found: list[Noted] = []
    notes: tuple[str, ...] = ()
    group, fresh = 0, True
    for item in body.body:
        if isinstance(item, Note):
            notes, group, fresh = ((*notes, item.text) if fresh else (item.text,)), group + 1, True
        else:
            found.append(Noted(item, notes, group))
            fresh = False
    return found


def reads(statement: Statement) -> tuple[str, ...]:
    """Names of the values a statement reads."""
    match statement:
        case Load(lookups=lookups):
            return tuple(name for lookup in lookups for name in (lookup.row, lookup.within))
        case Compute(args=args):
            return tuple(a for a in args if isinstance(a, str))
        case Convert(src=src) | Within(src=src) | RowReduce(src=src) | ColReduce(src=src) | Store(src=src):
            return (src,) if isinstance(src, str) else ()
    return ()


def result_level(statement: Statement) -> Level:
    """Level of a statement's result (of what it stores, for a store)."""
    if isinstance(statement, RowReduce):
        return Level.ROW if statement.src_level in (Level.TILE, Level.ROW) else Level.SCALAR
    if isinstance(statement, ColReduce):
        return Level.COL if statement.src_level in (Level.TILE, Level.COL) else Level.SCALAR
    return statement.level


def affines(statement: Statement) -> Iterator[Affine]:
    """Every index expression of a statement."""
    yield from (guard.index for guard in guards(statement))
    if isinstance(statement, Load | Store | Index | ColReduce):
        yield statement.index


def guards(statement: Statement) -> tuple[Guard, ...]:
    """The range tests of a statement."""
    return statement.guards if isinstance(statement, Load | Store | Inside) else ()


def statements(phase: Phase) -> Iterator[Statement]:
    """All statements of a phase in order, without the comments."""
    for body in phase.passes:
        yield from (item for item in body.body if not isinstance(item, Note))


def has_rows(level: Level) -> bool:
    """Whether a value of this level varies along the rows."""
    return level in (Level.ROW, Level.TILE)


def has_cols(level: Level) -> bool:
    """Whether a value of this level varies along the columns."""
    return level in (Level.COL, Level.TILE)


def join_levels(level: Level, rows: bool, cols: bool) -> Level:
    """``level``, with rows and columns added."""
    rows, cols = rows or has_rows(level), cols or has_cols(level)
    return Level.TILE if rows and cols else Level.ROW if rows else Level.COL if cols else Level.SCALAR


def axis_sizes(phase: Phase) -> dict[str, int]:
    """Size of each axis that an index of this phase may name."""
    sizes = {axis.name: axis.size for axis in (*phase.fixed, *phase.loop, *phase.cols)}
    return {**sizes, "chunk": phase.num_chunks}
