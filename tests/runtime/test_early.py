"""Which kernels are launched while the one before still runs: those that wait, where device and Triton can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafuse.codegen.artifact import KernelSource
from megafuse.runtime import early, offline, shim

WAITS = KernelSource("k", "triton", "", (), (1, 1), 4, 1, waits=True)
NEVER = KernelSource("k", "triton", "", (), (1, 1), 4, 1)
LAUNCHED = {"launch_pdl": True}


@pytest.mark.parametrize(
    ("source", "arch", "version", "switch", "expected"),
    [
        (WAITS, 90, (3, 4), "", LAUNCHED),
        (WAITS, 120, (3, 9), "0", LAUNCHED),
        (WAITS, 90, (3, 9), "1", {}),
        (WAITS, 89, (3, 9), "", {}),
        (WAITS, 90, (3, 3), "", {}),
        (NEVER, 90, (3, 9), "", {}),
    ],
)
def test_options(monkeypatch, source, arch, version, switch, expected) -> None:
    monkeypatch.setenv("MEGAFUSE_NO_PDL", switch)
    told = early.options(source, arch, version)
    assert told == expected
    assert early.constants(told) == ({"early": True} if expected else {})


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch):
    """``set(capability, driver, cuda)``: facts of a device that is not there."""

    def set_facts(capability: tuple[int, int] = (9, 0), driver: int = 12080, cuda: str | None = "12.8") -> None:
        monkeypatch.delenv("MEGAFUSE_NO_PDL", raising=False)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(early, "_driver", lambda: driver)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return set_facts


def test_options_of_the_device_at_hand(device) -> None:
    device()
    assert early.device_options(WAITS, (3, 6)) == LAUNCHED
    assert early.device_options(NEVER, (3, 6)) == early.device_options(WAITS, (3, 3)) == {}
    for facts in ({"capability": (8, 9)}, {"driver": 12020}, {"cuda": None}):
        device(**facts)
        assert early.device_options(WAITS, (3, 6)) == {}


@pytest.mark.parametrize("waits", [False, True])
def test_the_plain_road_says_both_or_neither(device, monkeypatch, waits) -> None:
    device()
    monkeypatch.setattr(shim, "triton_version", lambda: (3, 6))
    told: list[dict[str, Any]] = []

    class Kernel:
        pre_run_hooks: tuple[()] = ()

        def warmup(self, *, grid: tuple[int, int], **options: Any) -> SimpleNamespace:
            told.append(options)
            return SimpleNamespace(asm={})

        def __getitem__(self, grid: tuple[int, int]) -> Any:
            return lambda **options: told.append(options)

    kernel = shim.CudaKernel(Kernel(), WAITS if waits else NEVER)
    kernel.hooks = []
    kernel.assemble()
    kernel.plain([])
    expected = {"launch_pdl": True, "early": True} if waits else {}
    assert told == [{"num_warps": 4, "num_stages": 1, **expected}] * 2


@pytest.mark.parametrize("arch", [80, 90])
def test_offline_compilation_takes_what_a_launch_would(monkeypatch, arch) -> None:
    monkeypatch.delenv("MEGAFUSE_NO_PDL", raising=False)
    monkeypatch.setattr(shim, "triton_version", lambda: (3, 9))
    job = offline._job(WAITS, arch)
    assert job["options"].get("launch_pdl", False) == job["constants"].get("early", False) == (arch == 90)
