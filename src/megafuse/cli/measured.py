"""What was measured, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from megafuse.core.text import quantity
from megafuse.runtime.plan_store import Entry

PLAIN_WIDTH = 220  # columns of text that is not fitted to a terminal
HEADINGS = ("kernel", "heuristic", "best", "gain", "tile", "registers", "spills", "shared", "occupancy",
            "of copy", "limit")  # fmt: skip
LEFT = ("kernel", "tile", "limit")


def as_text(table: Table) -> str:
    """The table as plain text, as wide as it needs to be."""
    console = Console(width=PLAIN_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def tuned_table(entries: Sequence[Entry], device: str) -> Table:
    """One line a kernel: time with the heuristic's tiles and with the best, and figures of the compiled kernel.

    Times are of the kernel and of what adds up its partial sums; "of copy" is predicted DRAM bytes per second of the
    kernel alone over the device's copy rate.
    """
    table = Table(title=f"tiles measured on {device}", title_justify="left", box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=heading == "kernel")
    for entry in entries:
        table.add_row(*_row(entry))
    return table


def _row(entry: Entry) -> tuple[str, ...]:
    facts = entry.facts
    best = float(facts.get("tuned_seconds", entry.seconds))
    return (
        entry.name,
        quantity(entry.heuristic_seconds, "s"),
        quantity(best, "s"),
        f"{entry.heuristic_seconds / best:.2f}x",
        tile_text(entry),
        str(facts.get("registers", "-")),
        str(facts.get("spills", "-")),
        str(facts.get("shared", "-")),
        _percent(facts.get("occupancy")),
        _percent(facts.get("copy_share")),
        str(facts.get("limit", "-")),
    )


def tile_text(entry: Entry) -> str:
    """Rows by columns of each phase (of a chain: rows and how they are held), rows of a chunk, warps and stages."""
    if entry.tiles and "held" in entry.tiles[0]:
        return _chain_text(entry.tiles[0], entry.num_warps)
    phases = [f"{_rows(t)} x {'+'.join(map(str, t['pieces']))}{_chunk(t)}" for t in entry.tiles]
    stages = max((t["num_stages"] for t in entry.tiles), default=1)
    return f"{'; '.join(phases)}, {entry.num_warps} warps" + (f", {stages} stages" if stages > 1 else "")


def _rows(tile: Any) -> str:
    return f"{tile['abreast']} abreast" if tile["abreast"] > 1 else str(tile["row_tile"])


def _chain_text(tile: Any, warps: int) -> str:
    walk = f" in {tile['rows_per_chunk']}" * (tile["rows_per_chunk"] > tile["rows"])
    form = ", columns first" * tile["turned"] + ", next rows early" * tile["early"]
    stages = f", {tile['num_stages']} stages" * (tile["num_stages"] > 1)
    held = ("kept" if tile["held"] else "read again") + f", {tile['first']} loaded first" * bool(tile["first"])
    return f"{tile['rows']} rows{walk}{form}, matrices {held}, {warps} warps{stages}"


def _chunk(tile: Any) -> str:
    return f" in {tile['rows_per_chunk']}" if tile["rows_per_chunk"] > tile["row_tile"] * tile["abreast"] else ""


def _percent(share: Any) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
