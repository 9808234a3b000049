"""Compiling a selection without running it, for ``explain``, ``show`` and the demo's plan."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megafuse.cli.selection import Selection
from megafuse.cli.targets import META, Example, make_example
from megafuse.compiler import Compiled, KnownTiles, compile_call, complete, dot_rule, find_known
from megafuse.core.device import DeviceSpec
from megafuse.explanation import (
    EagerEstimate,
    PlanInfo,
    compiled_resources,
    estimate_eager,
    explain_compiled,
    with_resources,
)
from megafuse.runtime.device import live_device_spec, target_spec

DEFAULT_ARCH = 90


@dataclass(frozen=True)
class Planned:
    """A selection and its compilation."""

    example: Example
    compiled: Compiled

    def info(self, *, resources: bool = False) -> PlanInfo:
        """The plan's description, with eager's estimate beside it; ``resources``: of its kernels, once compiled."""
        device = self.compiled.device
        plan = explain_compiled(self.compiled, eager_of(self.example, device))
        return with_resources(plan, compiled_resources(self.compiled), device) if resources else plan


def planning_device(arch: int | None) -> DeviceSpec:
    """The table entry of ``arch`` (90: sm_90), or without one of the GPU at hand, or of sm_90 where there is none."""
    if arch is None and torch.cuda.is_available():
        return live_device_spec()
    return target_spec(arch or DEFAULT_ARCH)


def plan_selection(
    selection: Selection,
    arch: int | None = None,
    *,
    strict: bool = False,
    size: str = "full",
    measured: bool = True,
    memory_budget: int | None = None,
) -> Planned:
    """Compile what ``selection`` names, on tensors without data where the selection allows it.

    For the GPU at hand, with the tiles that ``fuse`` would take: from a plan file, or measured before; with the
    heuristic's unless ``measured``. ``memory_budget`` in bytes, as ``fuse`` takes it.
    """
    example = make_example(selection, size, "meta")
    device = planning_device(arch)
    here = measured and arch is None and torch.cuda.is_available()
    known = find_known(device, "cuda") if here else KnownTiles()
    dots = dot_rule(selection.dots, torch.backends.cuda.matmul.allow_tf32)
    call = (example.fn, example.args, example.kwargs)
    compiled = compile_call(*call, device, strict=strict, dots=dots, known=known, memory_budget=memory_budget)
    return Planned(example, complete(compiled, known))


def eager_of(example: Example, device: DeviceSpec) -> EagerEstimate | None:
    """Eager's estimate from a copy of the callable and its arguments without data."""
    fn, args, kwargs = pytree.tree_map(_without_data, (example.fn, example.args, example.kwargs))
    return estimate_eager(lambda: fn(*args, **kwargs), (), device)


def _without_data(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).to(META)
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    return made.requires_grad_(value.requires_grad)
