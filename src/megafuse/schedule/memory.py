"""How much memory a step takes: its calls walked through, with the sizes of what they allocate and free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megafuse.core.sizes import typical
from megafuse.schedule.types import Alloc, Buffer, Call, Free, OpaqueCall, Step


@dataclass(frozen=True)
class MemoryUse:
    """Bytes beside what the caller hands in (of open sizes, typical ones).

    ``saved`` is what forward keeps for backward beside inputs and outputs. ``peak`` is the most that is alive at a
    time: outputs, what is saved, temporaries, and the gradients made so far.
    """

    saved: int
    peak: int


def memory_use(step: Step) -> MemoryUse:
    """What a forward and a backward of ``step`` take."""
    buffers = {b.name: b for b in step.buffers}
    alive: dict[str, int] = {}
    peak = _walk(step.forward, buffers, alive)
    kept = {v.buffer for v in step.outputs if v is not None} | set(step.saved)
    alive = {name: size for name, size in alive.items() if name in kept}
    saved = sum(size for name, size in alive.items() if buffers[name].kind == "saved")
    return MemoryUse(saved, max(peak, _walk(step.backward, buffers, alive)))


def _walk(calls: Sequence[Call], buffers: dict[str, Buffer], alive: dict[str, int]) -> int:
    """Most bytes alive during ``calls``; ``alive`` is brought up to date."""
    peak = sum(alive.values())
    for call in calls:
        if isinstance(call, Alloc):
            alive[call.buffer] = nbytes(buffers[call.buffer])
        elif isinstance(call, Free):
            alive.pop(call.buffer, None)
        elif isinstance(call, OpaqueCall):
            alive |= {name: nbytes(buffers[name]) for name in call.results if name is not None}
        peak = max(peak, sum(alive.values()))
    return peak


def nbytes(buffer: Buffer) -> int:
    """Bytes from the first to the last element of a buffer."""
    if 0 in buffer.shape:
        return 0
    span = 1 + sum((n - 1) * abs(s) for n, s in zip(buffer.shape, buffer.strides, strict=True))
    return int(typical(span)) * buffer.dtype.size
