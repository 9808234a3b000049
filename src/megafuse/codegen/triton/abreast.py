"""Rows written out next to one another.

A loop over single rows whose reductions exchange values between warps stands still at every exchange. ``write_out``
makes the loop take several rows at once: each statement that varies along the rows is there once for each of them.
Reductions of all rows then stand together, so that warps exchange once for all, and each row's arithmetic hides the
latency of the others'. Tiles of several rows would share each row among fewer threads; here a row keeps its layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megafuse.codegen.program import Affine, ColReduce, Guard, Lookup, Note, Pass, Phase, Statement, Store
from megafuse.codegen.walk import affines, has_rows, reads, result_level


def write_out(phase: Phase) -> Phase:
    """The phase with ``abreast`` copies of all that varies along the rows."""
    if phase.abreast == 1:
        return phase
    walked = [axis.name for axis in phase.loop if axis.size != 1]
    copied: set[str] = set()
    return replace(phase, passes=tuple(_pass(body, walked, phase.abreast, copied) for body in phase.passes))


def _pass(body: Pass, walked: list[str], rows: int, copied: set[str]) -> Pass:
    """One pass, written out. ``copied``: values of which each row has its own."""
    out: list[Statement | Note] = []
    for item in body.body:
        out.append(item)
        if isinstance(item, Note) or not _varies(item, walked, copied):
            continue
        copied |= {item.dst} if not isinstance(item, ColReduce | Store) else set()
        out += [_copy(item, {name: f"{name}_row{row}" for name in copied}, walked[-1], row) for row in range(1, rows)]
    return Pass(tuple(out))


def _varies(item: Statement, walked: list[str], copied: set[str]) -> bool:
    """Whether each row needs a statement of its own: sums over the rows do, whatever they sum."""
    along = any(affine.axes & set(walked) for affine in affines(item))
    return isinstance(item, ColReduce) or has_rows(result_level(item)) or along or not copied.isdisjoint(reads(item))


def _copy(item: Statement, names: Mapping[str, str], axis: str, row: int) -> Statement:
    """The statement for the ``row``-th row behind; ``axis`` is the one that the next row is a step along."""
    found = {f.name: getattr(item, f.name) for f in fields(item)}
    moved = {key: _moved(value, axis, row) for key, value in found.items()}
    for key in _NAMING & found.keys():
        moved[key] = _renamed(moved[key], names)
    return replace(item, **moved)


_NAMING = {"dst", "src", "args", "lookups"}  # the fields that hold names of values


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A part of a statement with values by their new names."""
    if isinstance(value, tuple):
        return tuple(_renamed(part, names) for part in value)
    if isinstance(value, Lookup):
        return replace(value, row=names.get(value.row, value.row), within=names.get(value.within, value.within))
    return names.get(value, value) if isinstance(value, str) else value


def _moved(value: Any, axis: str, row: int) -> Any:
    """A part of a statement with its indices ``row`` steps on."""
    if isinstance(value, Affine):
        return value.shift(row * sum(stride for name, stride in value.terms if name == axis))
    if isinstance(value, tuple):
        return tuple(_moved(part, axis, row) for part in value)
    return replace(value, index=_moved(value.index, axis, row)) if isinstance(value, Guard) else value
