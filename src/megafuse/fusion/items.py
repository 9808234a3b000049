"""Nests with their costs, and what joining two of them gains; made once and shared by all searches over one graph.

Searches differ in which values have memory. An item is used again where all values that its traces look at are in
memory, with their strides, as they were when it was made. What two such items can be joined to looks at nothing else.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.fusion.anchors import Anchors
from megafuse.fusion.cost import NestCost, nest_cost
from megafuse.fusion.initial import initial_nests
from megafuse.fusion.merge import merge_nests
from megafuse.ir.chain import Chain
from megafuse.ir.graph import Graph, Node
from megafuse.ir.nest import Anchor, Nest
from megafuse.ir.trace import Memory, NestError, Trace, trace_nest
from megafuse.ir.traffic import read_bytes

PRODUCER_BONUS = 1.05  # of two joins that save the same read, the one with the value's producer is preferred
ROUNDING = 1.0 + 1e-9  # keeps a bound above what it bounds


@dataclass(frozen=True, eq=False)
class Item:
    """One nest during the search: its trace(s), cost and direction. ``dot``: the product whose epilogue it is.

    ``chain``: the kernel that it stands for; its trace then has the chain's roots and loads alone.
    """

    traces: tuple[Trace, ...]  # alternative forms; the first is the preferred one
    cost: NestCost
    forward: bool
    dot: Node | None = None
    chain: Chain | None = None

    @property
    def closed(self) -> bool:
        """Nothing can be joined with it."""
        return self.dot is not None or self.chain is not None

    @property
    def trace(self) -> Trace:
        """The preferred form."""
        return self.traces[0]

    @property
    def nest(self) -> Nest:
        """The nest of the preferred form."""
        return self.trace.nest

    @functools.cached_property
    def made(self) -> frozenset[Node]:
        """Nodes that it makes, whole or in part."""
        return frozenset(r.anchor.node for r in self.nest.roots)

    @functools.cached_property
    def reads(self) -> Mapping[Node, int]:
        """Bytes that any nest which computes the same must read of each node that it does not compute itself."""
        return read_bytes(self.trace)

    @functools.cached_property
    def written(self) -> int:
        """Bytes of the values that it makes."""
        return sum(r.anchor.value.type.nbytes for r in self.nest.roots)

    @functools.cached_property
    def volume(self) -> int:
        """Elements of its walk."""
        return self.nest.space.num_rows * self.nest.space.num_cols

    @functools.cached_property
    def volumes(self) -> frozenset[int]:
        """Elements, and rows, of the walks of all forms."""
        spaces = [t.nest.space for t in self.traces]
        return frozenset(n for s in spaces for n in (s.num_rows * s.num_cols, s.num_rows))

    def comparable(self, other: Item) -> bool:
        """Some form of one walks as many elements as some form of the other, or as many as it has rows."""
        return self.volume in other.volumes or other.volume in self.volumes

    def feeds(self, other: Item) -> bool:
        """``other`` reads what this makes."""
        return not self.made.isdisjoint(other.trace.loaded())

    def follows(self, other: Item) -> bool:
        """It is a map over nothing but the result of a reduction of ``other``."""
        if not self.nest.flexible:
            return False
        results = {r.anchor.node for r in other.nest.roots if r.arg_index is not None}
        return any(n in results and n.type.numel == self.volume for n in self.trace.loaded())


class Items:
    """The items of one graph on one device."""

    def __init__(self, graph: Graph, device: DeviceSpec) -> None:
        self.device = device
        self._forward = graph.forward_nodes()
        self._initial: dict[Anchor, list[tuple[Item, Mapping[Node, tuple[int, ...] | None]]]] = {}
        self._joins: dict[tuple[Item, Item], tuple[float, Item] | None] = {}

    def initial(self, anchor: Anchor, anchors: Anchors, materialised: Memory) -> Item:
        """The item that computes ``anchor`` alone.

        Raises:
            NestError: it needs a value that has no memory.
        """
        known = self._initial.setdefault(anchor, [])
        for item, looked_at in known:
            if all(s == (anchors.strides(n) if n in materialised else None) for n, s in looked_at.items()):
                return item
        prefix = f"n{anchor.node.uid}p{anchor.part or 0}_"
        traces = tuple(trace_nest(n, materialised) for n in initial_nests(anchor, prefix))
        item = Item(traces, nest_cost(traces[0], self.device, anchors.strides), anchor.node in self._forward)
        visited = frozenset().union(*(t.visited for t in traces))
        known.append((item, {n: anchors.strides(n) if n in materialised else None for n in visited}))
        return item

    def most_saved(self, a: Item, b: Item) -> float:
        """Seconds that no join of two items can save more of: in any form it reads and writes at least this much."""
        reads = {n: size for n, size in a.reads.items() if n not in b.made}
        for n, size in b.reads.items():
            if n not in a.made:
                reads[n] = max(size, reads.get(n, 0))
        memory = (sum(reads.values()) + a.written + b.written) / self.device.dram_bandwidth
        return ROUNDING * self._bonus(a, b) * (self._apart(a, b) - memory)

    def join(self, a: Item, b: Item, anchors: Anchors, materialised: Memory) -> tuple[float, Item] | None:
        """The best join of two items and the predicted time that it saves; None where there is none or it saves none.

        Both were made by ``initial`` or ``join`` for the same ``anchors``. Where one reads what the other makes, the
        maker's axes come first: those of a reader that walks fewer would not be split into them.
        """
        if (a, b) not in self._joins:
            self._joins[a, b] = self._best_join(a, b, anchors, materialised)
        return self._joins[a, b]

    def _best_join(self, a: Item, b: Item, anchors: Anchors, materialised: Memory) -> tuple[float, Item] | None:
        bonus, apart = self._bonus(a, b), self._apart(a, b)
        best: tuple[float, Item] | None = None
        sides = (b.traces, a.traces) if b.feeds(a) else (a.traces, b.traces)
        for first, second in itertools.product(*sides):
            try:
                options = merge_nests(first, second, materialised)
            except NestError:
                continue
            for trace in options:
                cost = nest_cost(trace, self.device, anchors.strides)
                gain = bonus * (apart - cost.seconds)
                if gain > 0 and (best is None or gain > best[0]):
                    best = (gain, Item((trace,), cost, a.forward))
        return best

    def _apart(self, a: Item, b: Item) -> float:
        return a.cost.seconds + b.cost.seconds + self.device.launch_seconds

    @staticmethod
    def _bonus(a: Item, b: Item) -> float:
        return PRODUCER_BONUS if a.feeds(b) or b.feeds(a) else 1.0
