"""Join two nests into one, or say why not."""

from __future__ import annotations

from dataclasses import replace

from megafuse.fusion.align import SplitRequest, alignments
from megafuse.ir.nest import Nest, Root, Space
from megafuse.ir.trace import Memory, NestError, Trace, trace_nest

MAX_SPLITS = 8
NO_COMMON_WALK = "the values they share are read along other axes by one than by the other, so no one walk serves both"
ENOUGH = 2  # legal joins of one pair to compare; they come best evidence first


def merge_nests(first: Trace, second: Trace, materialised: Memory) -> list[Trace]:
    """All legal merges of two traced nests (in the first's axes).

    Raises:
        NestError: there is none; the text gives the first reason met.
    """
    merged: list[Trace] = []
    reasons: list[str] = []
    _try_merges(first, second, materialised, merged, reasons, {(first.nest, second.nest)}, MAX_SPLITS)
    if not merged:
        raise NestError(reasons[0] if reasons else NO_COMMON_WALK)
    return merged


def _try_merges(
    first: Trace,
    second: Trace,
    materialised: Memory,
    merged: list[Trace],
    reasons: list[str],
    tried: set[tuple[Nest, Nest]],
    budget: int,
) -> None:
    for aligned in alignments(first, second):
        if isinstance(aligned, SplitRequest):
            if budget:
                pair = [first, second]
                pair[aligned.which] = trace_nest(
                    pair[aligned.which].nest.split(aligned.axis, aligned.inner), materialised
                )
                key = (pair[0].nest, pair[1].nest)
                if key in tried:
                    continue
                tried.add(key)
                _try_merges(pair[0], pair[1], materialised, merged, reasons, tried, budget - 1)
                if merged:
                    return
            continue
        for space in _spaces(first.nest, aligned):
            try:
                nest = join(first.nest, aligned, space)
                if all(nest != other.nest for other in merged):
                    merged.append(trace_nest(nest, materialised))
            except NestError as error:
                reasons.append(str(error))
        if len(merged) >= ENOUGH:
            return


def _spaces(first: Nest, second: Nest) -> list[Space]:
    """Divisions of the common axes into rows and columns worth trying."""
    if first.flexible and not second.flexible:
        return [second.space]
    if not first.flexible and second.flexible:
        return [first.space]
    out = [first.space, second.space]
    return out[:1] if set(out[0].rows) == set(out[1].rows) and set(out[0].cols) == set(out[1].cols) else out


def join(first: Nest, second: Nest, space: Space) -> Nest:
    """The roots of both nests over ``space``, each reduction turned the way the space asks.

    Raises:
        NestError: a root does not walk the space, or reduces over rows and columns at once.
    """
    anchors = {r.anchor for r in first.roots}
    roots = [*first.roots, *(r for r in second.roots if r.anchor not in anchors)]
    flexible = first.flexible and second.flexible
    return Nest(space, tuple(orient(r, space) for r in roots), flexible)


def orient(root: Root, space: Space) -> Root:
    """Make a root a row or a column reduction of ``space``; check that it walks the whole space.

    Raises:
        NestError: it does neither.
    """
    rows, cols = space.row_names, space.col_names
    name = repr(root.anchor.value)
    if root.axes != rows | cols and root.axes != rows:
        raise NestError(f"{name} is computed along other axes than a walk that serves both would have")
    reduced = root.reduced_axes
    if root.arg_index is None:
        return root
    if reduced == cols and root.axes == rows | cols:
        return replace(root, by_rows=False)
    if reduced <= rows:
        return replace(root, by_rows=True)
    raise NestError(f"{name} reduces over rows and columns of a common walk at once; a walk can do one of them")
