"""Graphs as text: one line a node, numbered by position, the same for the same graph every time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megafuse.ir.graph import Graph, Node
from megafuse.ir.types import (
    Cast,
    Concat,
    Const,
    Gather,
    Input,
    Iota,
    Map,
    Opaque,
    Pad,
    Permute,
    Pick,
    Reduce,
    Reshape,
    Slice,
)


def format_graph(graph: Graph) -> str:
    """Readable text of ``graph``: inputs, forward nodes, backward nodes, outputs.

    A value's number is its position in the text. Constants are written where they are used::

        %5 = mul(%3, 0.5:bf16)   # bf16[4, 2048]  src[block.py:31]
    """
    forward = graph.forward_nodes()
    inputs = set(graph.inputs)
    body = [n for n in graph.nodes if n not in inputs and not n.is_a(Const)]
    groups = [("forward", [n for n in body if n in forward]), ("backward", [n for n in body if n not in forward])]
    order = [*graph.inputs, *(n for _, nodes in groups for n in nodes)]
    names = {n: f"%{i}" for i, n in enumerate(order)} | {n: format_const(n) for n in graph.nodes if n.is_a(Const)}
    lines = ["inputs:", *_align([(f"{names[n]} = {_input_text(n)}", _comment(n)) for n in graph.inputs])]
    for title, nodes in groups:
        if nodes:
            rows = [(f"{names[n]} = {format_node(n, names)}", _comment(n)) for n in nodes]
            lines += [f"{title}:", *_align(rows)]
    return "\n".join([*lines, "outputs:", *_output_lines(graph, names)]) + "\n"


def format_node(node: Node, names: dict[Node, str]) -> str:
    """The call of one node, such as ``reduce.sum(%3, axes=[1])``, with its arguments named by ``names``."""
    args = ", ".join(names[a] for a in node.args)
    head, extra = _HEADS.get(type(node.attrs), _plain)(node)
    return f"{head}({', '.join(p for p in (args, extra) if p)})"


def format_const(node: Node) -> str:
    """A constant with its type when the value alone does not tell it: ``0.5``, ``2:i64``, ``true``."""
    assert isinstance(node.attrs, Const)
    value = node.attrs.value
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{_number(value)}:{node.dtype.value}"


def _number(value: float) -> str:
    """Shortest text that reads back as the same number."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{value:.1f}"
    return repr(value)


def _input_text(node: Node) -> str:
    assert isinstance(node.attrs, Input)
    return f"input.{node.attrs.role}({node.attrs.name!r}, strides={list(node.attrs.strides)})"


def _plain(node: Node) -> tuple[str, str]:
    return node.op, ""


def _opaque_text(attrs: Opaque) -> tuple[str, str]:
    results = ", ".join("none" if r is None else str(r) for r in attrs.results)
    return f"opaque[{attrs.target}]", f"call={attrs.call}, reason={attrs.reason!r}, results=({results})"


# for each attribute class: the head of the call, and what follows the arguments
_HEADS: dict[type, Callable[[Any], tuple[str, str]]] = {
    Iota: lambda n: ("iota", f"axis={n.attrs.axis}"),
    Map: lambda n: (n.attrs.fn, ""),
    Cast: lambda n: (f"cast.{n.dtype.value}", ""),
    Reduce: lambda n: (f"reduce.{n.attrs.fn}", f"axes={list(n.attrs.axes)}"),
    Permute: lambda n: ("permute", str(list(n.attrs.perm))),
    Reshape: lambda n: ("reshape", str(list(n.shape))),
    Slice: lambda n: ("slice", _slice_text(n)),
    Pad: lambda n: ("pad", f"lo={list(n.attrs.lo)}, value={_number(n.attrs.value)}"),
    Concat: lambda n: ("concat", f"axis={n.attrs.axis}"),
    Gather: lambda n: ("gather", f"axis={n.attrs.axis}"),
    Opaque: lambda n: _opaque_text(n.attrs),
    Pick: lambda n: ("pick", str(n.attrs.index)),
}


def _slice_text(node: Node) -> str:
    """Dims as ``start+size`` or ``start+size*step``; a whole dim as ``:``."""
    assert isinstance(node.attrs, Slice)
    parts, source = [], node.args[0].shape
    for start, step, size, whole in zip(node.attrs.starts, node.attrs.steps, node.shape, source, strict=True):
        step_text = "" if step == 1 else f"*{step}"
        parts.append(":" if (start, step, size) == (0, 1, whole) else f"{start}+{size}{step_text}")
    return f"[{', '.join(parts)}]"


def _comment(node: Node) -> str:
    """Type and the user's line."""
    origin = f"  src[{node.origin}]" if node.origin else ""
    return f"# {node.type}{origin}"


def _align(rows: list[tuple[str, str]], limit: int = 64) -> list[str]:
    """Two-space indent, comments in one column (rows wider than ``limit`` push theirs out)."""
    width = max((len(text) for text, _ in rows if len(text) <= limit), default=0)
    return [f"  {text.ljust(width)}   {comment}" for text, comment in rows]


def _output_lines(graph: Graph, names: dict[Node, str]) -> list[str]:
    """One line an output: its kind, and for a gradient the input it belongs to."""
    lines = []
    for i, node in enumerate(graph.outputs):
        value = "none" if node is None else names[node]
        if i < graph.num_forward:
            lines.append(f"  output {i} = {value}")
            continue
        at = i - graph.num_forward
        owner = graph.inputs[graph.grad_of[at]] if at < len(graph.grad_of) else None
        name = f" of {names[owner]} {owner.attrs.name!r}" if owner and isinstance(owner.attrs, Input) else ""
        lines.append(f"  gradient{name} = {value}")
    return lines
