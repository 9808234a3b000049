from __future__ import annotations

import pytest

from megafuse.core.device import device_spec
from megafuse.core.occupancy import limiting, occupancy

DEVICE = device_spec(90)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs", "limit"),
    [
        (128, 0, 4, 4, "registers"),
        (129, 0, 4, 3, "registers"),  # handed out in steps of 8
        (32, 100_000, 4, 2, "shared memory"),
        (32, 227 * 1024, 4, 1, "shared memory"),
        (16, 0, 16, 4, "threads"),
        (16, 0, 1, 32, "programs"),
        (255, 0, 8, 1, "registers"),
        (255, 0, 16, 0, "registers"),
    ],
)
def test_occupancy(registers: int, shared: int, warps: int, programs: int, limit: str) -> None:
    found = occupancy(registers, shared, warps, DEVICE)
    assert (found.programs, found.limit) == (programs, limit)
    assert found.share == programs * warps * 32 / 2048


def test_occupancy_follows_the_device() -> None:
    assert occupancy(32, 100_000, 4, device_spec(80)).programs == 1
    assert occupancy(32, 100_000, 4, DEVICE).programs == 2


def test_what_limits_a_kernel() -> None:
    full, fat = occupancy(32, 0, 8, DEVICE), occupancy(255, 0, 8, DEVICE)
    assert limiting(0.9, full, 10_000, DEVICE) == "memory"
    assert limiting(0.5, full, 100, DEVICE) == "few programs"
    one = occupancy(128, 200_000, 8, DEVICE)
    assert limiting(0.5, one, 100, DEVICE) == "few programs"
    assert limiting(0.5, one, 128, DEVICE) == "shared memory (occupancy)"  # a program on each SM but four
    assert limiting(0.5, fat, 10_000, DEVICE) == "registers (occupancy)"
    assert limiting(0.5, full, 10_000, DEVICE) == "arithmetic or latency"
    assert limiting(0.9, full, 10_000, DEVICE, launch_share=0.5) == "launch"
    assert limiting(0.9, full, 10_000, DEVICE, launch_share=0.4) == "memory"
