"""Registers, spills, shared memory and occupancy of a plan's kernels, from compiling them; no GPU is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megafuse.compiler import Compiled
from megafuse.core.device import DeviceSpec
from megafuse.core.occupancy import limiting, occupancy
from megafuse.core.sizes import typical
from megafuse.explanation.records import KernelInfo, PlanInfo, Resources
from megafuse.runtime.offline import CompileReport, compile_offline

SECONDS = 120.0  # after which the kernels that are left are not compiled


def compiled_resources(compiled: Compiled, *, seconds: float = SECONDS) -> dict[str, Resources]:
    """Compile the kernels' Triton text for the plan's device in other processes: resources by kernel name."""
    sources = compiled.artifact("triton").kernels
    reports = compile_offline(sources, compiled.device.arch, seconds=seconds)
    grids = (typical(s.grid[0]) * typical(s.grid[1]) for s in sources)
    return {
        source.entry: resources_of(report, source.num_warps, programs, compiled.device)
        for source, report, programs in zip(sources, reports, grids, strict=True)
    }


def resources_of(report: CompileReport, warps: int, programs: int, device: DeviceSpec) -> Resources:
    """Figures of one compiled kernel that is launched as ``programs`` programs."""
    if report.error:
        return Resources(error=report.error.splitlines()[-1][:200])
    room = occupancy(report.registers, report.shared, warps, device)
    return Resources(report.registers, report.spills, report.shared, programs, room)


def with_resources(plan: PlanInfo, found: Mapping[str, Resources], device: DeviceSpec) -> PlanInfo:
    """The plan with the resources of its kernels, and what most likely sets the pace of each."""
    calls = (_paced(c, found.get(c.name), device) if isinstance(c, KernelInfo) else c for c in plan.calls)
    return replace(plan, calls=tuple(calls))


def _paced(kernel: KernelInfo, found: Resources | None, device: DeviceSpec) -> KernelInfo:
    """By the measured time where it is known, else by the predicted one."""
    if found is None or found.room is None:
        return replace(kernel, resources=found)
    seconds = kernel.measured or kernel.seconds
    copy_share = kernel.dram_bytes / device.dram_bandwidth / max(seconds - device.launch_seconds, 1e-9)
    pace = limiting(copy_share, found.room, found.programs, device, device.launch_seconds / seconds)
    return replace(kernel, resources=replace(found, pace=pace))
