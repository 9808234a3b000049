"""Arithmetic in other forms where its results are rounded to 16 bits: as right for that type, in fewer instructions.

* ``1 + erf(x)`` and ``1 + tanh(x)``, of which GELU is made, become erfc(-x) and twice the sigmoid of 2x. In fp32 the
  sum of 1 and a value near -1 is exact and small, so both terms have to be right to their last bit, which takes twice
  the instructions of the sum itself.
* ``tanh`` is written out where all that is made of it is rounded.
* A quotient that is rounded to 16 bits at once needs no correct rounding to fp32 first, which takes a branch for rare
  arguments. With an error of two ulps of fp32 it rounds to the same bf16 number where both operands are bf16: a
  quotient of two 8-bit significands that is no 8-bit number itself is at least 2**-17 of its size away from the middle
  of two neighbours (it would have 9 bits there, and its product with the divisor more than 8).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from megafuse.codegen.program import Compute, Convert, Note, Param, Phase, Statement
from megafuse.codegen.triton.values import HALVES, in_halves
from megafuse.codegen.walk import reads, statements
from megafuse.core.dtypes import DType

ONE_PLUS = {"erf": "one_plus_erf", "tanh": "one_plus_tanh"}
NEAR = {"tanh": "near_tanh"}
QUOTIENT = "near_div"
CONTINUOUS = frozenset(
    "add sub mul div neg abs maximum minimum where sqrt rsqrt recip exp sigmoid log1p tanh erf".split()
)
_SMALLEST = 2.0**-126


def narrow(phase: Phase, params: Iterable[Param], outside: Collection[str] = ()) -> Phase:
    """The phase in these forms, where nothing reads what they leave out.

    ``outside``: values that others than the phase's own statements read.
    """
    if not in_halves(params):
        return phase
    readers: dict[str, list[Statement]] = defaultdict(list)
    for statement in statements(phase):
        for name in reads(statement):
            readers[name].append(statement)
    soft = _rounded_later(phase, readers, outside)
    terms = {n: s for n, s in soft.items() if s.fn in ONE_PLUS and all(_adds_one(r, n) for r in readers[n])}
    quotients = {n for n, s in soft.items() if s.fn == "div" and all(map(_rounds, readers[n]))}
    near = {n for n, s in soft.items() if s.fn in NEAR and n not in terms}
    if not terms and not quotients and not near:
        return phase
    passes = (replace(p, body=tuple(_rewritten(p.body, terms, quotients, near))) for p in phase.passes)
    return replace(phase, passes=tuple(passes))


def _rounded_later(phase: Phase, readers: dict[str, list[Statement]], outside: Collection[str]) -> dict[str, Compute]:
    """fp32 arithmetic of which nothing gets on but what is rounded to 16 bits, by the value's name.

    A small error stays small up to there: no comparison and no rounding to whole numbers reads it.
    """
    soft: dict[str, Compute] = {}
    for item in reversed(list(statements(phase))):
        if not isinstance(item, Compute) or item.arg_dtype is not DType.F32 or item.dst in outside:
            continue
        if item.fn not in CONTINUOUS:
            continue
        if all(_rounds(r) or (isinstance(r, Compute) and r.dst in soft) for r in readers[item.dst]):
            soft[item.dst] = item
    return soft


def _rewritten(
    items: Iterable[Statement | Note], terms: dict[str, Compute], quotients: set[str], near: set[str]
) -> Iterator[Statement | Note]:
    for item in items:
        if not isinstance(item, Compute):
            yield item
            continue
        term = next((terms[a] for a in item.args if isinstance(a, str) and a in terms), None)
        if term is not None:
            yield replace(item, fn=ONE_PLUS[term.fn], args=term.args)
        elif item.dst in quotients:
            yield _quotient(item)
        elif item.dst in near:
            yield replace(item, fn=NEAR[item.fn])
        elif item.dst not in terms:
            yield item


def _quotient(item: Compute) -> Compute:
    """A product where the divisor is a number whose inverse is one, too."""
    divisor = item.args[1]
    if isinstance(divisor, str) or not _SMALLEST <= abs(divisor) <= 1 / _SMALLEST or not math.isfinite(divisor):
        return replace(item, fn=QUOTIENT)
    return replace(item, fn="mul", args=(item.args[0], 1.0 / divisor))


def _adds_one(item: Statement, term: str) -> bool:
    return isinstance(item, Compute) and item.fn == "add" and item.args in ((term, 1.0), (1.0, term))


def _rounds(item: Statement) -> bool:
    return isinstance(item, Convert) and item.src_dtype is DType.F32 and (item.through or item.dtype) in HALVES
