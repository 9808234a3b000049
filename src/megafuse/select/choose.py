"""``select``: of several complete plans for one graph, the cheapest. Costs are data and come through one door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megafuse.core.errors import VerifyError


@dataclass(frozen=True)
class Selection:
    """What was chosen and against what. ``table`` holds (name, seconds, source of the figure), cheapest first."""

    chosen: str
    table: tuple[tuple[str, float, str], ...]

    def __str__(self) -> str:
        lines = [f"{'*' if n == self.chosen else ' '} {n}: {s * 1e6:.1f} us {source}" for n, s, source in self.table]
        return "\n".join(lines)


def select(
    names: Sequence[str], predicted: Mapping[str, float], measured: Mapping[str, float] | None = None
) -> Selection:
    """Choose the candidate with the lowest cost in seconds.

    Where any candidate has a measured cost, only measured candidates compete: predictions rank, measurements decide.
    Ties go to the candidate named first.

    Raises:
        VerifyError: no candidates, or one without a cost.
    """
    measured = measured or {}
    missing = [n for n in names if n not in predicted]
    if not names or missing:
        raise VerifyError(f"no cost for candidates {missing}" if missing else "no candidates to select from")
    field = [n for n in names if n in measured] or list(names)
    costs = measured if field[0] in measured else predicted
    chosen = min(field, key=lambda n: costs[n])
    rows = [(n, measured[n], "measured") if n in measured else (n, predicted[n], "predicted") for n in names]
    return Selection(chosen, tuple(sorted(rows, key=lambda row: row[1])))
