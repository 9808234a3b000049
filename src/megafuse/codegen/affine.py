"""Arithmetic on affine indices: which axes run together, and which guards can fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megafuse.codegen.program import Affine, Axis, Guard
from megafuse.core.sizes import may_exceed


@dataclass(frozen=True)
class Run:
    """Adjacent axes ``first..last`` of a flattened index that one stride walks: ``(flat // below) % size * stride``.

    ``below`` is the product of the axes after the run and ``size`` that of the run; ``first == 0`` needs no ``%`` and
    ``below == 1`` no ``//``.
    """

    first: int
    last: int
    stride: int
    below: int
    size: int


def _strides(affine: Affine) -> dict[str, int]:
    total: dict[str, int] = {}
    for name, stride in affine.terms:
        total[name] = total.get(name, 0) + stride
    return total


def runs(affine: Affine, axes: Sequence[Axis]) -> list[Run]:
    """The part of ``affine`` over ``axes`` (flattened row-major) as few runs: merged where the strides allow it.

    Axes of size one add nothing: they extend a run or are left out.
    """
    strides = _strides(affine)
    found: list[Run] = []
    below = 1
    for at in reversed(range(len(axes))):
        size, stride = axes[at].size, strides.get(axes[at].name, 0)
        head = found[-1] if found else None
        if head and head.first == at + 1 and (size == 1 or stride == head.stride * head.size):
            found[-1] = Run(at, head.last, head.stride, head.below, head.size * size)
        elif stride and size != 1:
            found.append(Run(at, at, stride, below, size))
        below *= size
    return found[::-1]


def bounds(affine: Affine, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Smallest and largest value of ``affine`` while each axis stays in its range."""
    spans = [stride * (sizes[name] - 1) for name, stride in _strides(affine).items()]
    return affine.const + sum(min(0, s) for s in spans), affine.const + sum(max(0, s) for s in spans)


def needed(guard: Guard, sizes: Mapping[str, int]) -> tuple[bool, bool]:
    """Whether the lower and the upper bound of ``guard`` can fail at all."""
    low, high = bounds(guard.index, sizes)
    return may_exceed(guard.lo, low), may_exceed(high + 1, guard.hi)
