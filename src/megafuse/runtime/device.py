"""The GPU at hand, as the planner's table entry."""

from __future__ import annotations

from dataclasses import replace

import torch

from megafuse.core.device import DeviceSpec, device_spec
from megafuse.core.errors import TargetError
from megafuse.runtime.shim import triton_version

STORING_AT_ONCE = ((3, 6),)  # versions of Triton seen to do so; 3.9 does not


def live_device_spec(device: torch.device | int | None = None) -> DeviceSpec:
    """The entry of ``device`` (default: the current CUDA device), with its own name and number of multiprocessors.

    Raises:
        TargetError: there is no CUDA device, or its compute capability is older than every entry.
    """
    if not torch.cuda.is_available():
        raise TargetError("no CUDA device is available", hint="name an architecture to plan for, such as sm_90")
    found = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    return compiled_for(device_spec(found.major * 10 + found.minor, sms=found.multi_processor_count, name=found.name))


def compiled_for(spec: DeviceSpec) -> DeviceSpec:
    """``spec`` with what the installed Triton does for it; without Triton as it is."""
    try:
        return replace(spec, stores_at_once=triton_version() in STORING_AT_ONCE)
    except TargetError:
        return spec
