"""Time by kernel, through PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

_ANNOTATIONS = ("##", "Torch-Compiled", "ProfilerStep", "CompiledFunction", "Pregraph")


@dataclass(frozen=True)
class KernelTime:
    """One kernel of a step: launches per step and microseconds per step in all of them."""

    name: str
    launches: float
    microseconds: float


def profile_kernels(step: Callable[[], Any], steps: int = 5) -> list[KernelTime]:
    """Kernels, copies and fills of the step, slowest first; caches are not flushed between steps."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return collect(profile.events() or (), steps)


def collect(events: Iterable[Any], steps: int) -> list[KernelTime]:
    """Sum device events by name; ranges that only annotate are left out."""
    sums: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.device_type.name != "CUDA" or is_annotation(event):
            continue
        count, total = sums.get(event.name, (0, 0.0))
        sums[event.name] = (count + 1, total + event.time_range.elapsed_us())
    found = [KernelTime(name, count / steps, total / steps) for name, (count, total) in sums.items()]
    return sorted(found, key=lambda k: -k.microseconds)


def is_annotation(event: Any) -> bool:
    """True for ranges that span kernels instead of being one."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(_ANNOTATIONS)
