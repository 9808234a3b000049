"""Evaluate a nest symbolically: which loads, maps and reductions it needs, at which indices.

The trace is demand-driven, from the roots back to values in memory. A node read at two different indices is evaluated
twice (its loads differ); moves only change indices. Legality is decided here: what cannot be computed inside the nest
raises :class:`NestError` with the reason, which ``explain`` prints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megafuse.core.dtypes import DType
from megafuse.core.sizes import OpenSize
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.index import (
    ZERO,
    Affine,
    Guard,
    Index,
    NeedSplit,
    NotAffine,
    axis_index,
    combine,
    guard_decides,
    pull_back,
    split_linear,
)
from megafuse.ir.nest import Nest, Root
from megafuse.ir.types import (
    MOVES,
    Cast,
    Concat,
    Const,
    Dot,
    Gather,
    Input,
    Iota,
    Map,
    Opaque,
    Pad,
    Pick,
    Reduce,
    Reshape,
)

_NONE: frozenset[str] = frozenset()
_ALWAYS_IN_MEMORY = (Input, Dot, Opaque, Pick)  # a tuple: unions are rebuilt on every use, and this runs a lot


class Memory(frozenset[Node]):
    """Nodes that are read from memory. ``flat``: those laid out contiguously, which any reshape can read by address."""

    flat: frozenset[Node]

    def __new__(cls, nodes: Iterable[Node] = (), flat: Iterable[Node] = ()) -> Memory:
        """The set ``nodes``, of which ``flat`` are contiguous."""
        self = super().__new__(cls, nodes)
        self.flat = frozenset(flat)
        return self

    def replace(self, without: Iterable[Node], plus: Iterable[Node]) -> Memory:
        """The same less some nodes, with others (contiguous ones) added."""
        new = frozenset(plus)
        return Memory(self - frozenset(without) | new, self.flat | new)


class NestError(Exception):
    """These roots cannot share a nest; the text says why. ``culprit``: a value that, given memory, would help."""

    def __init__(self, reason: str, culprit: Node | None = None) -> None:
        super().__init__(reason)
        self.culprit = culprit


@dataclass(frozen=True)
class Lookup:
    """What an integer that was read before adds to an index: ``step * value`` in dim ``dim``."""

    dim: int
    step: int


@dataclass(eq=False, slots=True)
class Inst:
    """One value at one index; not changed once made (but not frozen: planning makes hundreds of thousands).

    ``kind``: load, const, iota, inside, within (the argument is in ``range(size)``), map, cast, reduce (over the
    columns). A load by index has two arguments for each of ``lookups``: the integer, and whether it is in the table.
    A load of several ``parts`` adds up as many elements, along the leading dims of what it reads, which lie one after
    the other.
    """

    kind: str
    node: Node
    dtype: DType
    axes: frozenset[str]
    args: tuple[Inst, ...] = ()
    index: Index = ()
    guards: tuple[Guard, ...] = ()
    fn: str = ""
    value: float | int | bool = 0
    size: int = 0
    lookups: tuple[Lookup, ...] = ()
    parts: int = 1

    @property
    def computes(self) -> bool:
        """It is arithmetic of some line of the user's. A cast that loses nothing is not: several lines may share it."""
        if self.kind == "cast":
            source = self.args[0].dtype
            return not (source.is_float and self.dtype.is_float and self.dtype.size > source.size)
        return self.kind in ("map", "reduce")


@dataclass(frozen=True, eq=False)
class Trace:
    """The instances of one nest in evaluation order, and the value of each root.

    ``visited``: the nodes that were looked at. Whether these have memory, and how it is laid out, decided the trace.
    """

    nest: Nest
    insts: tuple[Inst, ...]
    roots: Mapping[Root, Inst]
    visited: frozenset[Node] = frozenset()

    def loads(self) -> tuple[Inst, ...]:
        """All loads."""
        return self._loads

    def loaded(self) -> frozenset[Node]:
        """Nodes read from memory."""
        return self._loaded

    @functools.cached_property
    def _loads(self) -> tuple[Inst, ...]:
        return tuple(i for i in self.insts if i.kind == "load")

    @functools.cached_property
    def _loaded(self) -> frozenset[Node]:
        return frozenset(i.node for i in self._loads)


def trace_nest(
    nest: Nest,
    materialised: Memory,
    overrides: Mapping[Node, Node] | None = None,
    summed: frozenset[Node] = frozenset(),
) -> Trace:
    """Trace ``nest``, splitting axes as its moves require. The result's ``nest`` has the finer axes.

    ``materialised`` nodes are read from memory unless the nest itself computes them at the same index. ``overrides``
    replaces nodes before they are looked at (a column sum by the sum of its partials). Sums over the leading dims of
    ``summed`` values are made where these are loaded.

    Raises:
        NestError: some value cannot be computed inside the nest.
    """
    for _ in range(64):
        try:
            return _Tracer(nest, materialised, overrides or {}, summed).run()
        except NeedSplit as need:
            nest = nest.split(need.axis, need.inner)
        except NotAffine as bad:
            raise NestError(f"the columns do not follow the walk's axes: {bad}") from None
        except OpenSize as question:
            raise NestError(f"{question}: it depends on the size") from None
    raise NestError("its axes were split 64 times without an end")


