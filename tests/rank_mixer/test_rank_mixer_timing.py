"""Order of operations and arithmetic of the timing utility, with a scripted device."""

import math
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from rank_mixer_src import timing
from rank_mixer_src.timing import TimingResult, time_step


@dataclass
class FakeEvent:
    device: "FakeDevice"
    stamp_ms: float = math.nan

    def record(self) -> None:
        self.device.log.append("record")
        self.stamp_ms = self.device.now_ms

    def elapsed_time(self, end_event: "FakeEvent", /) -> float:
        self.device.log.append("read")
        return end_event.stamp_ms - self.stamp_ms


@dataclass
class FakeDevice:
    """A device whose clock moves 100 ms per flush, 10 ms per barrier and a scripted time per step."""

    step_ms: list[float]
    now_ms: float = 0.0
    log: list[str] = field(default_factory=list)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def flush_l2(self) -> None:
        self.log.append("flush")
        self.now_ms += 100.0

    def barrier(self) -> None:
        self.log.append("barrier")
        self.now_ms += 10.0

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def step(self) -> None:
        self.log.append("step")
        self.now_ms += self.step_ms.pop(0)


MEASURE = ["flush", "barrier", "record", "step", "record"]


def test_order_of_operations() -> None:
    device = FakeDevice(step_ms=[1.0] * 5)
    time_step(device.step, warmup=2, num_tests=3, device=device)
    assert device.log == ["synchronize", "step", "step", *MEASURE * 3, "synchronize", "read", "read", "read"]


def test_first_measurement_is_dropped_and_flush_is_not_timed() -> None:
    device = FakeDevice(step_ms=[500.0, 50.0, 2.0, 4.0, 6.0])
    result = time_step(device.step, warmup=1, num_tests=4, device=device)
    assert result.raw_s == pytest.approx((0.050, 0.002, 0.004, 0.006))
    assert result.samples_s == pytest.approx((0.002, 0.004, 0.006))
    assert (result.mean_s, result.min_s, result.max_s) == pytest.approx((0.004, 0.002, 0.006))


def test_single_measurement_is_kept() -> None:
    device = FakeDevice(step_ms=[3.0])
    result = time_step(device.step, warmup=0, num_tests=1, device=device)
    assert result.samples_s == result.raw_s == pytest.approx((0.003,))


def test_printed_in_microseconds() -> None:
    result = TimingResult(samples_s=(0.001, 0.002), raw_s=(0.009, 0.001, 0.002))
    assert result.format_us() == "mean=1500.00us min=1000.00us max=2000.00us"


def test_flush_zeroes_its_buffer_and_barrier_needs_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", reduced.append)
    device = timing.CudaTimingDevice("cpu", flush_bytes=64)
    device._flush_buffer.fill_(1)
    device.flush_l2()
    device.barrier()
    assert not device._flush_buffer.any()
    assert reduced == []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    device.barrier()
    assert [value.numel() for value in reduced] == [1]
    assert timing.L2_FLUSH_BYTES == 256 * 1024 * 1024


@pytest.mark.parametrize(("warmup", "num_tests"), [(-1, 1), (0, 0)])
def test_rejects_bad_counts(warmup: int, num_tests: int) -> None:
    with pytest.raises(ValueError, match="warmup"):
        time_step(lambda: None, warmup=warmup, num_tests=num_tests, device=FakeDevice([]))
