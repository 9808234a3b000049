"""Immutable nodes, the frozen graph, and the interning builder through which every node is made."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megafuse.core.dtypes import DType
from megafuse.ir.ops import map_dtype
from megafuse.ir.types import (
    Again,
    Attrs,
    Cast,
    Concat,
    Const,
    Dot,
    Expand,
    Gather,
    Input,
    Iota,
    Map,
    Opaque,
    Origin,
    Pad,
    Permute,
    Pick,
    Reduce,
    Reshape,
    Slice,
    TensorType,
)

AttrsClass = type  # Node has a field named type, which would hide the builtin in its annotations


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """One value. Equality is identity: the builder returns the same node for the same op, arguments and attributes."""

    uid: int
    attrs: Attrs
    args: tuple[Node, ...]
    type: TensorType
    origin: Origin | None = None

    @property
    def op(self) -> str:
        """The op's name in printed graphs: the attribute class in lower case."""
        return type(self.attrs).__name__.lower()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """Element type of the value."""
        return self.type.dtype

    def is_a(self, *kinds: AttrsClass) -> bool:
        """True when the node's attributes are an instance of one of ``kinds``."""
        return isinstance(self.attrs, kinds)

    def __repr__(self) -> str:
        return f"%{self.uid}:{self.op}"


@dataclass(frozen=True)
class Graph:
    """A joint forward+backward graph.

    ``outputs[:num_forward]`` are the module's outputs; the rest are gradients, in the order of ``grad_of`` (positions
    of the inputs they belong to). ``None`` in ``outputs`` is a gradient that does not exist.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Node | None, ...]
    num_forward: int
    grad_of: tuple[int, ...] = ()
    nodes: tuple[Node, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        roots = [n for n in self.outputs if n is not None]
        object.__setattr__(self, "nodes", toposort([*self.inputs, *roots]))

    @property
    def forward_outputs(self) -> tuple[Node | None, ...]:
        """The module's outputs."""
        return self.outputs[: self.num_forward]

    @property
    def gradients(self) -> tuple[Node | None, ...]:
        """The gradients, in the order of ``grad_of``."""
        return self.outputs[self.num_forward :]

    def users(self) -> dict[Node, list[Node]]:
        """For each node, the nodes that take it as an argument (each once), in topological order."""
        out: dict[Node, list[Node]] = {n: [] for n in self.nodes}
        for node in self.nodes:
            for arg in dict.fromkeys(node.args):
                out[arg].append(node)
        return out

    def forward_nodes(self) -> frozenset[Node]:
        """Ancestors of the module's outputs, outputs included."""
        return frozenset(toposort([n for n in self.forward_outputs if n is not None]))


def toposort(roots: Iterable[Node]) -> tuple[Node, ...]:
    """All ancestors of ``roots``, arguments first, in a deterministic order."""
    seen: set[int] = set()
    order: list[Node] = []
    for root in roots:
        stack: list[tuple[Node, int]] = [(root, 0)]
        while stack:
            node, i = stack.pop()
            if node.uid in seen:
                continue
            if i < len(node.args):
                stack.append((node, i + 1))
                if node.args[i].uid not in seen:
                    stack.append((node.args[i], 0))
            else:
                seen.add(node.uid)
                order.append(node)
    return tuple(order)


Scalar = float | int | bool


