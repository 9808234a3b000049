"""Why the kernels of a step are not one: what fusion said of nests, what follows from the order of calls, and sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megafuse.explanation.records import Edge
from megafuse.ir.types import Input
from megafuse.schedule.types import Call, ChainPart, DotCall, KernelSchedule, Launch, OpaqueCall, Step

SHOWN = 3  # values that a reason names


def step_edges(step: Step, fused: Iterable[Edge]) -> tuple[Edge, ...]:
    """All boundaries, by kernel: partial sums, library and opaque calls, ``fused`` (fusion's own), and what is left.

    What is left are kernels of which one reads what the other makes, and neighbours that do not need one another.
    """
    calls = [edge for part in (step.forward, step.backward) for edge in _Reader(step, part).edges()]
    first = [e for e in calls if e.first]
    edges = list(dict.fromkeys([*first, *(e for e in fused if e.first and e.second)]))
    explained = {(e.first, e.second) for e in edges}
    for part in (step.forward, step.backward):
        edges += _Reader(step, part).rest(explained)
    order = {kernel.name: n for n, kernel in enumerate(step.kernels)}
    return tuple(sorted(edges, key=lambda e: (order[e.first], order[e.second])))


def kernel_of_nests(step: Step, nests: Iterable[Any]) -> list[str]:
    """The kernel in which each nest runs, by name ("" where none was found)."""
    homes: dict[Any, str] = {}
    for kernel in step.kernels:
        for phase in kernel.phases:
            for root, _ in phase.targets:
                homes.setdefault(root.anchor, kernel.name)
            for root in phase.trace.nest.roots:
                homes.setdefault(root.anchor, kernel.name)
    return [next((homes[r.anchor] for r in nest.roots if r.anchor in homes), "") for nest in nests]


def partial_sums(step: Step) -> set[str]:
    """The buffers that hold one part of a sum for each program that makes it."""
    return {name for n, name in step.names.items() if isinstance(n.attrs, Input) and n.attrs.role == "partial"}


def sums_legend(step: Step) -> Iterator[str]:
    """What becomes of partial sums, which are many and alike: a line for each kernel that adds some up."""
    partials = partial_sums(step)
    for kernel in step.kernels:
        parts = [name for name in kernel.reads if name in partials]
        if parts:
            yield f"{', '.join(parts)} = parts of the sums that {kernel.name} adds up to {', '.join(kernel.writes)}"


class _Reader:
    """The boundaries in one direction of a step."""

    def __init__(self, step: Step, calls: Sequence[Call]) -> None:
        self.step = step
        self.calls = [c for c in calls if isinstance(c, Launch | DotCall | OpaqueCall)]
        self.kernels = [step.kernels[c.kernel] for c in self.calls if isinstance(c, Launch)]
        self.partials = partial_sums(step)
        self.made: dict[str, KernelSchedule] = {}  # who makes each value, of those called so far
        for kernel in self.kernels:
            self.made |= dict.fromkeys(kernel.writes, kernel)

    def edges(self) -> Iterator[Edge]:
        """Boundaries that the calls themselves explain."""
        for maker, reader, values in self._pairs():
            parts = [v for v in values if v in self.partials]
            if parts:
                yield Edge(maker.name, reader.name, _partial_sums(parts))
        yield from self._calls_between()

    def rest(self, explained: set[tuple[str, str]]) -> Iterator[Edge]:
        """Boundaries without a reason so far."""
        for maker, reader, values in self._pairs():
            if (maker.name, reader.name) not in explained:
                yield Edge(maker.name, reader.name, self._why(maker, reader, values))
        for call, after in zip(self.calls, self.calls[1:], strict=False):
            if isinstance(call, Launch) and isinstance(after, Launch):
                first, second = self.step.kernels[call.kernel], self.step.kernels[after.kernel]
                needed = {m.name for v in second.reads if (m := self.made.get(v)) is not None}
                if first.name not in needed and (first.name, second.name) not in explained:
                    yield Edge(first.name, second.name, _neighbours(first, second))

    def _pairs(self) -> Iterator[tuple[KernelSchedule, KernelSchedule, list[str]]]:
        """Kernels of which the second reads what the first makes, and the values."""
        for reader in self.kernels:
            found: dict[str, list[str]] = {}
            for value in reader.reads:
                if value in self.made:
                    found.setdefault(self.made[value].name, []).append(value)
            for values in found.values():
                yield self.made[values[0]], reader, values

    def _calls_between(self) -> Iterator[Edge]:
        """Library and opaque calls that stand between two kernels."""
        waiting: dict[str, tuple[str, str]] = {}  # result -> (kernel that made an operand, why)
        for call in self.calls:
            if isinstance(call, Launch):
                kernel = self.step.kernels[call.kernel]
                yield from (Edge(waiting[n][0], kernel.name, waiting[n][1]) for n in kernel.reads if n in waiting)
                waiting = {n: w for n, w in waiting.items() if n not in kernel.reads}
                continue
            dot = isinstance(call, DotCall)
            operands = (call.a, call.b) if isinstance(call, DotCall) else call.args
            results = [call.out.buffer] if isinstance(call, DotCall) else [r for r in call.results if r]
            maker = next((self.made[v.buffer].name for v in operands if v.buffer in self.made), "")
            why = f"{_listed(results)} between them is {'a library product' if dot else 'an op that runs as it is'}"
            waiting |= {r: (maker, why) for r in results if maker}

    def _why(self, maker: KernelSchedule, reader: KernelSchedule, values: Sequence[str]) -> str:
        """What keeps apart two kernels of which fusion did not say it."""
        matrices = [v for v in values if v in _matrices(reader)]
        if matrices:
            return f"every row of the products needs the whole of {_listed(matrices)}"
        if not self.partials.isdisjoint(maker.reads):
            return f"{_listed(values)} {'is' if len(values) == 1 else 'are'} complete only when all parts are added up"
        if maker.chain or maker.dot or reader.chain or reader.dot:
            return (
                f"{_listed(values)} between them: a kernel that multiplies takes in only what is computed row by row "
                "with its products, where that is predicted to be faster"
            )
        return f"{_listed(values)} between them, and no walk was found that makes and reads it for less"


def _matrices(kernel: KernelSchedule) -> set[str]:
    """What a kernel multiplies by as a whole."""
    if kernel.dot is not None:
        return {kernel.dot.a.buffer, kernel.dot.b.buffer}
    chain: ChainPart | None = kernel.chain
    stages = chain.stages if chain is not None else ()
    return {s.matrix.buffer for s in stages if not isinstance(s, int) and s.matrix is not None}


def _partial_sums(parts: Sequence[str]) -> str:
    return (
        f"{_listed(parts)} {'holds' if len(parts) == 1 else 'hold'} one part of a sum for each program of the first; "
        "the second adds them up when all are there, always in the same order, so that results repeat bit by bit"
    )


def _neighbours(first: KernelSchedule, second: KernelSchedule) -> str:
    shared = [v for v in first.reads if v in second.reads]
    if not shared:
        return "neither needs the other, and they share no value: joining them would save no traffic"
    return f"neither needs the other; both read {_listed(shared)}, and no walk was found that serves both for less"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
