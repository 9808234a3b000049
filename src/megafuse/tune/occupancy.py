"""Whether a compiled kernel is worth running."""

from __future__ import annotations

from megafuse.core.device import DeviceSpec
from megafuse.core.occupancy import occupancy
from megafuse.runtime.offline import CompileReport


def misfit(report: CompileReport, warps: int, device: DeviceSpec, spills: int = 0) -> str:
    """Why a compiled kernel is not worth running, or cannot be; empty where it can.

    ``spills``: bytes a thread that may spill, as they do in the kernel that it would replace.
    """
    if report.error:
        return f"does not compile: {report.error.splitlines()[-1][:200]}"
    if report.layouts > 1:  # not worth a trial in another process
        return "has operands in several layouts, with which ptxas is not trusted"
    if report.spills > spills:
        return f"spills {report.spills} bytes a thread"
    if report.shared > device.shared_per_block:
        return f"takes {report.shared} bytes of shared memory, {device.shared_per_block} are to be had"
    if occupancy(report.registers, report.shared, warps, device).programs < 1:
        return f"takes {report.registers} registers in each of {32 * warps} threads"
    return ""
