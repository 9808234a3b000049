"""Repeated measurement of one step with CUDA events.

Order of operations, for a step, ``warmup`` and ``num_tests``::

    synchronize
    step                         x warmup
    then num_tests times:        flush L2 | barrier | start event | step | end event
    synchronize
    read durations: milliseconds -> seconds, drop the first one when there is more than one

The flush and the barrier lie outside the timed region. Nothing waits for the device between measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

L2_FLUSH_BYTES = 256 * 2**20
MILLISECONDS_PER_SECOND = 1e3
MICROSECONDS_PER_SECOND = 1e6


class TimingEvent(Protocol):
    """A time stamp on the device's stream."""

    def record(self) -> None:
        """Put the time stamp on the current stream."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to ``end_event``, an event of the same kind."""


class TimingDevice(Protocol):
    """What :func:`time_step` asks of a device; :class:`CudaTimingDevice` is the real one."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def flush_l2(self) -> None:
        """Evict the step's data from the L2 cache, on the current stream."""

    def barrier(self) -> None:
        """Line up the ranks, on the current stream."""

    def event(self) -> TimingEvent:
        """A new event that can be timed."""


class CudaTimingDevice:
    """Timing on the current CUDA device and stream.

    The L2 flush zeroes a buffer of 256 MiB; the buffer stays allocated and shows in ``torch.cuda`` memory statistics
    as long as this object lives. The barrier is an all-reduce of one element on the stream when
    ``torch.distributed`` is initialised, and does nothing in a single process without it.
    """

    def __init__(self, device: torch.device | str = "cuda", flush_bytes: int = L2_FLUSH_BYTES) -> None:
        self._device = torch.device(device)
        self._flush_buffer = torch.empty(flush_bytes, dtype=torch.uint8, device=self._device)
        self._barrier_value = torch.zeros(1, device=self._device)

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self._device)

    def flush_l2(self) -> None:
        """Zero the flush buffer."""
        self._flush_buffer.zero_()

    def barrier(self) -> None:
        """All-reduce one element, or nothing without a process group."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self._barrier_value)

    def event(self) -> TimingEvent:
        """A CUDA event with timing enabled."""
        event: TimingEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return event


@dataclass(frozen=True)
class TimingResult:
    """Durations of one timed step, in seconds and in order of measurement.

    ``samples_s`` are the kept ones, over which the statistics run; ``raw_s`` also holds the dropped first one.
    """

    samples_s: tuple[float, ...]
    raw_s: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        """Arithmetic mean."""
        return sum(self.samples_s) / len(self.samples_s)

    @property
    def min_s(self) -> float:
        """Shortest duration."""
        return min(self.samples_s)

    @property
    def max_s(self) -> float:
        """Longest duration."""
        return max(self.samples_s)

    def format_us(self) -> str:
        """``mean=..us min=..us max=..us`` in microseconds."""
        values = (("mean", self.mean_s), ("min", self.min_s), ("max", self.max_s))
        return " ".join(f"{name}={seconds * MICROSECONDS_PER_SECOND:.2f}us" for name, seconds in values)


def time_step(
    step: Callable[[], object],
    *,
    warmup: int,
    num_tests: int,
    device: TimingDevice | None = None,
) -> TimingResult:
    """Measure ``step`` as the module docstring describes.

    Args:
        step: one complete call to time; its result is discarded.
        warmup: untimed calls before the first measurement, at least 0.
        num_tests: measurements, at least 1.
        device: where to measure; the current CUDA device if left out.

    Raises:
        ValueError: for ``warmup < 0`` or ``num_tests < 1``.
    """
    if warmup < 0 or num_tests < 1:
        raise ValueError(f"time_step needs warmup >= 0 and num_tests >= 1, got warmup={warmup}, num_tests={num_tests}")
    timer = CudaTimingDevice() if device is None else device
    timer.synchronize()
    for _ in range(warmup):
        step()
    events = [_measure(step, timer) for _ in range(num_tests)]
    timer.synchronize()
    raw = tuple(start.elapsed_time(end) / MILLISECONDS_PER_SECOND for start, end in events)
    return TimingResult(samples_s=raw[1:] if len(raw) > 1 else raw, raw_s=raw)


def _measure(step: Callable[[], object], timer: TimingDevice) -> tuple[TimingEvent, TimingEvent]:
    start, end = timer.event(), timer.event()
    timer.flush_l2()
    timer.barrier()
    start.record()
    step()
    end.record()
    return start, end
