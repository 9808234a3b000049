"""Timing on the device and on the host. All figures are raw samples, in microseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megafuse.core.errors import InputError, TargetError

FLUSH_BYTES = 256 * 2**20  # more than any L2 cache
Work = Callable[[], object]


@dataclass(frozen=True)
class Samples:
    """Raw timings in microseconds, in the order measured."""

    microseconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.microseconds)

    @property
    def p20(self) -> float:
        """The 20th percentile."""
        return self.percentile(20)

    @property
    def p80(self) -> float:
        """The 80th percentile."""
        return self.percentile(80)

    def percentile(self, percent: float) -> float:
        """The given percentile, linear between samples."""
        ordered = sorted(self.microseconds)
        place = (len(ordered) - 1) * percent / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    def __str__(self) -> str:
        return f"{self.median:.1f} us (p20 {self.p20:.1f}, p80 {self.p80:.1f}, {len(self.microseconds)} samples)"


def require_cuda() -> None:
    """Raise ``TargetError`` where no CUDA device could be timed."""
    if not torch.cuda.is_available():
        raise TargetError("no CUDA device is available: nothing can be timed on it",
                          hint="run it on a machine with an NVIDIA GPU; explain, show and check need none")  # fmt: skip


def time_events(
    work: Work, *, samples: int = 20, warmup: int = 3, flush_bytes: int = FLUSH_BYTES, before: Work | None = None
) -> Samples:
    """Device time of ``work`` between two CUDA events on the current stream, one interval per sample.

    Before each interval, outside of it, ``before`` runs and the L2 cache is flushed by writing ``flush_bytes`` (0: no
    flush). The host runs ahead during the flush; where launching takes longer than the device, the interval holds the
    host's time. One synchronisation, at the end.
    """
    require_cuda()
    flush = torch.empty(flush_bytes, dtype=torch.uint8, device="cuda") if flush_bytes else None
    for _ in range(warmup):
        work()
    pairs = []
    for _ in range(samples):
        if before is not None:
            before()
        if flush is not None:
            flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return Samples(tuple(start.elapsed_time(end) * 1e3 for start, end in pairs))


def time_graph(works: Sequence[Work], *, samples: int = 20, warmup: int = 3) -> Samples:
    """Device time of one work inside a CUDA graph that holds all ``works`` one after another.

    Give the same work on inputs that together exceed the L2 cache: a replay flushes nothing. A sample is the replay's
    time divided by the number of works.

    Raises:
        InputError: no work.
        TargetError: no CUDA device.
    """
    if not works:
        raise InputError("works is empty: there is nothing to time")
    require_cuda()
    graph = _captured(works, warmup)
    timed = time_events(graph.replay, samples=samples, warmup=warmup, flush_bytes=0)
    return Samples(tuple(t / len(works) for t in timed.microseconds))


def _captured(works: Sequence[Work], warmup: int) -> torch.cuda.CUDAGraph:
    """A graph of all works, which ran ``warmup`` times before on a side stream, as capture asks."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(max(1, warmup)):
            for work in works:
                work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    return graph


def time_host(work: Work, *, steps: int = 200, samples: int = 5, warmup: int = 3) -> Samples:
    """Wall time per step over ``steps`` steps with no flush between them, ending in one synchronisation.

    Runs on the CPU as well, where there is nothing to wait for.
    """
    for _ in range(warmup):
        work()
    found = []
    for _ in range(samples):
        _synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            work()
        _synchronize()
        found.append((time.perf_counter() - start) / steps * 1e6)
    return Samples(tuple(found))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
