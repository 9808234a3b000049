"""Kernels that are launched while the one before them on the stream still runs (programmatic dependent launch).

The programs of such a kernel start as soon as those of the one before have left the device; then they wait, before
their first access of memory, for its end and for what it wrote (see ``KernelSource.waits``). So nothing is read early
or written over early, also along several such kernels, and what a launch costs on the device is partly hidden.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

import torch

from megafuse.codegen.artifact import EARLY, KernelSource

OFF_ENV = "MEGAFUSE_NO_PDL"
TRITON_SINCE = (3, 4)  # the option ``launch_pdl``
ARCH_SINCE = 90  # the instruction that waits
DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
DRIVER_SINCE = 12030  # CUDA 12.3: a CUDA graph can hold such launches


def options(source: KernelSource, arch: int, triton: tuple[int, int]) -> dict[str, int | bool]:
    """What Triton's compiler is told for compute capability ``arch`` (90: sm_90), beside the kernel's own options.

    Empty where Triton or the device do not know such launches, and under ``MEGAFUSE_NO_PDL=1``.
    """
    known = arch >= ARCH_SINCE and triton >= TRITON_SINCE
    return {"launch_pdl": True} if source.waits and known and os.environ.get(OFF_ENV) != "1" else {}


def constants(told: dict[str, int | bool]) -> dict[str, bool]:
    """The kernel's parameter that goes with options: it waits where it may be launched early, and nowhere else."""
    return {EARLY: True} if told.get("launch_pdl") else {}


def device_options(source: KernelSource, triton: tuple[int, int]) -> dict[str, int | bool]:
    """``options`` for the current device and its driver."""
    if not source.waits or torch.version.cuda is None or _driver() < DRIVER_SINCE:
        return {}
    major, minor = torch.cuda.get_device_capability()
    return options(source, 10 * major + minor, triton)


@functools.cache
def _driver() -> int:
    """The CUDA version of the driver, as 12030 for 12.3; 0 where there is none."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else version.value
