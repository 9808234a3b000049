"""Tables of device limits and rates. Data only: nothing here asks a driver.

Rates of sm_90 were measured on one H200 (copy, matmul) or are the vendor's datasheet figures (the rest); they feed the
cost model, which ranks candidates. They are never reported as measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from megafuse.core.errors import TargetError

ACCESS_BYTES = 16  # of one load or store of a thread, at most


@dataclass(frozen=True)
class DeviceSpec:
    """What the planner needs to know of one GPU model.

    Units: bytes, bytes per second, flop per second, seconds; ``special_rate`` counts exp/log/tanh results per second.
    ``block_bandwidth``: rate at which programs that walk a block in several phases touch memory, cache hits included.
    ``narrow_tiles``: operands of matrix units may have lines of less than 128 bytes in shared memory; False where the
    assembler loses their addresses. ``loads_first``: programs of one tile may load matrices before they work; False
    where the compiler made a kernel wrong that does. ``stores_at_once``: the compiler stores an operand of matrix units
    that take 64 rows or columns at once (wgmma) to shared memory where it is loaded; else, and for other units, it is
    held in registers until its product.
    """

    name: str
    arch: int
    sms: int
    l2_bytes: int
    shared_per_block: int
    registers_per_sm: int
    max_threads_per_sm: int
    dram_bandwidth: float
    l2_bandwidth: float
    block_bandwidth: float
    fp32_rate: float
    dot_rate_16bit: float
    dot_rate_tf32: float
    dot_rate_fp32: float
    special_rate: float
    launch_seconds: float
    narrow_tiles: bool = True
    loads_first: bool = True
    stores_at_once: bool = False


_H200 = DeviceSpec(
    name="NVIDIA H200", arch=90, sms=132, l2_bytes=50 * 2**20, shared_per_block=227 * 1024, registers_per_sm=65536,
    max_threads_per_sm=2048, dram_bandwidth=4.3e12, l2_bandwidth=8.0e12, block_bandwidth=2.5e12, fp32_rate=6.0e13,
    dot_rate_16bit=7.2e14, dot_rate_tf32=3.6e14, dot_rate_fp32=5.0e13, special_rate=4.0e12, launch_seconds=1.3e-6,
)  # fmt: skip
_A100 = DeviceSpec(
    name="NVIDIA A100", arch=80, sms=108, l2_bytes=40 * 2**20, shared_per_block=163 * 1024, registers_per_sm=65536,
    max_threads_per_sm=2048, dram_bandwidth=1.7e12, l2_bandwidth=4.0e12, block_bandwidth=1.0e12, fp32_rate=1.9e13,
    dot_rate_16bit=2.6e14, dot_rate_tf32=1.3e14, dot_rate_fp32=1.8e13, special_rate=2.4e12, launch_seconds=1.6e-6,
)  # fmt: skip
_B200 = DeviceSpec(
    name="NVIDIA B200", arch=100, sms=148, l2_bytes=126 * 2**20, shared_per_block=227 * 1024, registers_per_sm=65536,
    max_threads_per_sm=2048, dram_bandwidth=7.2e12, l2_bandwidth=1.2e13, block_bandwidth=4.0e12, fp32_rate=7.4e13,
    dot_rate_16bit=1.6e15, dot_rate_tf32=8.0e14, dot_rate_fp32=7.0e13, special_rate=4.6e12, launch_seconds=1.3e-6,
)  # fmt: skip
DEVICES = {90: _H200, 80: _A100, 100: _B200}


def device_spec(arch: int, *, sms: int | None = None, name: str | None = None) -> DeviceSpec:
    """Return the table entry of compute capability ``arch`` (90 for 9.0), or the nearest older one.

    Raises:
        TargetError: ``arch`` is older than every entry.
    """
    known = [a for a in DEVICES if a <= arch]
    if not known:
        raise TargetError(f"compute capability {arch / 10:.1f} is not supported", hint=f"use one of {sorted(DEVICES)}")
    base = DEVICES[max(known)]
    if sms is None and name is None:
        return base
    return DeviceSpec(**{**base.__dict__, "sms": sms or base.sms, "name": name or base.name})
