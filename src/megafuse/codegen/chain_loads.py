"""Which rows of a chain are loaded ahead of the stage that reads them, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megafuse.codegen.chain_program import ChainProgram, Product, RowSums
from megafuse.codegen.program import Load, Phase
from megafuse.codegen.walk import has_rows, statements
from megafuse.ir.chain import Held


@dataclass(frozen=True)
class RowLoad:
    """A load of rows that is written ahead: after ``at`` products (with sums over the rows) of a tile."""

    load: Load
    phase: Phase
    at: int


def next_rows(program: ChainProgram) -> dict[str, RowLoad]:
    """What a program that walks loads for its next tile, by the value's name.

    Each where the present tile's rows are taken over (``at`` the products before it): a load is waited for at the next
    exchange through shared memory. But where several sums over the rows hold registers, rows that come before the first
    sum are loaded before the last: until then the operands of the sums are held, too.
    """
    sums = [n for n, s in enumerate(s for s in program.stages if not isinstance(s, Phase)) if isinstance(s, RowSums)]
    found = {}
    for done, phase in _counted_phases(program):
        at = sums[-1] if len(sums) > 1 and done < sums[0] else done
        found.update({load.dst: RowLoad(load, phase, at) for load in _row_loads(phase)})
    return found


def first_loads(program: ChainProgram) -> tuple[list[RowLoad], list[Product]]:
    """What a program of one tile loads before it works: ``program.first`` matrices, and the rows up to their products.

    The plan counts the same rows (``schedule.chains``): those that come after the last of these products are left.
    """
    products: dict[Held, Product] = {}
    rows: list[RowLoad] = []
    for stage in program.stages:
        if len(products) == program.first:
            break
        if isinstance(stage, Product):
            products.setdefault(stage.held[0], stage)
        elif isinstance(stage, Phase):
            rows += [RowLoad(load, stage, 0) for load in _row_loads(stage)]
    return rows, list(products.values())


def _row_loads(phase: Phase) -> Iterator[Load]:
    """The loads of rows in a phase. Those whose place is looked up wait for what they look up."""
    for statement in statements(phase):
        if isinstance(statement, Load) and not statement.lookups and has_rows(statement.level):
            yield statement


def _counted_phases(program: ChainProgram) -> Iterator[tuple[int, Phase]]:
    """The phases, and how many products and sums come before each."""
    done = 0
    for stage in program.stages:
        if isinstance(stage, Phase):
            yield done, stage
        else:
            done += 1
