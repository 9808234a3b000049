"""The type file of fusion: the cover of a graph by nests and library calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megafuse.ir.chain import Chain
from megafuse.ir.graph import Graph, Node
from megafuse.ir.nest import Nest
from megafuse.ir.trace import Memory


@dataclass(frozen=True)
class Boundary:
    """Why two nests (by position in the cover) are not one."""

    first: int
    second: int
    reason: str


@dataclass(frozen=True)
class KernelGroup:
    """Nests that run as phases of one kernel.

    ``fixed[i]`` names, per nest, the row axes that the program id fixes. ``blocks_per_sm`` is how many programs of a
    kernel of several phases may run on one SM so that what they re-read stays in the L2 cache. ``dot``: the product
    whose kernel computes the one nest from its tiles.
    """

    nests: tuple[int, ...]
    fixed: tuple[tuple[str, ...], ...]
    blocks_per_sm: int = 0
    dot: Node | None = None


@dataclass(frozen=True)
class Cover:
    """All computation of a graph: nests (grouped into kernels), library dots and opaque calls.

    ``layout`` holds the strides of every value with memory. ``seconds`` is the cost model's prediction of the time
    outside dots (with what generated dots take longer). ``tf32``: the library may round fp32 operands to TF32.
    ``chains`` are kernels beside ``groups``. ``splits``: dots that generated kernels multiply in so many parts of K,
    whose sums are added up in fixed order.
    """

    graph: Graph
    nests: tuple[Nest, ...]
    groups: tuple[KernelGroup, ...]
    layout: Mapping[Node, tuple[int, ...]]
    materialised: Memory
    boundaries: tuple[Boundary, ...] = field(default=())
    seconds: float = 0.0
    decisions: tuple[str, ...] = field(default=())
    tf32: bool = False
    chains: tuple[Chain, ...] = field(default=())
    splits: Mapping[Node, int] = field(default_factory=dict)
