"""Helpers: small graphs by hand, and random ones from a drawn list of choices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st

from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Graph, Node, contiguous_strides
from megafuse.ir.types import TensorType


def argument(b: Builder, shape: Sequence[int], dtype: DType = DType.F32, position: int = 0) -> Node:
    """An input of role arg."""
    return b.input(f"x{position}", TensorType(tuple(shape), dtype), contiguous_strides(shape), "arg", position)


def graph_of(*outputs: Node, inputs: Sequence[Node]) -> Graph:
    """A forward-only graph."""
    return Graph(tuple(inputs), outputs, len(outputs))


def random_inputs(graph: Graph, seed: int = 0) -> list[np.ndarray]:
    """Random values with all their bits used, and some zeros of both signs."""
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=n.shape) * rng.integers(0, 4, n.shape)).astype(np.float32) for n in graph.inputs]


T = TypeVar("T")


class Draw:
    """Choices of a random graph, from any source of integers: hypothesis (which shrinks) or a seeded generator."""

    def __init__(self, integer: Callable[[int], int]) -> None:
        self.up_to = integer  # an integer from 0 to the argument, both included

    def one_of(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.up_to(len(items) - 1)]

    def shuffled(self, items: Iterable[T]) -> list[T]:
        """The items in some order."""
        left, out = list(items), []
        while left:
            out.append(left.pop(self.up_to(len(left) - 1)))
        return out


def _permute(b: Builder, d: Draw, x: Node) -> Node:
    return b.permute(x, d.shuffled(range(x.type.rank)))


def _unit(b: Builder, d: Draw, x: Node) -> Node:
    if x.type.rank >= 4:
        return b.reshape(x, [s for s in x.shape if s != 1])
    at = d.up_to(x.type.rank)
    return b.reshape(x, (*x.shape[:at], 1, *x.shape[at:]))


def _merge(b: Builder, d: Draw, x: Node) -> Node:
    return b.reshape(x, (x.type.numel,)) if x.type.rank < 2 else b.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def _expand(b: Builder, d: Draw, x: Node) -> Node:
    return b.expand(x, [2 + d.up_to(1) if s == 1 else s for s in x.shape])


def _slice(b: Builder, d: Draw, x: Node) -> Node:
    starts, sizes, steps = [], [], []
    for whole in x.shape:
        lo = d.up_to(whole - 1)
        step = d.one_of([1, 1, 1, 2, -1])
        start = whole - 1 - lo if step < 0 else lo
        room = (start if step < 0 else whole - 1 - start) // abs(step)
        starts.append(start)
        sizes.append(1 + d.up_to(room))
        steps.append(step)
    return b.slice(x, starts, sizes, steps)


def _pad(b: Builder, d: Draw, x: Node) -> Node:
    lo = [d.up_to(1) for _ in x.shape]
    return b.pad(x, lo, [p + s + d.up_to(1) for p, s in zip(lo, x.shape, strict=True)], d.one_of([0.0, 0.0, 1.5]))


def _slice_twice(b: Builder, d: Draw, x: Node) -> Node:
    """On a value made long enough for two steps of 2 or -2."""
    long = b.concat([x, b.map("exp", x), b.map("neg", x)], 0)
    for start, step in ((d.up_to(1), 2), (d.up_to(1), d.one_of([1, 2]))):
        size = long.shape[0]
        count = (size - 1 - start) // step + 1 if start < size else 0
        if count > 0:
            flip = d.up_to(1)
            first = start + step * (count - 1) if flip else start
            rest = [0] * (long.type.rank - 1)
            ones = [1] * (long.type.rank - 1)
            long = b.slice(long, [first, *rest], [count, *long.shape[1:]], [-step if flip else step, *ones])
    return long


def _pad_twice(b: Builder, d: Draw, x: Node) -> Node:
    return _pad(b, d, _pad(b, d, x))


def _sum_of_pads(b: Builder, d: Draw, x: Node) -> Node:
    """Two or three pads of one size along one axis, in any order, touching, apart or overlapping."""
    parts = [x, b.map("exp", x), b.map("abs", x)][: 2 + d.up_to(1)]
    n = x.shape[0]
    shape = (3 * n + 1, *x.shape[1:])
    total = None
    for i, part in enumerate(parts):
        lo = d.one_of([i * n, i * n, i * n, d.up_to(2 * n)])
        padded = b.pad(part, [lo, *[0] * (x.type.rank - 1)], shape)
        total = padded if total is None else b.map("add", total, padded)
    assert total is not None
    return total


def _concat(b: Builder, d: Draw, x: Node) -> Node:
    axis = d.up_to(x.type.rank - 1)
    return b.concat([x, b.map("neg", x), x][: 2 + d.up_to(1)], axis)


def _chunks(b: Builder, d: Draw, x: Node) -> Node:
    """Split, touch the parts, and put them together again by concat or by a sum of pads."""
    axis = d.up_to(x.type.rank - 1)
    cuts = sorted({0, x.shape[axis], d.up_to(x.shape[axis]), d.up_to(x.shape[axis])})
    parts = []
    for lo, hi in pairwise(cuts):
        start = [lo if i == axis else 0 for i in range(x.type.rank)]
        part = b.slice(x, start, [hi - lo if i == axis else s for i, s in enumerate(x.shape)])
        parts.append((start, b.map("abs", part) if d.up_to(1) else part))
    if d.up_to(1):
        return b.concat([p for _, p in parts], axis)
    total: Node | None = x if d.up_to(2) == 0 else None
    for start, part in d.shuffled(parts):
        padded = b.pad(part, start, x.shape)
        total = padded if total is None else b.map("add", total, padded)
    assert total is not None
    return total


def _cast_pair(b: Builder, d: Draw, x: Node) -> Node:
    wide = b.cast(x, d.one_of([DType.F32, DType.F64, DType.BF16]))
    moved = d.one_of([_permute, _slice, _pad, _pad, _concat, _unit, _expand])(b, d, wide) if d.up_to(1) else wide
    return b.cast(moved, d.one_of([DType.BF16, DType.F32]))


def _scalar(b: Builder, d: Draw, x: Node) -> Node:
    c = b.const(d.one_of([1.0, 0.0, -0.0, 4.0, -0.5, 0.1]), x.dtype)
    other = b.permute(b.broadcast(c, x.shape), d.shuffled(range(x.type.rank))) if d.up_to(1) else c
    if other.shape not in ((), x.shape):
        other = c
    fn = d.one_of(["mul", "add", "sub", "div", "maximum"])
    return b.map(fn, x, other) if d.up_to(1) or fn == "div" else b.map(fn, other, x)


def _double(b: Builder, d: Draw, x: Node) -> Node:
    minus = b.map("neg", x)
    kinds = (("neg", minus), ("add", x, b.map("neg", minus)), ("sub", x, x), ("add", x, minus), ("add", minus, x))
    return b.map(*d.one_of(kinds))


def _reduce(b: Builder, d: Draw, x: Node) -> Node:
    if x.type.rank < 2:
        return x
    return b.reduce(d.one_of(["sum", "max", "min"]), x, [d.up_to(x.type.rank - 1)], keepdim=bool(d.up_to(1)))


def _reduce_twice(b: Builder, d: Draw, x: Node) -> Node:
    fn = d.one_of(["sum", "max"])
    for _ in range(2):
        if x.type.rank > 1:
            x = b.reduce(fn, x, [d.up_to(x.type.rank - 1)], keepdim=bool(d.up_to(1)))
    return x


def _full(b: Builder, d: Draw, x: Node) -> Node:
    """A constant tensor through casts and moves, combined with ``x`` when it comes back to its shape."""
    c = b.broadcast(b.const(d.one_of([1.0, 0.25, 0.1]), d.one_of([DType.BF16, DType.F32])), x.shape)
    for step in (_permute, _slice, _unit, _merge, _expand):
        if d.up_to(2) == 0:
            c = step(b, d, c)
    c = b.cast(c, x.dtype)
    return b.map("mul", x, c) if c.shape == x.shape else c


STEPS: list[Callable[[Builder, Draw, Node], Node]] = [
    _permute, _unit, _merge, _expand, _slice, _slice, _slice_twice, _pad, _pad_twice, _sum_of_pads, _concat, _chunks,
    _chunks, _cast_pair, _cast_pair, _scalar, _scalar, _double, _reduce, _reduce_twice, _reduce_twice, _full, _full,
]  # fmt: skip


def draw_graph(d: Draw) -> Graph:
    """A chain of up to 8 steps on two inputs, every third value an output."""
    b = Builder()
    shape = [1 + d.up_to(3) for _ in range(1 + d.up_to(2))]
    dtype = d.one_of([DType.F32, DType.BF16])
    inputs = [argument(b, shape, dtype, 0), argument(b, shape, dtype, 1)]
    values = [b.map("mul", *inputs)]
    for _ in range(1 + d.up_to(7)):
        x = d.one_of(STEPS)(b, d, values[-1])
        if x.type.numel <= 2000:
            values.append(x)
    return graph_of(values[-1], *values[::3], inputs=inputs)


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    """Graphs that hypothesis can shrink."""
    return draw_graph(Draw(lambda high: draw(st.integers(0, high))))


def seeded_graph(seed: int) -> Graph:
    """A graph that depends on the seed alone."""
    rng = random.Random(seed)
    return draw_graph(Draw(lambda high: rng.randint(0, high)))
