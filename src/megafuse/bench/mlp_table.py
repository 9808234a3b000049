"""Tables of MLP records: one for each series of sizes and way to time, rivals side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megafuse.bench.mlp_case import series_name
from megafuse.bench.record import CaseResult, Facts, Record, RivalResult
from megafuse.bench.rivals import MEGAFUSE
from megafuse.bench.table import number, ratio

GRAPH = "GPU time: CUDA graph of calls on inputs that take turns (us, median and p20-p80)"
CALL = "With launch overhead: events around single calls (us, median and p20-p80)"
OVERHEAD = "Launch overhead: the difference of the two (us)"
HOST = "Host time of a call: many calls, one synchronisation at their end (us)"
BEYOND = "+"  # behind the rows whose inputs did not go beyond the L2 cache


@dataclass(frozen=True)
class Table:
    """A titled table; the first row is the heading."""

    title: str
    rows: tuple[tuple[str, ...], ...]


def mlp_tables(record: Record) -> Iterator[Table]:
    """The tables of a record, those of one series after another; those without any figure are left out."""
    series: dict[str, list[CaseResult]] = {}
    for case in record.cases:
        if "widths" in case.facts:
            series.setdefault(series_name(case.facts), []).append(case)
    for name, cases in series.items():
        found = (
            _timed(f"{name}. {GRAPH}", cases, lambda r: r.rotated),
            _timed(f"{name}. {CALL}", cases, lambda r: r.call),
            _overhead(f"{name}. {OVERHEAD}", cases),
            _timed(f"{name}. {HOST}", cases, lambda r: r.host),
        )
        yield from (table for table in found if table is not None)


def _rivals(cases: Sequence[CaseResult]) -> list[str]:
    """Ours first, then the others in the order of the record."""
    names = dict.fromkeys(name for case in cases for name in case.rivals)
    return sorted(names, key=lambda n: n != MEGAFUSE)


def _timed(title: str, cases: Sequence[CaseResult], section: Callable[[RivalResult], Facts]) -> Table | None:
    names = _rivals(cases)
    others = [n for n in names if n != MEGAFUSE]
    rows = []
    for case in cases:
        found = {n: section(case.rivals[n]) if n in case.rivals else {} for n in names}
        if any(found.values()):
            ours = found.get(MEGAFUSE, {}).get("median")
            gains = [ratio(found[n].get("median"), ours) for n in others] if MEGAFUSE in names else []
            rows.append((_rows(case, found), *(_cell(case, n, found[n]) for n in names), *_times(gains)))
    gained = [f"vs {n}" for n in others] if MEGAFUSE in names else []
    return Table(title, (("rows", *names, *gained), *rows)) if rows else None


def _rows(case: CaseResult, found: dict[str, Facts]) -> str:
    inside = any(f and f.get("input_bytes", 0) < f.get("l2_bytes", 0) for f in found.values())
    return f"{case.facts['rows']}{BEYOND * inside}"


def _times(gains: Sequence[str]) -> list[str]:
    return [f"{g}x" if g else "" for g in gains]


def _cell(case: CaseResult, name: str, facts: Facts) -> str:
    if not facts:
        rival = case.rivals.get(name)
        return "" if rival is None or rival.checked.get("ok") else "not validated"
    return f"{number(facts['median'], 1)} ({number(facts['p20'], 1)}-{number(facts['p80'], 1)})"


def _overhead(title: str, cases: Sequence[CaseResult]) -> Table | None:
    names = _rivals(cases)
    rows = []
    for case in cases:
        cells = [_difference(case.rivals.get(n)) for n in names]
        if any(cells):
            rows.append((str(case.facts["rows"]), *cells))
    return Table(title, (("rows", *names), *rows)) if rows else None


def _difference(rival: RivalResult | None) -> str:
    if rival is None or not rival.call or not rival.rotated:
        return ""
    return number(rival.call["median"] - rival.rotated["median"], 1)
