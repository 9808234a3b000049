"""Planted faults: what a fault is, the set every kernel family must be shown to catch, and how one is planted.

A fault is a function from an artifact (generated source text, launch data, a callable) to the same artifact, broken.
The code generator's tests supply the functions; ``plant`` proves that each really changed something.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from megafuse.validate.errors import FaultNotPlanted

Artifact = TypeVar("Artifact")

#: Names and meanings of the faults that must each turn a test red.
REQUIRED_FAULTS = {
    "dropped_bias": "a bias is not added",
    "swapped_halves": "the two halves of the projection trade places",
    "missing_dgamma_partial": "one program's partial sum of a norm's weight gradient is not added",
    "stale_workspace": "scratch memory of an earlier call is read as if this call had written it",
    "wrong_eps": "a norm uses another epsilon",
}


@dataclass(frozen=True)
class Fault(Generic[Artifact]):
    """A named way to break an artifact: ``apply(artifact)`` returns the faulty one and leaves its argument alone."""

    name: str
    description: str
    apply: Callable[[Artifact], Artifact]


def plant(fault: Fault[Artifact], artifact: Artifact) -> Artifact:
    """The faulty artifact; raises ``FaultNotPlanted`` if it is the same as before."""
    faulty = fault.apply(artifact)
    if faulty is artifact or faulty == artifact:
        raise FaultNotPlanted(
            f"fault {fault.name!r} changed nothing", hint="make its pattern fit the code generated now"
        )
    return faulty


def text_fault(name: str, pattern: str, replacement: str, *, description: str = "", count: int = 1) -> Fault[str]:
    """A fault on source text: replaces the first ``count`` matches of a regular expression (0: all).

    Planting raises ``FaultNotPlanted`` where the pattern does not occur.
    """

    def apply(source: str) -> str:
        return re.sub(pattern, replacement, source, count=count, flags=re.MULTILINE)

    return Fault(name, description or REQUIRED_FAULTS.get(name, name), apply)


def require_complete(faults: Iterable[Fault[Artifact]]) -> dict[str, Fault[Artifact]]:
    """The faults by name; raises ``ValueError`` naming those of ``REQUIRED_FAULTS`` that are missing or given twice."""
    listed = list(faults)
    named = {fault.name: fault for fault in listed}
    missing = [name for name in REQUIRED_FAULTS if name not in named]
    if missing or len(named) != len(listed):
        raise ValueError(f"planted faults missing: {missing}; names given: {[f.name for f in listed]}")
    return named
