"""Timing of several works in turn in one process. Samples are raw, in microseconds, in the order measured.

Rounds alternate the works: every round runs each work once, in an order that rotates and turns around from round to
round, so that drifting clocks and the state left by the predecessor fall on all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megafuse.bench.guard import guarded
from megafuse.core.errors import InputError
from megafuse.runtime.timer import FLUSH_BYTES, Samples, require_cuda, time_events

Work = Callable[[], Any]
COPY_BYTES = 2 * 2**30  # read + written by the copy that measures bandwidth


class Event(Protocol):
    """A time stamp on the stream."""

    def record(self) -> None:
        """Put the time stamp on the current stream."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to ``end_event``."""


class Timer(Protocol):
    """What the rounds ask of a device; :class:`CudaTimer` is the real one."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def flush(self) -> None:
        """Evict everything from the L2 cache, on the stream."""

    def event(self) -> Event:
        """A new event."""


class CudaTimer:
    """The current CUDA device; the flush writes 256 MiB, which stay allocated while this object lives."""

    def __init__(self) -> None:
        require_cuda()
        self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()

    def flush(self) -> None:
        """Zero the buffer."""
        self._buffer.zero_()

    def event(self) -> Event:
        """A CUDA event."""
        event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return event


@dataclass(frozen=True)
class Times:
    """Raw samples in microseconds; statistics run over all but the first, where there are several."""

    raw: tuple[float, ...]

    @property
    def kept(self) -> Samples:
        """The samples that count."""
        return Samples(self.raw[1:] if len(self.raw) > 1 else self.raw)

    @property
    def mean(self) -> float:
        """Arithmetic mean, as the seed's runner reports it."""
        values = self.kept.microseconds
        return sum(values) / len(values)

    def divided(self, count: int) -> Times:
        """The samples of one of ``count`` equal parts."""
        return Times(tuple(sample / count for sample in self.raw))

    def as_dict(self) -> dict[str, Any]:
        """Statistics and raw samples, in microseconds, for a record."""
        kept = self.kept
        low, high = min(kept.microseconds), max(kept.microseconds)
        stats = {"mean": self.mean, "median": kept.median, "min": low, "max": high, "p20": kept.p20, "p80": kept.p80}
        return {"unit": "us", **stats, "samples": len(kept.microseconds), "raw": list(self.raw)}


def turns(names: Sequence[str], number: int) -> list[str]:
    """The order of round ``number``: rotated by one from round to round, every other round backwards."""
    shift = number // 2 % max(1, len(names))
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if number % 2 else order


def warm_up(works: Mapping[str, Work], times: int, errors: MutableSequence[str], section: str) -> dict[str, Work]:
    """Run every work; those that fail are named in ``errors`` and left out of the result."""
    good: dict[str, Work] = {}
    for name, work in works.items():
        with guarded(errors, f"{section} of {name}"):
            for _ in range(times):
                work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            good[name] = work
    return good


def time_rounds(works: Mapping[str, Work], *, rounds: int, timer: Timer) -> dict[str, Times]:
    """Event time of each work, ``rounds`` + 1 samples each, of which the first is dropped by the statistics.

    Per sample: flush, start event, work, end event; flush and whatever preceded lie outside the interval. The host
    does not wait between samples; where it launches more slowly than the device works, the interval shows that.
    """
    if rounds < 1:
        raise InputError(f"rounds is {rounds}", hint="give at least 1")
    timer.synchronize()
    pairs: dict[str, list[tuple[Event, Event]]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name in turns(list(works), number):
            pairs[name].append(_sample(works[name], timer))
    timer.synchronize()
    return {n: Times(tuple(start.elapsed_time(end) * 1e3 for start, end in p)) for n, p in pairs.items()}


def time_calls(works: Mapping[str, Work], *, rounds: int, timer: Timer) -> dict[str, Times]:
    """Event time of single calls on an idle device, ``rounds`` + 1 samples each: what the host takes to launch counts.

    Nothing is flushed: give works whose inputs take turns.
    """
    pairs: dict[str, list[tuple[Event, Event]]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name in turns(list(works), number):
            timer.synchronize()
            pairs[name].append(_sample(works[name], timer, flush=False))
    timer.synchronize()
    return {n: Times(tuple(start.elapsed_time(end) * 1e3 for start, end in p)) for n, p in pairs.items()}


def _sample(work: Work, timer: Timer, *, flush: bool = True) -> tuple[Event, Event]:
    start, end = timer.event(), timer.event()
    if flush:
        timer.flush()
    start.record()
    work()
    end.record()
    return start, end


def time_host_rounds(
    works: Mapping[str, Work], *, rounds: int = 3, steps: int = 200, sync: Callable[[], None] = lambda: None
) -> dict[str, Times]:
    """Host wall time per step: ``steps`` un-flushed steps that end in one synchronisation; ``rounds`` samples each."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds):
        for name in turns(list(works), number):
            sync()
            start = time.perf_counter()
            for _ in range(steps):
                works[name]()
            sync()
            found[name].append((time.perf_counter() - start) / steps * 1e6)
    return {name: Times(tuple(samples)) for name, samples in found.items()}


def capture(work: Work, warmup: int = 3) -> Any:
    """A CUDA graph of ``work``, which ran before on a side stream, as capture asks."""
    require_cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def capture_all(works: Mapping[str, Work], errors: MutableSequence[str]) -> dict[str, Any]:
    """Graphs of the works that can be captured; the others are named in ``errors``. Keep them as long as you replay."""
    graphs: dict[str, Any] = {}
    for name, work in works.items():
        with guarded(errors, f"graph of {name}"):
            graphs[name] = capture(work)
            graphs[name].replay()
            torch.cuda.synchronize()
    return graphs


def copy_bandwidth(samples: int = 20) -> tuple[float, Times]:
    """Bytes per second (read plus written) of a device-to-device copy of 1 GiB of random data, and its samples."""
    source = torch.randint(256, (COPY_BYTES // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = Times(time_events(lambda: target.copy_(source), samples=samples + 1, flush_bytes=0).microseconds)
    return COPY_BYTES / (times.kept.median * 1e-6), times
