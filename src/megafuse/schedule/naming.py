"""Readable, stable buffer names: the user's variable where one is assigned on the line, else the op."""

from __future__ import annotations

import keyword
import re

from megafuse.ir.graph import Node
from megafuse.ir.types import Concat, Dot, Input, Map, Opaque, Pick, Reduce

_ASSIGNED = re.compile(r"^\s*(?:self\.)?([A-Za-z_]\w*)\s*(?::[^=]+)?=[^=]")
_RESERVED = frozenset(
    {"inputs", "outputs", "saved", "tangents", "grads", "row", "col", "empty", "view", "tl", "triton"}
)


class Names:
    """Gives every value with memory a unique Python identifier."""

    def __init__(self, forward: frozenset[Node]) -> None:
        self.forward = forward
        self.taken: set[str] = set(_RESERVED)

    def name(self, node: Node) -> str:
        """A new name for ``node``."""
        if isinstance(node.attrs, Input):
            return self._unique(re.sub(r"\W", "_", node.attrs.name).strip("_").lower() or "arg")
        base = self._base(node)
        return self._unique(base if node in self.forward else f"d_{base}")

    def _base(self, node: Node) -> str:
        found = _ASSIGNED.match(node.origin.code) if node.origin is not None else None
        attrs = node.attrs
        if isinstance(attrs, Reduce):
            suffix = {"sum": "sum", "max": "max", "min": "min", "prod": "prod"}[attrs.fn]
            return f"{found.group(1).lower()}_{suffix}" if found else suffix
        if found:
            return found.group(1).lower()
        if isinstance(attrs, Dot):
            return "dot"
        if isinstance(attrs, Map):
            return attrs.fn if attrs.fn.isidentifier() else "value"
        if isinstance(attrs, Concat):
            return "cat"
        return "opaque" if isinstance(attrs, Opaque | Pick) else "value"

    def _unique(self, base: str) -> str:
        base = re.sub(r"\W", "_", base)
        if not base.isidentifier() or keyword.iskeyword(base):
            base = f"v_{base}"
        name, n = base, 1
        while name in self.taken:
            n += 1
            name = f"{base}_{n}"
        self.taken.add(name)
        return name
