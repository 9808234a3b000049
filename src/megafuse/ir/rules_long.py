"""Long reductions in two steps, so that many programs share the first one."""

from __future__ import annotations

import math

from megafuse.core.sizes import typical
from megafuse.ir.graph import Builder, Node
from megafuse.ir.rewrite import Rule, rule
from megafuse.ir.types import Reduce

MANY_RESULTS = 512  # results from which one program for each fills a GPU
LONG = 16384  # elements that one program may reduce alone
STEP = 8192  # most elements of the inner step


@rule(Reduce, differs="the order of additions")
def split_long_reduction(b: Builder, node: Node) -> Node | None:
    """reduce(x, axes) = reduce(reduce(x, last), rest), where few results each stand on many elements.

    Only reductions that end in the last axis are cut: others walk rows, and leave partials per program already. One
    long axis is cut at its largest divisor that is at most ``STEP``.
    """
    (x,) = node.args
    attrs = node.attrs
    assert isinstance(attrs, Reduce)
    rank = x.type.rank
    reduced = typical(math.prod(x.shape[a] for a in attrs.axes))
    if rank - 1 not in attrs.axes or typical(node.type.numel) >= MANY_RESULTS or reduced <= LONG:
        return None
    real = [a for a in attrs.axes if x.shape[a] > 1]
    if len(real) > 1:
        inner = b.reduce(attrs.fn, x, [real[-1]])
        return b.reduce(attrs.fn, inner, [a - (a > real[-1]) for a in attrs.axes if a != real[-1]])
    size = x.shape[real[0]]
    step = next((d for d in range(min(STEP, size - 1), 1, -1) if size % d == 0), 1)
    if step < math.isqrt(LONG):
        return None
    at = real[0]
    cut = b.reshape(x, (*x.shape[:at], size // step, step, *x.shape[at + 1 :]))
    inner = b.reduce(attrs.fn, cut, [at + 1])
    return b.reduce(attrs.fn, inner, attrs.axes)


LONG_RULES: tuple[Rule, ...] = (split_long_reduction,)
