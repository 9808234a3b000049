"""Find the correspondence between the axes of two nests through the values that both touch."""

from __future__ import annotations

from collections.abc import Iterator

from megafuse.core.sizes import divides, typical
from megafuse.ir.graph import Node
from megafuse.ir.index import Affine, Index
from megafuse.ir.nest import Nest, rename_axes
from megafuse.ir.trace import Trace

MAX_SEEDS = 6


class SplitRequest(Exception):
    """Nest ``which`` (0 or 1) needs ``axis`` cut at ``inner`` before its axes can match the other's."""

    def __init__(self, which: int, axis: str, inner: int) -> None:
        super().__init__(f"nest {which}: axis {axis} must be split at {inner}")
        self.which, self.axis, self.inner = which, axis, inner


def alignments(first: Trace, second: Trace) -> Iterator[Nest | SplitRequest]:
    """Versions of the second nest written in the axes of the first, best evidence first.

    A :class:`SplitRequest` asks for a finer axis instead; the caller splits, traces again and calls again.
    """
    pairs = shared_indices(first, second)
    seen: set[tuple[tuple[str, str], ...]] = set()
    for seed in range(min(len(pairs), MAX_SEEDS)):
        order = [pairs[seed], *pairs[:seed], *pairs[seed + 1 :]]
        try:
            mapping = _map_axes(first.nest, second.nest, order)
        except SplitRequest as request:
            yield request
            continue
        key = tuple(sorted(mapping.items()))
        if mapping and key not in seen:
            seen.add(key)
            yield rename_axes(second.nest, mapping)


def shared_indices(first: Trace, second: Trace) -> list[tuple[Index, Index]]:
    """Index pairs (in the first nest, in the second) of values that both touch: dependencies, then large loads."""
    out: list[tuple[int, Index, Index]] = []
    made_first, made_second = _made(first.nest), _made(second.nest)
    for load in second.loads():
        out.extend((2**62, ix, load.index) for ix in made_first.get(load.node, ()))
    for load in first.loads():
        out.extend((2**62, load.index, ix) for ix in made_second.get(load.node, ()))
    by_node: dict[Node, list[Index]] = {}
    for load in first.loads():
        by_node.setdefault(load.node, []).append(load.index)
    for load in second.loads():
        out.extend((typical(load.node.type.numel), ix, load.index) for ix in by_node.get(load.node, ()))
    unique = {(a, b): -weight for weight, a, b in sorted(out, key=lambda t: t[0])}
    return sorted(unique, key=lambda pair: (unique[pair], _offset(pair[0]) != _offset(pair[1])))


def _offset(index: Index) -> tuple[int, ...]:
    return tuple(ix.const for ix in index)


def _made(nest: Nest) -> dict[Node, list[Index]]:
    out: dict[Node, list[Index]] = {}
    for root in nest.roots:
        if root.anchor.part is None:
            out.setdefault(root.anchor.node, []).append(root.index)
    return out


def _map_axes(first: Nest, second: Nest, pairs: list[tuple[Index, Index]]) -> dict[str, str]:
    """Axis names of ``second`` -> names of ``first``; {} where the pairs do not determine a full mapping."""
    sizes = (first.space.sizes, second.space.sizes)
    mapping: dict[str, str] = {}
    for n, (a, b) in enumerate(pairs):
        try:
            found = _unify(a, b, sizes)
        except SplitRequest:
            if n == 0:
                raise
            continue
        merged = _merge(mapping, found) if found is not None else None
        if merged is not None:
            mapping = merged
        elif n == 0:
            return {}
    return _complete(first, second, mapping)


def _merge(mapping: dict[str, str], found: dict[str, str]) -> dict[str, str] | None:
    out = dict(mapping)
    for k, v in found.items():
        if out.setdefault(k, v) != v:
            return None
    return out if len(set(out.values())) == len(out) else None


def _complete(first: Nest, second: Nest, mapping: dict[str, str]) -> dict[str, str]:
    """Pair what is left by position and size, rows with rows and columns with columns."""
    taken = set(mapping.values())
    for ours, theirs in ((first.space.rows, second.space.rows), (first.space.cols, second.space.cols)):
        left = [a for a in ours if a.name not in taken]
        todo = [a for a in theirs if a.name not in mapping]
        if not todo:
            continue
        if [a.size for a in left] != [a.size for a in todo]:
            return {}
        mapping = mapping | {t.name: a.name for t, a in zip(todo, left, strict=True)}
    return mapping


def _unify(a: Index, b: Index, sizes: tuple[dict[str, int], dict[str, int]]) -> dict[str, str] | None:
    out: dict[str, str] = {}
    for x, y in zip(a, b, strict=True):
        found = _unify_dim(x, y, sizes)
        merged = _merge(out, found) if found is not None else None
        if merged is None:
            return None
        out = merged
    return out


def _unify_dim(x: Affine, y: Affine, sizes: tuple[dict[str, int], dict[str, int]]) -> dict[str, str] | None:
    ours = sorted(x.terms, key=lambda t: abs(typical(t[1])))
    theirs = sorted(y.terms, key=lambda t: abs(typical(t[1])))
    out: dict[str, str] = {}
    for (name, stride), (other, step) in zip(ours, theirs, strict=False):
        if stride != step:
            return None
        n, m = sizes[0][name], sizes[1][other]
        if n != m:
            if divides(n, m):
                raise SplitRequest(1, other, n)
            if divides(m, n):
                raise SplitRequest(0, name, m)
            return None
        out[other] = name
    return out if len(ours) == len(theirs) else None
