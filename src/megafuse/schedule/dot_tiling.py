"""Tiles of generated dots: of a few shapes the one whose waves of programs waste least."""

from __future__ import annotations

from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.core.sizes import ceil_div
from megafuse.schedule.types import DotTile

RESERVED = 1024  # bytes of shared memory that barriers take


@dataclass(frozen=True)
class _Shape:
    """A candidate. ``rate``: share of the device's rate at which full waves of such tiles run."""

    rows: int
    cols: int
    parts: int
    warps: int
    rate: float


# Rates of the first on sm_90 as measured; the others follow from operand bytes per flop, and only rank.
_SHAPES = (
    _Shape(128, 256, 2, 8, 1.0),
    _Shape(128, 128, 1, 4, 0.86),
    _Shape(64, 256, 2, 4, 0.84),
    _Shape(64, 128, 1, 4, 0.72),
    _Shape(64, 64, 1, 4, 0.55),
    _Shape(32, 64, 1, 4, 0.35),
    _Shape(16, 64, 1, 2, 0.2),
)
DEPTH_BYTES = 128  # of a block along K: one line of the widest swizzle of shared memory
MOST_STAGES = 4


def choose_dot_tile(
    shape: tuple[int, int, int, int], dtype: DType, device: DeviceSpec, spare_tiles: int = 1
) -> DotTile:
    """The tile for ``[P, M, N, K]``.

    ``spare_tiles``: how many tiles of the result's type shared memory must hold beside the operands, for what the
    epilogue loads and stores.
    """
    best = max(_SHAPES, key=lambda s: _speed(s, shape, device) if _fits(s, dtype, device, spare_tiles) else -1.0)
    depth = DEPTH_BYTES // dtype.size
    problems, rows, cols, _ = shape
    tiles = problems * ceil_div(rows, best.rows) * ceil_div(cols, best.cols)
    why = f"{tiles} tiles on {device.sms} SMs"
    return DotTile(
        rows=best.rows,
        cols=best.cols,
        depth=depth,
        parts=best.parts,
        programs=device.sms * _per_sm(best, dtype, device, spare_tiles),
        num_warps=best.warps,
        num_stages=_stages(best, dtype, device, spare_tiles),
        why=why,
    )


def _speed(tile: _Shape, shape: tuple[int, int, int, int], device: DeviceSpec) -> float:
    """Useful results per time: the rate of the tile, less what ragged tiles and the last wave waste."""
    problems, rows, cols, _ = shape
    tiles = problems * ceil_div(rows, tile.rows) * ceil_div(cols, tile.cols)
    waves = ceil_div(tiles, device.sms)
    return tile.rate * problems * rows * cols / (waves * device.sms * tile.rows * tile.cols)


def _stage_bytes(tile: _Shape) -> int:
    return (tile.rows + tile.cols) * DEPTH_BYTES


def _room(tile: _Shape, dtype: DType, device: DeviceSpec, spare_tiles: int) -> int:
    """Shared memory for operands."""
    spare = tile.rows * tile.cols // tile.parts * dtype.size
    return device.shared_per_block - RESERVED - spare_tiles * spare


def _stages(tile: _Shape, dtype: DType, device: DeviceSpec, spare_tiles: int) -> int:
    return min(MOST_STAGES, _room(tile, dtype, device, spare_tiles) // _stage_bytes(tile))


def _fits(tile: _Shape, dtype: DType, device: DeviceSpec, spare_tiles: int) -> bool:
    """Two blocks of the operands in flight, and the sums in a third of the registers that a thread can have."""
    in_registers = tile.rows * tile.cols <= 128 * 32 * tile.warps
    return in_registers and _stages(tile, dtype, device, spare_tiles) >= 2


def _per_sm(tile: _Shape, dtype: DType, device: DeviceSpec, spare_tiles: int) -> int:
    """Programs that fit on an SM at a time: by shared memory, and by registers at twice the sums."""
    used = device.shared_per_block - _room(tile, dtype, device, spare_tiles)
    used += _stages(tile, dtype, device, spare_tiles) * _stage_bytes(tile)
    registers = tile.warps * 32 * (64 + 2 * tile.rows * tile.cols // (tile.warps * 32))
    return max(1, min(device.shared_per_block // used, device.registers_per_sm // registers))
