"""What a kernel computes, whatever its tiles, as a key under which measured tiles are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megafuse.core.sizes import open_dims
from megafuse.ir.graph import Node
from megafuse.ir.nest import Root
from megafuse.ir.trace import Inst, Trace

Strides = Callable[[Node], tuple[int, ...]]


def kernel_key(
    phases: Sequence[tuple[Trace, tuple[str, ...]]], strides: Strides, stored: Callable[[Root], bool], extra: Any = ()
) -> str:
    """A digest of traces with their fixed axes and memory layouts.

    Names of buffers, source lines and the rest of the graph do not count: a kernel that computes the same from memory
    of the same layout has the same key. ``stored``: whether a root is written to memory.
    """
    numbers: dict[Node, int] = {}
    lines = [repr(extra)]
    for trace, fixed in phases:
        space = trace.nest.space
        lines.append(f"rows {space.rows!r} cols {space.cols!r} fixed {fixed!r}")
        lines.append(f"typical {[(d.name, d.typical, d.wide) for d in open_dims(space)]}")
        lines.extend(_lines(trace, strides, stored, numbers))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _lines(trace: Trace, strides: Strides, stored: Callable[[Root], bool], numbers: dict[Node, int]) -> Iterable[str]:
    places: dict[Inst, int] = {}

    def memory(node: Node) -> str:
        return f"m{numbers.setdefault(node, len(numbers))}:{node.dtype.value}{strides(node)!r}"

    for at, inst in enumerate(trace.insts):
        places[inst] = at
        where = memory(inst.node) if inst.kind == "load" else ""
        args = [places[a] for a in inst.args]
        by_index = f" {inst.lookups!r} {inst.size!r}" if inst.lookups or inst.size else ""
        index = f"{inst.index!r} {inst.guards!r}{by_index}"
        yield f"{inst.kind} {inst.fn} {inst.dtype.value} {args} {index} {inst.value!r} {where}"
    for root in trace.nest.roots:
        fn = getattr(root.anchor.node.attrs, "fn", "")
        where = memory(root.anchor.node) if root.by_rows or stored(root) else ""
        yield f"root {places[trace.roots[root]]} {root.by_rows} {root.index!r} {fn} {root.anchor.part} {where}"
