"""``1 + erf(x)`` and ``1 + tanh(x)`` as one function each, where a 16-bit type is in play.

GELU and its derivative are made of these sums. In fp32 the sum of 1 and a value near -1 is exact and small, so the two
terms have to be right to their last bit, which takes twice the instructions of the sum itself: erfc(-x), and twice the
sigmoid of 2x. Both are right relative to their own size, where the sum in fp32 is right to 2**-24.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from megafuse.codegen.program import Compute, Note, Param, Phase, Statement
from megafuse.codegen.triton.values import in_halves
from megafuse.codegen.walk import reads, statements
from megafuse.core.dtypes import DType

ONE_PLUS = {"erf": "one_plus_erf", "tanh": "one_plus_tanh"}


def complement(phase: Phase, params: Iterable[Param], outside: Collection[str] = ()) -> Phase:
    """The phase with such sums written as one function, where nothing else reads the term beside 1.

    ``outside``: values that others than the phase's own statements read.
    """
    if not in_halves(params):
        return phase
    readers: dict[str, list[Statement]] = defaultdict(list)
    for statement in statements(phase):
        for name in reads(statement):
            readers[name].append(statement)
    terms = {s.dst: s for s in statements(phase) if isinstance(s, Compute) and _is_term(s) and s.dst not in outside}
    joined = {n: s for n, s in terms.items() if all(_adds_one(reader, n) for reader in readers[n])}
    if not joined:
        return phase
    return replace(phase, passes=tuple(replace(p, body=tuple(_joined(p.body, joined))) for p in phase.passes))


def _joined(items: Iterable[Statement | Note], joined: dict[str, Compute]) -> Iterator[Statement | Note]:
    for item in items:
        if isinstance(item, Compute) and item.dst in joined:
            continue
        made = [joined[a] for a in item.args if a in joined] if isinstance(item, Compute) else []
        if isinstance(item, Compute) and made:
            yield replace(item, fn=ONE_PLUS[made[0].fn], args=made[0].args)
        else:
            yield item


def _is_term(item: Compute) -> bool:
    return item.fn in ONE_PLUS and item.arg_dtype is DType.F32


def _adds_one(item: Statement, term: str) -> bool:
    return isinstance(item, Compute) and item.fn == "add" and item.args in ((term, 1.0), (1.0, term))
