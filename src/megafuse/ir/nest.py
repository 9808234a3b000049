"""Nests: a set of values computed in one walk over a space of row and column axes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megafuse.ir.graph import Node
from megafuse.ir.index import Affine, Axis, Index, substitute_axis
from megafuse.ir.types import Concat


@dataclass(frozen=True)
class Anchor:
    """A value that gets memory of its own. ``part`` names one argument of a concat, which is stored into its slice."""

    node: Node
    part: int | None = None

    @property
    def value(self) -> Node:
        """The node that is computed: the anchor's node or, for a part, that argument of the concat."""
        return self.node if self.part is None else self.node.args[self.part]

    def placed(self, index: Index) -> Index:
        """An index of the value as one of the node: shifted along the concat's axis where the value is a part."""
        if self.part is None:
            return index
        assert isinstance(self.node.attrs, Concat)
        axis = self.node.attrs.axis
        start = sum(p.shape[axis] for p in self.node.args[: self.part])
        return tuple(ix.shift(start) if d == axis else ix for d, ix in enumerate(index))


@dataclass(frozen=True)
class Space:
    """The iteration space of a nest: row axes (walked) and column axes (held in the tile)."""

    rows: tuple[Axis, ...]
    cols: tuple[Axis, ...]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Axis sizes by name."""
        return {a.name: a.size for a in (*self.rows, *self.cols)}

    @functools.cached_property
    def row_names(self) -> frozenset[str]:
        """Names of the row axes."""
        return frozenset(a.name for a in self.rows)

    @functools.cached_property
    def col_names(self) -> frozenset[str]:
        """Names of the column axes."""
        return frozenset(a.name for a in self.cols)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return math.prod(a.size for a in self.rows)

    @property
    def num_cols(self) -> int:
        """Number of columns."""
        return math.prod(a.size for a in self.cols)

    def split(self, axis: str, inner: int) -> tuple[Space, tuple[tuple[str, int], ...]]:
        """Cut ``axis`` into (size / inner, inner). Returns the new space and the old axis as (part, stride) pairs."""

        def cut(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            out: list[Axis] = []
            for a in axes:
                out.extend([Axis(a.name + "a", a.size // inner), Axis(a.name + "b", inner)] if a.name == axis else [a])
            return tuple(out)

        return Space(cut(self.rows), cut(self.cols)), ((axis + "a", inner), (axis + "b", 1))


@dataclass(frozen=True)
class Root:
    """One value that a nest computes for others.

    ``index``: the value's index in nest axes. Reductions also have ``arg_index``, the index of their argument.
    ``by_rows``: a *column reduction*, over row axes of the nest; its result is complete only after the walk. Any other
    reduction runs over exactly the columns (a *row reduction*).
    """

    anchor: Anchor
    index: Index
    arg_index: Index | None = None
    by_rows: bool = False

    @property
    def full_index(self) -> Index:
        """The argument's index for reductions, the value's own otherwise."""
        return self.index if self.arg_index is None else self.arg_index

    @property
    def axes(self) -> frozenset[str]:
        """Axes of the domain that the root walks."""
        return frozenset().union(*(ix.axes for ix in self.full_index)) if self.full_index else frozenset()

    @property
    def reduced_axes(self) -> frozenset[str]:
        """Axes over which the root reduces; empty for maps."""
        kept = frozenset().union(*(ix.axes for ix in self.index)) if self.index else frozenset()
        return self.axes - kept

    def split(self, axis: str, parts: tuple[tuple[str, int], ...]) -> Root:
        """The same root after ``axis`` was cut into ``parts``."""

        def sub(ix: tuple[Affine, ...]) -> Index:
            return tuple(substitute_axis(i, axis, parts) for i in ix)

        return replace(self, index=sub(self.index), arg_index=None if self.arg_index is None else sub(self.arg_index))


@dataclass(frozen=True)
class Nest:
    """Values computed in one walk over a space. ``flexible``: no reduction fixes which axes are rows and columns."""

    space: Space
    roots: tuple[Root, ...]
    flexible: bool = False

    def split(self, axis: str, inner: int) -> Nest:
        """The same nest with a finer axis."""
        space, parts = self.space.split(axis, inner)
        return replace(self, space=space, roots=tuple(r.split(axis, parts) for r in self.roots))

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        """The anchors of the roots."""
        return tuple(r.anchor for r in self.roots)


def rename_axes(nest: Nest, names: Mapping[str, str]) -> Nest:
    """Rename axes of a nest."""

    def fix(ix: Affine) -> Affine:
        return Affine(tuple((names.get(n, n), s) for n, s in ix.terms), ix.const)

    def fix_axes(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(Axis(names.get(a.name, a.name), a.size) for a in axes)

    roots = tuple(
        replace(
            r,
            index=tuple(map(fix, r.index)),
            arg_index=None if r.arg_index is None else tuple(map(fix, r.arg_index)),
        )
        for r in nest.roots
    )
    return replace(nest, space=Space(fix_axes(nest.space.rows), fix_axes(nest.space.cols)), roots=roots)
