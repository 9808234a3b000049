"""What a kernel computes, whatever its tiles, as a key under which measured tiles are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megafuse.core.sizes import open_dims
from megafuse.ir.chain import Chain, RowDot, RowNest, made_by, nests_of
from megafuse.ir.graph import Node
from megafuse.ir.nest import Nest, Root
from megafuse.ir.trace import Inst, Memory, Trace
from megafuse.ir.views import memory_of, strided_view

Strides = Callable[[Node], tuple[int, ...]]


def kernel_key(
    phases: Sequence[tuple[Trace, tuple[str, ...]]], strides: Strides, stored: Callable[[Root], bool], extra: Any = ()
) -> str:
    """A digest of traces with their fixed axes and memory layouts.

    Names of buffers, source lines and the rest of the graph do not count: a kernel that computes the same from memory
    of the same layout has the same key. ``stored``: whether a root is written to memory.
    """
    memory = _Memory(strides)
    lines = [repr(extra)]
    for trace, fixed in phases:
        lines.extend(_lines(trace, fixed, memory, stored))
    return _digest(lines)


def chain_key(
    chain: Chain, traces: Mapping[Nest, Trace], strides: Strides, held: Memory, stored: Callable[[Node], bool]
) -> str:
    """A digest of a chain's stages in order, as of ``kernel_key``. ``stored``: whether a value is written to memory."""
    memory = _Memory(strides)
    lines = [f"chain {chain.rows}" + f" of {chain.problems}" * (chain.problems > 1)]
    for stage in chain.stages:
        for nest in nests_of(stage):
            lines.extend(_lines(traces[nest], (), memory, lambda root: True))
        node = made_by(stage)
        lines.append(f"{type(stage).__name__} {memory(node)} {node.shape!r} {stored(node)}")
        if not isinstance(stage, RowNest):
            lines.append(f"operands {[a.dtype.value for a in node.args]}")
        if isinstance(stage, RowDot):
            lines.extend(_viewed(a, memory, held) for a in node.args[1:])
    return _digest(lines)


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


class _Memory:
    """Values in memory by number, in the order in which they are met, with type and layout."""

    def __init__(self, strides: Strides) -> None:
        self.strides, self.numbers = strides, dict[Node, int]()

    def __call__(self, node: Node) -> str:
        return f"m{self.numbers.setdefault(node, len(self.numbers))}:{node.dtype.value}{self.strides(node)!r}"


def _viewed(node: Node, memory: _Memory, held: Memory) -> str:
    """A matrix or a bias: the value in memory that it is a view of, and the view."""
    base = memory_of(node, held)
    view = strided_view(node, memory.strides(base), base)
    return f"view {memory(base)} {view!r}"


def _lines(trace: Trace, fixed: tuple[str, ...], memory: _Memory, stored: Callable[[Root], bool]) -> Iterable[str]:
    space = trace.nest.space
    yield f"rows {space.rows!r} cols {space.cols!r} fixed {fixed!r}"
    yield f"typical {[(d.name, d.typical, d.wide) for d in open_dims(space)]}"
    places: dict[Inst, int] = {}
    for at, inst in enumerate(trace.insts):
        places[inst] = at
        where = memory(inst.node) if inst.kind == "load" else ""
        args = [places[a] for a in inst.args]
        by_index = f" {inst.lookups!r} {inst.size!r}" if inst.lookups or inst.size else ""
        parts = f" parts {inst.parts}" if inst.parts > 1 else ""
        index = f"{inst.index!r} {inst.guards!r}{by_index}{parts}"
        yield f"{inst.kind} {inst.fn} {inst.dtype.value} {args} {index} {inst.value!r} {where}"
    for root in trace.nest.roots:
        fn = getattr(root.anchor.node.attrs, "fn", "")
        where = memory(root.anchor.node) if root.by_rows or stored(root) else ""
        yield f"root {places[trace.roots[root]]} {root.by_rows} {root.index!r} {fn} {root.anchor.part} {where}"
