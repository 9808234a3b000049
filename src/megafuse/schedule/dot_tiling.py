"""Tiles of generated dots: of a few shapes the one whose waves of programs waste least."""

from __future__ import annotations

from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.core.sizes import ceil_div
from megafuse.core.text import counted
from megafuse.ir.trace import Inst, Trace
from megafuse.schedule.types import DotTile

RESERVED = 1024  # bytes of shared memory that barriers take


@dataclass(frozen=True)
class _Shape:
    """A candidate. ``rate``: share of the device's rate at which full waves of such tiles run."""

    rows: int
    cols: int
    warps: int
    rate: float

    @property
    def sums(self) -> int:
        """Elements of the product that one thread holds."""
        return self.rows * self.cols // (32 * self.warps)


# Rates of the first on sm_90 as measured; the others follow from operand bytes per flop, and only rank.
_SHAPES = (
    _Shape(128, 256, 8, 1.0),
    _Shape(128, 128, 4, 0.86),
    _Shape(64, 256, 4, 0.84),
    _Shape(64, 128, 4, 0.72),
    _Shape(64, 64, 4, 0.55),
    _Shape(32, 64, 4, 0.35),
    _Shape(16, 64, 2, 0.2),
)
_PLAIN_SHAPES = (_Shape(64, 64, 8, 1.0), _Shape(32, 64, 4, 0.8), _Shape(16, 64, 4, 0.5))  # IEEE fp32
PLAIN_DEPTH_BYTES = 64
DEPTH_BYTES = 128  # of a block along K: one line of the widest swizzle of shared memory
MOST_STAGES = 4
LEAST_PIECE = 32  # columns
MOST_PIECE_SUMS = 64  # of the product that a piece has in a thread
LIVE_REGISTERS = 256  # of a thread, for the values of a piece of the epilogue


def choose_dot_tile(
    shape: tuple[int, int, int, int],
    dtype: DType,
    device: DeviceSpec,
    spare_tiles: int = 1,
    tf32: bool = False,
    live: float = 2.0,
) -> DotTile:
    """The tile for ``[P, M, N, K]``.

    ``spare_tiles``: how many pieces of the result shared memory must hold beside the operands, for what the epilogue
    loads and stores. ``live``: how many values of a piece, in units of fp32, the epilogue holds at a time: the more,
    the narrower the pieces. fp32 operands are multiplied without matrix units unless ``tf32``.
    """
    plain = dtype is DType.F32 and not tf32
    sizes = _Sizes(dtype, device, spare_tiles, PLAIN_DEPTH_BYTES if plain else DEPTH_BYTES, live)
    fitting = [s for s in (_PLAIN_SHAPES if plain else _SHAPES) if sizes.fits(s)]
    best = max(fitting, key=lambda s: _speed(s, shape, device))
    problems, rows, cols, _ = shape
    tiles = problems * ceil_div(rows, best.rows) * ceil_div(cols, best.cols)
    return DotTile(
        rows=best.rows,
        cols=best.cols,
        depth=sizes.depth_bytes // dtype.size,
        parts=sizes.parts(best),
        programs=device.sms * sizes.per_sm(best),
        num_warps=best.warps,
        num_stages=sizes.stages(best),
        why=f"{counted(tiles, 'tile')} on {device.sms} SMs",
    )


def live_tiles(trace: Trace, axes: frozenset[str]) -> float:
    """Most values over all of ``axes`` that wait for a later use, in units of fp32, as instances are evaluated.

    Sums over rows hold one more: a copy of their argument that is 0 outside.
    """
    last: dict[Inst, int] = {}
    for at, inst in enumerate(trace.insts):
        last |= dict.fromkeys((inst, *inst.args), at)
    sizes = {inst: min(inst.dtype.size, 4) / 4 for inst in trace.insts if inst.axes == axes}
    held = [0.0] * len(trace.insts)
    for at, inst in enumerate(trace.insts):
        for later in range(at, last[inst]):
            held[later] += sizes.get(inst, 0.0)
    return max(held) + any(root.by_rows for root in trace.roots)


def _speed(tile: _Shape, shape: tuple[int, int, int, int], device: DeviceSpec) -> float:
    """Useful results per time: the rate of the tile, less what ragged tiles and the last wave waste."""
    problems, rows, cols, _ = shape
    tiles = problems * ceil_div(rows, tile.rows) * ceil_div(cols, tile.cols)
    waves = ceil_div(tiles, device.sms)
    return tile.rate * problems * rows * cols / (waves * device.sms * tile.rows * tile.cols)


@dataclass(frozen=True)
class _Sizes:
    """Shared memory and registers that tiles take. ``depth_bytes``: of a block of an operand along K."""

    dtype: DType
    device: DeviceSpec
    spare_tiles: int
    depth_bytes: int
    live: float

    def parts(self, tile: _Shape) -> int:
        """Pieces of columns, one after the other: so many that the values of one fit beside the sums."""
        parts = max(1, tile.sums // MOST_PIECE_SUMS)
        while self.live * tile.sums > LIVE_REGISTERS * parts and tile.cols // (2 * parts) >= LEAST_PIECE:
            parts *= 2
        return parts

    def stage(self, tile: _Shape) -> int:
        """Bytes of one block of each operand."""
        return (tile.rows + tile.cols) * self.depth_bytes

    def spare(self, tile: _Shape) -> int:
        """Bytes that are not for operands."""
        return RESERVED + self.spare_tiles * (tile.rows * tile.cols // self.parts(tile)) * self.dtype.size

    def stages(self, tile: _Shape) -> int:
        """Blocks in flight."""
        return min(MOST_STAGES, (self.device.shared_per_block - self.spare(tile)) // self.stage(tile))

    def fits(self, tile: _Shape) -> bool:
        """Two blocks of the operands in flight, and the sums in half of the registers that a thread can have."""
        return tile.sums <= 128 and self.stages(tile) >= 2

    def per_sm(self, tile: _Shape) -> int:
        """Programs that fit on an SM at a time: by shared memory, and by registers at twice the sums."""
        used = self.spare(tile) + self.stages(tile) * self.stage(tile)
        registers = tile.warps * 32 * (64 + 2 * tile.sums)
        return max(1, min(self.device.shared_per_block // used, self.device.registers_per_sm // registers))