class Builder:
    """Makes nodes. Interns them, folds trivial moves and casts, and attaches the current ``origin``."""

    def __init__(self) -> None:
        self._table: dict[tuple[object, ...], Node] = {}
        self._next = 0
        self.origin: Origin | None = None

    def make(self, attrs: Attrs, args: Sequence[Node], type_: TensorType) -> Node:
        """Return the interned node. No folding is done here."""
        # bool, int and float values compare equal in Python, so the value's class and sign belong to the key
        extra = (type(attrs.value), str(attrs.value)) if isinstance(attrs, (Const, Pad)) else ()
        key = (attrs, tuple(a.uid for a in args), type_, extra)
        node = self._table.get(key)
        if node is None:
            node = Node(self._next, attrs, tuple(args), type_, self.origin)
            self._next += 1
            self._table[key] = node
        return node

    def input(self, name: str, type_: TensorType, strides: tuple[int, ...], role: str, position: int) -> Node:
        """A graph input."""
        return self.make(Input(name, position, strides, role), (), type_)

    def const(self, value: Scalar, dtype: DType) -> Node:
        """A scalar constant of shape ()."""
        value = float(value) if dtype.is_float else bool(value) if dtype is DType.BOOL else int(value)
        return self.make(Const(value), (), TensorType((), dtype))

    def iota(self, shape: Sequence[int], axis: int, dtype: DType = DType.I64) -> Node:
        """The index along ``axis``, of ``shape``."""
        return self.make(Iota(axis % len(shape)), (), TensorType(tuple(shape), dtype))

    def map(self, fn: str, *args: Node | Scalar) -> Node:
        """Pointwise ``fn``. Python numbers become constants of the node arguments' dtype; shapes broadcast."""
        nodes = [a for a in args if isinstance(a, Node)]
        typed = [a for a in nodes if fn != "where" or a.dtype is not DType.BOOL] or nodes
        lifted = [a if isinstance(a, Node) else self.const(a, typed[0].dtype) for a in args]
        shape = broadcast_shapes([a.shape for a in lifted])
        full = [a if a.is_a(Const) and shape else self.broadcast(a, shape) for a in lifted]
        return self.make(Map(fn), full, TensorType(shape, map_dtype(fn, [a.dtype for a in lifted])))

    def cast(self, x: Node, dtype: DType) -> Node:
        """Conversion to ``dtype``; identity when it already has it; constants fold."""
        if x.dtype is dtype:
            return x
        known = isinstance(x.attrs, Const) and (dtype.is_float or math.isfinite(x.attrs.value))
        if isinstance(x.attrs, Const) and known and (dtype in (DType.F32, DType.F64) or not dtype.is_float):
            return self.const(x.attrs.value, dtype)
        return self.make(Cast(), (x,), TensorType(x.shape, dtype))

    def reduce(self, fn: str, x: Node, axes: Iterable[int], keepdim: bool = False) -> Node:
        """Reduction over ``axes`` (negative allowed); with ``keepdim`` the reduced dims stay as size 1."""
        ax = tuple(sorted({a % x.type.rank for a in axes}))
        kept = tuple(s for i, s in enumerate(x.shape) if i not in ax)
        out = self.make(Reduce(fn, ax), (x,), TensorType(kept, x.dtype)) if ax else x
        full = tuple(1 if i in ax else s for i, s in enumerate(x.shape))
        return self.reshape(out, full) if keepdim else out

    def dot(self, a: Node, b: Node, dtype: DType, bias: Node | None = None) -> Node:
        """``[P, M, K] x [P, K, N] (+ [N]) -> [P, M, N]``."""
        shape = (a.shape[0], a.shape[1], b.shape[2])
        return self.make(Dot(), (a, b) if bias is None else (a, b, bias), TensorType(shape, dtype))

    def again(self, x: Node) -> Node:
        """``x`` for values that are to be computed once more."""
        return x if x.is_a(Const, Iota) else self.make(Again(), (x,), x.type)

    def permute(self, x: Node, perm: Sequence[int]) -> Node:
        """Permutation of dims; nested permutations compose."""
        p = tuple(i % x.type.rank for i in perm)
        if isinstance(x.attrs, Permute):
            inner = x.attrs.perm
            return self.permute(x.args[0], [inner[i] for i in p])
        if p == tuple(range(len(p))):
            return x
        return self.make(Permute(p), (x,), TensorType(tuple(x.shape[i] for i in p), x.dtype))

    def reshape(self, x: Node, shape: Sequence[int]) -> Node:
        """Row-major reshape; nested reshapes compose."""
        shape = tuple(shape)
        if x.is_a(Reshape):
            return self.reshape(x.args[0], shape)
        return x if shape == x.shape else self.make(Reshape(), (x,), TensorType(shape, x.dtype))

    def expand(self, x: Node, shape: Sequence[int]) -> Node:
        """Repeat dims of size 1; same rank."""
        shape = tuple(shape)
        if x.is_a(Expand):
            return self.expand(x.args[0], shape)
        return x if shape == x.shape else self.make(Expand(), (x,), TensorType(shape, x.dtype))

    def broadcast(self, x: Node, shape: Sequence[int]) -> Node:
        """NumPy broadcasting of ``x`` to ``shape``: new leading dims, then expansion."""
        shape = tuple(shape)
        return self.expand(self.reshape(x, (1,) * (len(shape) - x.type.rank) + x.shape), shape)

    def slice(self, x: Node, starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int] | None = None) -> Node:
        """Strided slice in every dim."""
        steps = tuple(steps) if steps is not None else (1,) * x.type.rank
        sizes = tuple(sizes)
        if sizes == x.shape and all(s == 1 for s, n in zip(steps, sizes, strict=True) if n > 1):
            return x
        return self.make(Slice(tuple(starts), steps), (x,), TensorType(sizes, x.dtype))

    def pad(self, x: Node, lo: Sequence[int], shape: Sequence[int], value: float = 0.0) -> Node:
        """Constant padding: ``lo`` before the input in each dim, up to ``shape``."""
        shape = tuple(shape)
        return x if shape == x.shape else self.make(Pad(tuple(lo), value), (x,), TensorType(shape, x.dtype))

    def concat(self, xs: Sequence[Node], axis: int) -> Node:
        """Concatenation along ``axis``; empty parts are dropped."""
        axis %= xs[0].type.rank
        parts = [x for x in xs if x.shape[axis] > 0] or list(xs[:1])
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[axis] = sum(p.shape[axis] for p in parts)
        return self.make(Concat(axis), parts, TensorType(tuple(shape), parts[0].dtype))

    def gather(self, table: Node, index: Node, axis: int) -> Node:
        """Elements of ``table`` at ``index`` along ``axis``; the other dims of both are the result's."""
        axis %= table.type.rank
        return self.make(Gather(axis), (table, index), TensorType(index.shape, table.dtype))

    def opaque(self, attrs: Opaque, args: Sequence[Node]) -> Node:
        """An ATen call run as is."""
        first = next(r for r in attrs.results if r is not None)
        return self.make(attrs, args, first)

    def pick(self, call: Node, index: int) -> Node:
        """Result ``index`` of an opaque call."""
        assert isinstance(call.attrs, Opaque)
        type_ = call.attrs.results[index]
        assert type_ is not None
        return self.make(Pick(index), (call,), type_)


def broadcast_shapes(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """NumPy broadcasting of shapes.

    Raises:
        ValueError: two sizes differ and neither is 1.
    """
    rank = max((len(s) for s in shapes), default=0)
    out = []
    for i in range(rank):
        sizes = {s[i - rank + len(s)] for s in shapes if i - rank + len(s) >= 0} - {1}
        if len(sizes) > 1:
            raise ValueError(f"shapes {shapes} do not broadcast")
        out.append(sizes.pop() if sizes else 1)
    return tuple(out)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    return _contiguous_strides(tuple(shape))


@functools.lru_cache(maxsize=4096)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
