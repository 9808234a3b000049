"""Kernels before buffers have names."""

from __future__ import annotations

from dataclasses import dataclass

from megafuse.ir.chain import Walk
from megafuse.ir.graph import Node
from megafuse.ir.index import Affine, Axis
from megafuse.ir.nest import Root
from megafuse.ir.trace import Trace
from megafuse.ir.traffic import bytes_of
from megafuse.schedule.chain_tile import ChainRules, ChainTile
from megafuse.schedule.types import DotTile, Tile, TileRules


@dataclass(frozen=True)
class PhasePlan:
    """A phase before buffers have names. ``stores``: (root, node written, element offset)."""

    trace: Trace
    fixed: tuple[Axis, ...]
    loop: tuple[Axis, ...]
    tile: Tile
    stores: tuple[tuple[Root, Node, Affine], ...]
    rules: TileRules | None


@dataclass(frozen=True)
class DotPlan:
    """The product of a kernel; ``operands``: the values with memory that it multiplies; ``splits``: parts of K."""

    node: Node
    operands: tuple[Node, ...]
    tile: DotTile
    splits: int = 1


@dataclass(frozen=True)
class ChainDotPlan:
    """A dot of a chain; see ``ChainDot``. ``sums``: the value that holds its sums, of shape ``[chunks, P, K, N]``."""

    node: Node
    operands: tuple[int, ...]
    sums: Node | None = None


@dataclass(frozen=True)
class ChainPlan:
    """The order of a chain's phases and dots, its tile, and the values in memory that it reads and writes."""

    walk: Walk
    stages: tuple[int | ChainDotPlan, ...]
    tile: ChainTile
    rules: ChainRules
    reads: tuple[Node, ...]
    writes: tuple[Node, ...]
    owned: frozenset[Node]  # the dots that no other kernel and no library call computes


@dataclass(frozen=True)
class KernelPlan:
    """A kernel before buffers have names. ``key``, ``finishes``, ``apart``: see ``KernelSchedule``."""

    phases: tuple[PhasePlan, ...]
    num_warps: int
    forward: bool
    key: str
    finishes: str = ""
    dot: DotPlan | None = None
    chain: ChainPlan | None = None
    apart: bool = False

    @property
    def num_stages(self) -> int:
        """Depth of the software pipeline of the row loops, or of the loop over K."""
        return max(p.tile.num_stages for p in self.phases)

    @property
    def reads(self) -> tuple[Node, ...]:
        """Nodes loaded, in order of first load; what an earlier phase of the kernel wrote is not among them."""
        if self.chain is not None:
            return self.chain.reads
        own = {*self.writes, *([self.dot.node] if self.dot else [])}
        loads = (i.node for p in self.phases for i in p.trace.loads())
        operands = self.dot.operands if self.dot else ()
        return tuple(n for n in dict.fromkeys((*operands, *loads)) if n not in own)

    @property
    def read_bytes(self) -> int:
        """Bytes of what it reads, each value once and whole, but for tables that are read by index."""
        return bytes_of(self.reads, [p.trace for p in self.phases])

    @property
    def writes(self) -> tuple[Node, ...]:
        """Nodes written, in order."""
        if self.chain is not None:
            return self.chain.writes
        return tuple(dict.fromkeys(n for p in self.phases for _, n, _ in p.stores))
