"""The nest that each anchor starts with, before anything is merged."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megafuse.core.sizes import typical
from megafuse.ir.index import ZERO, Affine, Axis, Index
from megafuse.ir.nest import Anchor, Nest, Root, Space
from megafuse.ir.types import Reduce

MIN_COLUMNS = 512


def initial_nests(anchor: Anchor, prefix: str) -> tuple[Nest, ...]:
    """Forms in which ``anchor`` can be computed alone, the preferred one first.

    A map is flexible: its trailing dims are columns. A reduction has a *row form* (reduced dims are columns) and, when
    trailing dims are kept, a *column form* (reduced dims are rows); it prefers the one whose columns are contiguous.
    """
    attrs = anchor.value.attrs
    if anchor.part is not None or not isinstance(attrs, Reduce):
        return (_map_nest(anchor, prefix),)
    shape = anchor.value.args[0].shape
    axes = [Axis(f"{prefix}{d}", n) for d, n in enumerate(shape)]
    index = _index(axes)
    kept = [a for d, a in enumerate(axes) if d not in attrs.axes]
    root = Root(anchor, _index(kept), index)
    rows, cols = _real(kept), _real([axes[d] for d in attrs.axes])
    row_form = Nest(Space(rows, cols), (root,))
    tail = _kept_tail(attrs.axes, len(shape))
    if not _real(axes[tail:]):
        return (row_form,)
    col_form = Nest(Space(_real(axes[:tail]), _real(axes[tail:])), (Root(anchor, _index(kept), index, by_rows=True),))
    return (col_form, row_form)


def _map_nest(anchor: Anchor, prefix: str) -> Nest:
    shape = anchor.value.shape
    axes = [Axis(f"{prefix}{d}", n) for d, n in enumerate(shape)]
    cut = len(shape)
    while cut > 0 and (cut == len(shape) or typical(math.prod(shape[cut:])) < MIN_COLUMNS):
        cut -= 1
        if typical(math.prod(shape[cut:])) > 8 * MIN_COLUMNS and cut < len(shape) - 1:
            cut += 1
            break
    return Nest(Space(_real(axes[:cut]), _real(axes[cut:])), (Root(anchor, _index(axes)),), flexible=True)


def _kept_tail(reduced: Sequence[int], rank: int) -> int:
    """First dim of the longest suffix of kept dims."""
    tail = rank
    while tail > 0 and tail - 1 not in reduced:
        tail -= 1
    return tail


def _real(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    return tuple(a for a in axes if a.size != 1)


def _index(axes: Sequence[Axis]) -> Index:
    return tuple(Affine(((a.name, 1),)) if a.size != 1 else ZERO for a in axes)