class _Tracer:
    def __init__(
        self, nest: Nest, materialised: Memory, overrides: Mapping[Node, Node], summed: frozenset[Node]
    ) -> None:
        self.nest, self.materialised, self.overrides, self.summed = nest, materialised, overrides, summed
        self.sizes = dict(nest.space.sizes)
        self.looked_up: dict[str, tuple[Inst, Inst]] = {}  # indices are written with an axis for each integer read
        self.row_names, self.col_names = nest.space.row_names, nest.space.col_names
        self.own = {r.anchor.node: r for r in nest.roots if r.anchor.part is None}
        self.own_concats = {r.anchor.node for r in nest.roots if r.anchor.part is not None}
        self.memo: dict[tuple[Node, Index, tuple[Guard, ...]], Inst] = {}
        self.insts: list[Inst] = []

    def run(self) -> Trace:
        roots: dict[Root, Inst] = {}
        for root in self.nest.roots:
            if root.by_rows:
                assert root.arg_index is not None
                roots[root] = self.visit(root.anchor.node.args[0], root.arg_index, ())
            else:
                roots[root] = self.visit(root.anchor.value, root.index, ())
        visited = frozenset(node for node, _, _ in self.memo)
        return Trace(self.nest, tuple(self.insts), roots, visited | {i.node for i in self.insts if i.kind == "load"})

    def visit(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Inst:
        node = self.overrides.get(node, node)
        key = (node, index, guards)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self.evaluate(node, index, guards)
        return found

    def evaluate(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Inst:
        attrs = node.attrs
        if isinstance(attrs, Const):
            return self.add(Inst("const", node, node.dtype, frozenset(), value=attrs.value))
        root = self.own.get(node)
        if node in self.own_concats:
            raise NestError(f"it needs all of {node!r} while storing a part of it")
        if root is not None and root.by_rows:
            raise NestError(f"{node!r} is complete only after the walk, and needed during it")
        if root is not None and root.index != index:
            raise NestError(f"it needs other elements of {node!r} than the one computed at that point of the walk")
        by_index = isinstance(attrs, Iota) and not index[attrs.axis].axes.isdisjoint(self.looked_up)
        in_memory = node in self.materialised and (by_index or not isinstance(attrs, Iota))
        if root is None and (in_memory or isinstance(attrs, _ALWAYS_IN_MEMORY)):
            return self.load(node, index, guards)
        if isinstance(attrs, Iota):
            if by_index:
                raise NestError(f"{node!r} is read by index", node)
            return self.add(Inst("iota", node, node.dtype, index[attrs.axis].axes, index=(index[attrs.axis],)))
        if isinstance(attrs, Gather):
            return self.evaluate_gather(node, index, guards)
        if isinstance(attrs, MOVES):
            return self.evaluate_move(node, index, guards)
        if isinstance(attrs, Reduce):
            return self.evaluate_reduce(node, index, guards)
        assert isinstance(attrs, (Map, Cast))
        args = tuple([self.visit(a, index if a.shape else (), guards) for a in node.args])  # no frame of C a level
        axes = _NONE.union(*(a.axes for a in args))
        if isinstance(attrs, Cast):
            return self.add(Inst("cast", node, node.dtype, axes, args))
        return self.add(Inst("map", node, node.dtype, axes, args, fn=attrs.fn))

    def load(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Inst:
        """A value in memory, at an index that may hold integers read before."""
        axes = _NONE.union(*(ix.axes for ix in index))
        if axes.isdisjoint(self.looked_up):
            return self.add(Inst("load", node, node.dtype, axes, index=index, guards=guards))
        lookups: list[Lookup] = []
        args: list[Inst] = []
        for dim, ix in enumerate(index):
            for name, step in ix.terms:
                if name in self.looked_up:
                    lookups.append(Lookup(dim, step))
                    args.extend(self.looked_up[name])
        plain = tuple(Affine(tuple(t for t in ix.terms if t[0] not in self.looked_up), ix.const) for ix in index)
        axes = _NONE.union(*(ix.axes for ix in plain), *(a.axes for a in args))
        return self.add(Inst("load", node, node.dtype, axes, tuple(args), plain, guards, lookups=tuple(lookups)))

    def load_sum(self, node: Node, source: Node, index: Index, guards: tuple[Guard, ...]) -> Inst:
        """The sum ``node`` over the leading dims of ``source``."""
        axes = _NONE.union(*(ix.axes for ix in index))
        if guards or not axes.isdisjoint(self.looked_up):
            raise NestError(f"{node!r} would be added up where it may not be wanted", node)
        lead = source.shape[: len(source.shape) - len(index)]
        where = (*(ZERO for _ in lead), *index)
        return self.add(Inst("load", source, node.dtype, axes, index=where, parts=math.prod(lead)))

    def evaluate_gather(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Inst:
        """The table where an integer says, which is read first; NaN (or 0) where it lies outside of the table.

        The table is evaluated at an index with an axis of its own for the integer, whatever stands between it and
        memory: what is loaded there is loaded by index.
        """
        assert isinstance(node.attrs, Gather)
        table, axis = node.args[0], node.attrs.axis
        size = table.shape[axis]
        at = self.visit(node.args[1], index, guards)
        outside = float("nan") if node.dtype.is_float else 0
        nothing = self.add(Inst("const", node, node.dtype, frozenset(), value=outside))
        known = Affine((), int(at.value)) if at.kind == "const" else at.index[0] if at.kind == "iota" else None
        inside = guard_decides(Guard(known, 0, size), self.sizes) if known is not None else None
        if known is not None and inside is not None:
            moved = tuple(known if d == axis else ix for d, ix in enumerate(index))
            return self.visit(table, moved, guards) if inside else nothing
        within = self.add(Inst("within", node, DType.BOOL, at.axes, (at,), size=size))
        name = f"@{len(self.looked_up)}"
        self.looked_up[name], self.sizes[name] = (at, within), size
        moved = tuple(Affine(((name, 1),)) if d == axis else ix for d, ix in enumerate(index))
        found = self.visit(table, moved, guards)
        args = (within, found, nothing)
        return self.add(Inst("map", node, node.dtype, within.axes | found.axes, args, fn="where"))

    def evaluate_move(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Inst:
        """Pull the index through; parts of a concat or pad become a chain of ``where``."""
        try:
            pulled = pull_back(node, index, self.sizes)
        except NotAffine as bad:
            return self.load_flat(node, index, guards, bad)
        except NeedSplit as need:
            if need.axis not in self.looked_up:
                raise
            return self.load_flat(node, index, guards, NotAffine("an integer that was read cannot be split"))
        if not isinstance(node.attrs, Pad | Concat):
            (arg, moved, _) = pulled[0]
            return self.visit(arg, moved, guards)
        result: Inst | None = None
        if isinstance(node.attrs, Pad):
            fill = node.attrs.value
            result = self.add(
                Inst("const", node, node.dtype, frozenset(), value=fill if node.dtype.is_float else int(fill))
            )
        for arg, moved, extra in reversed(pulled):
            decided = [guard_decides(g, self.sizes) for g in extra]
            if False in decided:
                continue
            open_guards = tuple(g for g, d in zip(extra, decided, strict=True) if d is None)
            if any(not g.index.axes.isdisjoint(self.looked_up) for g in open_guards):
                raise NestError(f"parts of {node!r} are read by index", node)
            value = self.visit(arg, moved, guards + open_guards)
            if result is None or not open_guards:
                result = value
                continue
            axes = _NONE.union(*(g.index.axes for g in open_guards))
            inside = self.add(Inst("inside", node, DType.BOOL, axes, guards=open_guards))
            args = (inside, value, result)
            result = self.add(Inst("map", node, node.dtype, axes | value.axes | result.axes, args, fn="where"))
        assert result is not None
        return result

    def load_flat(self, node: Node, index: Index, guards: tuple[Guard, ...], bad: NotAffine) -> Inst:
        """A reshape that shares no factorisation with its argument reads contiguous memory by address."""
        arg = node.args[0]
        if not isinstance(node.attrs, Reshape) or arg not in self.materialised.flat or arg in self.own or not arg.shape:
            raise NestError(f"a reshape does not follow the walk's axes: {bad}", arg) from None
        linear = combine(index, contiguous_strides(node.shape))
        flat = (*(ZERO for _ in arg.shape[1:]), linear)
        return self.load(arg, flat, guards)

    def evaluate_reduce(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Inst:
        """A reduction over exactly the nest's columns, for an index made of rows only; or one made while loading."""
        attrs = node.attrs
        assert isinstance(attrs, Reduce)
        arg = node.args[0]
        if arg in self.summed:
            return self.load_sum(node, arg, index, guards)
        kept_axes = _NONE.union(*(ix.axes for ix in index))
        reduced = [arg.shape[a] for a in attrs.axes]
        if not kept_axes <= self.row_names:
            raise NestError(f"{attrs.fn} {node!r} is wanted per column of the walk, not per row")
        total = 1
        for n in reduced:
            total *= n
        if total != self.nest.space.num_cols:
            raise NestError(
                f"{attrs.fn} {node!r} runs over {total} elements, the walk's rows have {self.nest.space.num_cols}"
            )
        cols = split_linear(axis_index(self.nest.space.cols), reduced, self.sizes)
        inner = list(index)
        for axis, ix in zip(attrs.axes, cols, strict=True):
            inner.insert(axis, ix)
        outer = tuple(g for g in guards if not g.index.axes & self.col_names)  # the sum has columns of its own
        value = self.visit(arg, tuple(inner), outer)
        return self.add(
            Inst("reduce", node, node.dtype, value.axes & self.row_names, (value,), index=index, fn=attrs.fn)
        )

    def add(self, inst: Inst) -> Inst:
        self.insts.append(inst)
        return inst
