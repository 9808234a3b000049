"""Several captures of one callable at different sizes become one, in which the sizes are open.

Whole numbers that differ between the captures are written in the open sizes: by interpolation between the corners of a
box of sizes, held against further captures. Numbers that are no sizes (the 1/n of a mean over the batch) become inputs
without dims, whose values the host computes. What differs otherwise means that the callable does another thing at
another size, and keeps the captures apart.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megafuse.capture.types import Captured, Leaf
from megafuse.core.dtypes import DType
from megafuse.core.sizes import Dim, is_open, open_size, settle
from megafuse.ir.graph import Builder, Graph, Node
from megafuse.ir.types import Const, Input, Map, TensorType

Point = Mapping[str, int]
FACTORS = (1.0, 2.0, 0.5, -1.0, -2.0, -0.5)  # of a scalar that is made of a size


class Differs(Exception):
    """Captures at different sizes are not one with open sizes; the text says why."""


@dataclass(frozen=True)
class Scalar:
    """A number that the host computes: ``factor * size`` or, where it ``divides``, ``factor / size``."""

    dtype: DType
    factor: float
    size: int
    divides: bool

    def at(self, values: Point) -> float:
        """Its value at given sizes."""
        size = settle(self.size, values)
        return self.factor / size if self.divides else self.factor * size


def corners(low: Point, high: Point) -> list[Point]:
    """The corners of a box of sizes, in the order that ``unify`` wants."""
    sides = [(low[name], high[name]) for name in low]
    return [dict(zip(low, values, strict=True)) for values in itertools.product(*sides)]


def unify(captures: Sequence[Captured], points: Sequence[Point], dims: Sequence[Dim]) -> tuple[Captured, list[Scalar]]:
    """One capture with open sizes ``dims`` that is ``captures[i]`` at ``points[i]``, and the scalars it takes.

    ``points`` are the corners of a box (see ``corners``), then at least one more. The scalars are inputs between the
    leaves and the tangents.

    Raises:
        Differs: there is none.
    """
    return _Unifier(captures, points, dims).run()


class _Unifier:
    def __init__(self, captures: Sequence[Captured], points: Sequence[Point], dims: Sequence[Dim]) -> None:
        self.captures, self.points, self.dims = captures, points, dims
        self.builder = Builder()
        self.scalars: list[Scalar] = []
        self.first_scalar = len(captures[0].leaves)

    def run(self) -> tuple[Captured, list[Scalar]]:
        graphs = [c.graph for c in self.captures]
        counts = sorted({len(g.nodes) for g in graphs})
        if len(counts) > 1:
            raise Differs(f"its graph has {' or '.join(map(str, counts))} values, depending on the size")
        rows = list(zip(*(g.nodes for g in graphs), strict=True))
        found = {row[0]: s for row in rows if (s := self.scalar(row)) is not None}
        self.scalars = list(dict.fromkeys(found.values()))
        new: dict[Node, Node] = {}
        numbers = [{node: at for at, node in enumerate(g.nodes)} for g in graphs]
        for row in rows:
            self.equal([[at[a] for a in n.args] for at, n in zip(numbers, row, strict=True)], row[0])
            one = found.get(row[0])
            new[row[0]] = self.node(row, [new[a] for a in row[0].args]) if one is None else self.input(one)
        self.equal([[n and at[n] for n in g.outputs] for at, g in zip(numbers, graphs, strict=True)])
        inputs = [new[n] for n in graphs[0].inputs]
        inputs[self.first_scalar : self.first_scalar] = map(self.input, self.scalars)
        outputs = tuple(None if n is None else new[n] for n in graphs[0].outputs)
        return self.captured(Graph(tuple(inputs), outputs, graphs[0].num_forward, graphs[0].grad_of)), self.scalars

    def captured(self, graph: Graph) -> Captured:
        """The capture around the graph."""
        first, every = self.captures[0], self.captures
        self.equal([(c.out_alias, c.out_shared, c.mutations, c.tangent_of, c.out_requires_grad) for c in every])
        if any(not _same_tensors(first.constants, c.constants) for c in every):
            raise Differs("it makes other constant tensors at other sizes")
        self.equal([[leaf.path for leaf in c.leaves] for c in every])
        rows = zip(*(c.leaves for c in every), strict=True)
        leaves = [self.value([replace(leaf, storage_offset=0) for leaf in row]) for row in rows]
        leaves += [
            Leaf("const", (i,), TensorType((), s.dtype), (), False, f"scalar {i}") for i, s in enumerate(self.scalars)
        ]
        return replace(
            first,
            graph=graph,
            leaves=tuple(leaves),
            out_strides=self.value([c.out_strides for c in every]),
            out_spec=replace(first.out_spec, leaves=self.value([c.out_spec.leaves for c in every])),
            calls=self.value([c.calls for c in every]),
        )

    # --- nodes --------------------------------------------------------------------------------------------------------

    def node(self, row: Sequence[Node], args: Sequence[Node]) -> Node:
        """The node that is ``row[i]`` in the i-th graph."""
        try:
            attrs, type_ = self.value([n.attrs for n in row]), self.value([n.type for n in row])
        except Differs as error:
            raise Differs(f"{error} at {row[0].origin or row[0]!r}") from None
        if isinstance(attrs, Input) and attrs.role == "tangent":
            attrs = replace(attrs, position=attrs.position + len(self.scalars))
        self.builder.origin = row[0].origin
        if isinstance(attrs, Map) and type_.shape:  # constants need no shape, inputs do
            args = [a if a.is_a(Const) else self.builder.broadcast(a, type_.shape) for a in args]
        return self.builder.make(attrs, args, type_)

    def input(self, scalar: Scalar) -> Node:
        """The input of a scalar."""
        number = self.scalars.index(scalar)
        position = self.first_scalar + number
        return self.builder.input(f"scalar_{number}", TensorType((), scalar.dtype), (), "buffer", position)

    def equal(self, values: Sequence[Any], node: Node | None = None) -> None:
        """All ``values`` are the same.

        Raises:
            Differs: they are not.
        """
        if any(v != values[0] for v in values[1:]):
            where = "in its outputs" if node is None else f"at {node.origin or repr(node)}"
            raise Differs(f"it computes something else at other sizes, {where}")

    # --- values -------------------------------------------------------------------------------------------------------

    def scalar(self, row: Sequence[Node]) -> Scalar | None:
        """The scalar that stands for constants of different values; None where they are equal, or no constants.

        Raises:
            Differs: they are not made of a size in a simple way.
        """
        consts = [n.attrs for n in row if isinstance(n.attrs, Const)]
        if len(consts) < len(row) or len({repr(c.value) for c in consts}) == 1:
            return None
        values, dtype = [c.value for c in consts], row[0].dtype
        for divides, factor in itertools.product((False, True), FACTORS):
            if divides and (not dtype.is_float or 0 in values):
                continue
            sizes = [factor / v if divides else v / factor for v in values]
            try:
                scalar = Scalar(dtype, factor, self.number([round(s) for s in sizes]), divides)
            except (Differs, OverflowError, ValueError):
                continue
            if is_open(scalar.size) and all(scalar.at(p) == v for p, v in zip(self.points, values, strict=True)):
                return scalar
        raise Differs(f"the constants {', '.join(map(str, values))} follow no simple rule")

    def value(self, values: Sequence[Any]) -> Any:
        """Records of equal form as one, whole numbers in the open sizes.

        Raises:
            Differs: they differ in something else.
        """
        first = values[0]
        if any(type(v) is not type(first) for v in values):
            raise Differs(f"it has {first!r} or {next(v for v in values if type(v) is not type(first))!r}")
        if type(first) is int:
            return self.number(values)
        if isinstance(first, tuple | list):
            if len({len(v) for v in values}) > 1:
                raise Differs("it has lists of other lengths at other sizes")
            return type(first)(self.value(items) for items in zip(*values, strict=True))
        if isinstance(first, dict):
            return {k: self.value([v.get(k) for v in values]) for k in first}
        if dataclasses.is_dataclass(first):
            parts = {f.name: self.value([getattr(v, f.name) for v in values]) for f in dataclasses.fields(first)}
            return replace(first, **parts)  # type: ignore[type-var]
        if any(v != first and repr(v) != repr(first) for v in values):
            raise Differs(f"it has {first!r} or {next(v for v in values if v != first)!r}")
        return first

    def number(self, values: Sequence[int]) -> int:
        """A whole number in the open sizes.

        Raises:
            Differs: it is no sum of products of them.
        """
        if len(set(values)) == 1:
            return values[0]
        found: Any = self.interpolate(values[: 2 ** len(self.dims)], self.dims)
        if any(settle(found, p) != v for p, v in zip(self.points, values, strict=True)):
            raise Differs(f"the sizes {', '.join(map(str, values))} follow no simple rule")
        return found  # type: ignore[no-any-return]

    def interpolate(self, values: Sequence[int], dims: Sequence[Dim]) -> Any:
        """The form with these values at the corners that differ in ``dims``."""
        if not dims:
            return values[0]
        name, half = dims[0].name, len(values) // 2
        low, high = self.points[0][name], self.points[2 ** len(self.dims) - 1][name]
        steps = [divmod(b - a, high - low) for a, b in zip(values[:half], values[half:], strict=True)]
        if any(rest for _, rest in steps):
            raise Differs(f"the sizes {', '.join(map(str, values))} follow no simple rule")
        slopes = [slope for slope, _ in steps]
        starts = [a - slope * low for a, slope in zip(values[:half], slopes, strict=True)]
        return self.interpolate(starts, dims[1:]) + self.interpolate(slopes, dims[1:]) * open_size(dims[0])


def _same_tensors(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(
        a is b or (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))
        for a, b in zip(first, second, strict=True)
    )
