"""The GPU at hand, as the planner's table entry."""

from __future__ import annotations

from dataclasses import replace

import torch

from megafuse.core.device import DeviceSpec, device_spec
from megafuse.core.errors import TargetError
from megafuse.runtime.shim import triton_version

STORING_AT_ONCE = ((3, 6),)  # versions of Triton seen to do so, on WGMMA_ARCH alone; 3.9 does not
WGMMA_ARCH = 90


def live_device_spec(device: torch.device | int | None = None) -> DeviceSpec:
    """The entry of ``device`` (default: the current CUDA device), with its own name and number of multiprocessors.

    Raises:
        TargetError: there is no CUDA device, or its compute capability is older than every entry.
    """
    if not torch.cuda.is_available():
        raise TargetError("no CUDA device is available", hint="name an architecture to plan for, such as sm_90")
    found = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    return target_spec(found.major * 10 + found.minor, sms=found.multi_processor_count, name=found.name)


def target_spec(arch: int, *, sms: int | None = None, name: str | None = None) -> DeviceSpec:
    """The entry of compute capability ``arch`` with what the installed Triton does for it; without Triton as it is.

    All calls are planned for this, and so is what is said of them without a GPU.

    Raises:
        TargetError: ``arch`` is older than every entry.
    """
    spec = device_spec(arch, sms=sms, name=name)
    try:
        at_once = spec.arch == WGMMA_ARCH and triton_version() in STORING_AT_ONCE
    except TargetError:
        return spec
    return replace(spec, stores_at_once=at_once)
