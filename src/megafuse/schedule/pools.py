"""Small buffers share allocations: at small sizes an allocation costs the host as much as a launch.

Only buffers that generated kernels alone touch are pooled, since a kernel needs no more than an address. A pool takes
the smallest buffers first, up to ``LIMIT`` bytes, and lives as long as any of them: that much, at most, may a step's
peak memory grow by each pool. Or it takes buffers that live between the same two calls, up to ``TWIN_LIMIT`` bytes,
whose peak is the same in a pool; whichever saves more allocations. Buffers in a pool never share bytes, so that one
left unwritten shows in poisoned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megafuse.core.sizes import is_open
from megafuse.schedule.types import Alloc, Buffer, Call, Free, Launch, OpaqueCall, Pool, Step, View

LIMIT = 1 << 20  # bytes of a pool: PyTorch takes smaller allocations from shared segments of twice that size
TWIN_LIMIT = 1 << 24  # bytes: of what is larger, the host's time does not count
ALIGNMENT = 128  # bytes: a cache line


def with_pools(step: Step) -> Step:
    """``step`` with its small buffers in pools: those of forward, those of backward, and those saved."""
    forward, backward = _touched_otherwise(step.forward), _touched_otherwise(step.backward)
    returned = {v.buffer for v in (*step.outputs, *step.grads) if v is not None}
    written = {n for call in step.backward if isinstance(call, Launch) for n in step.kernels[call.kernel].writes}
    made = {call.buffer for call in step.forward if isinstance(call, Alloc)}
    lives = _lives((*step.forward, *step.backward))

    def pool(kind: str, calls: Sequence[Call], fits: Callable[[Buffer], bool]) -> Pool | None:
        own = {call.buffer for call in calls if isinstance(call, Alloc)}
        fitting = [b for b in step.buffers if b.name in own and b.name not in returned and fits(b)]
        twins = [[b for b in fitting if lives[b.name] == life] for life in {lives[b.name]: None for b in fitting}]
        found = (_pool(kind, fitting, LIMIT), *(_pool(kind, some, TWIN_LIMIT) for some in twins))
        return max(found, key=lambda p: 0 if p is None else len(p.places))

    pools = (
        pool("forward", step.forward, lambda b: b.kind == "temp" and b.name not in forward),
        pool("backward", step.backward, lambda b: b.kind == "temp" and b.name not in backward),
        pool(
            "saved",
            step.forward,
            lambda b: b.kind == "saved" and b.name in made and b.name not in forward | backward | written,
        ),
    )
    return replace(step, pools=tuple(p for p in pools if p is not None))


def _touched_otherwise(calls: Iterable[Call]) -> set[str]:
    """Buffers that something else than a generated kernel reads or writes."""
    found: set[str] = set()
    for call in calls:
        if isinstance(call, Alloc | Free | Launch):
            continue
        if isinstance(call, OpaqueCall):
            found |= {r for r in call.results if r} | {v.buffer for v in call.args}
        else:
            found |= {v.buffer for v in (call.out, call.a, call.b, call.bias) if isinstance(v, View)}
    return found


def _lives(calls: Iterable[Call]) -> dict[str, tuple[int, int | None]]:
    """How many calls run before each buffer is allocated, and before it is freed (None: it is not)."""
    lives: dict[str, tuple[int, int | None]] = {}
    at = 0
    for call in calls:
        if isinstance(call, Alloc):
            lives[call.buffer] = (at, None)
        elif isinstance(call, Free):
            lives[call.buffer] = (lives.get(call.buffer, (0, None))[0], at)
        else:
            at += 1
    return lives


def _pool(kind: str, buffers: Iterable[Buffer], limit: int) -> Pool | None:
    """As many of ``buffers`` as fit, smallest first; None where nothing is gained."""
    sizes = [(_bytes(b), b.name) for b in buffers]
    places: dict[str, int] = {}
    end = 0
    for size, name in sorted((s, n) for s, n in sizes if not is_open(s) and s):
        if end + size > limit:
            break
        places[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return Pool(kind, end, places) if len(places) > 1 else None


def _bytes(buffer: Buffer) -> int:
    """From the first element to one past the last."""
    if 0 in buffer.shape:
        return 0
    last = sum((n - 1) * s for n, s in zip(buffer.shape, buffer.strides, strict=True))
    return (last + 1) * buffer.dtype.size
