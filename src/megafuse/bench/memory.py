"""Activation peak of a step: what it needs beside what was there before and the gradients that it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megafuse.bench.guard import release_memory
from megafuse.bench.step import Case


@dataclass(frozen=True)
class Peak:
    """Bytes. ``activation`` = ``peak`` (max_memory_allocated over the step) - ``before`` - ``gradients``.

    ``before`` is memory_allocated just before the step, gradients None, no flush buffer alive.
    """

    peak: int
    before: int
    gradients: int

    @property
    def activation(self) -> int:
        """Bytes of activations, output and temporaries at the peak."""
        return self.peak - self.before - self.gradients

    def as_dict(self) -> dict[str, Any]:
        """All figures, for a record."""
        return {"unit": "bytes", "activation": self.activation, **asdict(self)}


def activation_peak(case: Case, step: Callable[[], Any]) -> Peak:
    """Measure one step after a warm-up one (library workspaces are allocated on first use and stay)."""
    step()
    case.clear_gradients()
    release_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in case.gradients()}
    case.clear_gradients()
    return Peak(peak, before, sum(storages.values()))
