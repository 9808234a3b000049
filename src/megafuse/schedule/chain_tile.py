"""The tile of a chain, what makes one legal, and the limits that hold for tiles of all kernels."""

from __future__ import annotations

from dataclasses import dataclass

from megafuse.ir.chain import Walk

MOST_WARPS, MOST_STAGES = 16, 4
MOST_PER_THREAD = 256  # elements of one tile value
LEAST_UNIT_ROWS = 16  # of a tile, for matrix units


@dataclass(frozen=True)
class ChainTile:
    """Sizes of a chain: ``rows`` at a time, ``rows_per_chunk`` a program, all of one problem. ``why``: how chosen.

    ``held``: matrices are loaded once, before the walk over the rows; else once for each row tile. ``turned``: tiles
    are blocks of columns by rows. ``early``: the rows of the next tile are loaded while the present one is worked on.
    ``first``: matrices that a program of one tile loads before it works, with the rows up to their products.
    ``shares``: programs that work on the same tile: all make all sums over its rows, and each stores some of them.
    """

    rows: int
    rows_per_chunk: int
    num_warps: int
    num_stages: int = 1
    held: bool = True
    turned: bool = False
    early: bool = False
    first: int = 0
    shares: int = 1
    why: str = ""


@dataclass(frozen=True)
class ChainRules:
    """What makes a tile legal for a chain of ``walk``, of which the widest value has ``width`` columns.

    ``sums``: it leaves sums over the rows, of several programs where ``split``. ``plain``: its products do without
    matrix units. ``turns``: tiles may be columns by rows, and have fewer rows than ``unit`` only where ``narrow``.
    ``sms``: multiprocessors of the device. ``most_shares``: programs that have a sum each, at most. ``most_first``:
    matrices that may be loaded first. ``streamed``: it does nothing but sum products of what it loads.
    """

    walk: Walk
    width: int
    sums: bool
    split: bool
    plain: bool
    turns: bool
    narrow: bool
    unit: int
    sms: int
    most_shares: int = 1
    most_first: int = 0
    streamed: bool = False

    def problem(self, tile: ChainTile) -> str:
        """Why ``tile`` is not legal here; empty where it is."""
        odd = [n for n in (tile.rows, tile.num_warps) if n < 1 or n & (n - 1)]
        if odd:
            return f"sizes {odd} are no powers of two"
        if tile.num_warps > MOST_WARPS:
            return f"more than {MOST_WARPS} warps"
        if tile.rows * self.width > MOST_PER_THREAD * 32 * tile.num_warps:
            return f"more than {MOST_PER_THREAD} elements a thread"
        if tile.rows < LEAST_UNIT_ROWS and not (self.plain and tile.rows == 1):
            return f"matrix units take {LEAST_UNIT_ROWS} rows or more"
        return self._turned(tile) or self._walk(tile)

    def _turned(self, tile: ChainTile) -> str:
        if tile.turned and not self.turns:
            return "its tiles cannot be columns by rows"
        narrow = tile.turned and tile.rows < self.unit and not self.narrow
        return f"tiles of columns by fewer than {self.unit} rows are not trusted here" if narrow else ""

    def _walk(self, tile: ChainTile) -> str:
        chunk = tile.rows_per_chunk
        if chunk < tile.rows or chunk % tile.rows:
            return f"chunks of {chunk} rows cut tiles of {tile.rows}"
        if chunk > max(tile.rows, 2 * self.walk.rows):
            return "a program walks rows that are not there"
        if self.sums and (self.walk.rows > chunk) != self.split:
            return "partial sums would come or go"
        if not 1 <= tile.num_stages <= MOST_STAGES:
            return f"a pipeline has 1 to {MOST_STAGES} stages"
        if not 1 <= tile.shares <= self.most_shares:
            return f"1 to {self.most_shares} programs can share a tile"
        if tile.shares > 1 and chunk != tile.rows:
            return "programs that walk several tiles share none"
        if tile.first and (chunk != tile.rows or not tile.held or not 0 < tile.first <= self.most_first):
            return f"programs of one tile load matrices first, {self.most_first} at most"
        return "there is no row loop" if (tile.num_stages > 1 or tile.early) and chunk == tile.rows else ""
