"""The GPU at hand, as the planner's table entry."""

from __future__ import annotations

import torch

from megafuse.core.device import DeviceSpec, device_spec
from megafuse.core.errors import TargetError


def live_device_spec(device: torch.device | int | None = None) -> DeviceSpec:
    """The entry of ``device`` (default: the current CUDA device), with its own name and number of multiprocessors.

    Raises:
        TargetError: there is no CUDA device, or its compute capability is older than every entry.
    """
    if not torch.cuda.is_available():
        raise TargetError("no CUDA device is available", hint="name an architecture to plan for, such as sm_90")
    found = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    return device_spec(found.major * 10 + found.minor, sms=found.multi_processor_count, name=found.name)
