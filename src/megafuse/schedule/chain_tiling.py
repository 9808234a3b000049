"""Tiles of chains, by what fits: sums over rows and row tiles in registers, matrices in shared memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megafuse.core.device import DeviceSpec
from megafuse.core.dtypes import DType
from megafuse.core.sizes import ceil_div
from megafuse.core.text import counted
from megafuse.ir.chain import UNIT, Walk, block, turned_rows
from megafuse.schedule.chain_tile import MOST_STAGES, ChainRules, ChainTile

MOST_BY_FOUR = 64 * 64  # elements of a matrix or a sum that four warps hold without matrix units
SUM_BYTES = 4  # of a number that is added up
OWN = 1024  # bytes of shared memory that each program takes for itself
RESERVED = 8 * 1024  # bytes of shared memory that are not for matrices and row tiles
EARLY_REGISTERS = 32  # of a thread, for the rows of the next tile
FIRST_REGISTERS = 96  # of a thread, for the rows of the only tile
HELD_REGISTERS = 208  # of a thread, for matrices that wait, rows, a product and a sum, where all are in registers
WGMMA_SINCE = 90  # the compute capability whose matrix units take operands from shared memory, 64 rows or more at once
STREAMED_ROWS, STREAMED_WARPS = 64, 8  # of tiles of sums alone
LONGEST_WALK = 32  # tiles: what the tuner found faster than one wave of programs at 1M rows


@dataclass(frozen=True)
class Beside:
    """What lies beside the matrices of a program that loads them first up to one, with the rows up to its product.

    Columns of operands in shared memory: ``most`` at any product or sum, and ``after`` one, where that is stored or its
    result is moved between threads. ``rows``: bytes of each row of what was loaded and of the first operands.
    """

    most: int
    after: int
    rows: int


@dataclass(frozen=True)
class ChainRequest:
    """What a tile is chosen for.

    ``widths`` of the row values; ``matrices``: (K, N) of each matrix that is loaded; ``sums``: of each sum over rows,
    (1, N) for a sum of rows themselves. ``plain``: fp32 products without matrix units. ``loaded``: bytes of
    each row that come from memory. ``turned``: tiles are columns by rows; ``turns``: they could be. ``products``: how
    many of the sums are of products. ``streamed``: it does nothing but sum products of what it loads. ``beside``: what
    lies beside the matrices up to each, in the order of their first products; none is loaded first that has none.
    """

    walk: Walk
    widths: tuple[int, ...]
    matrices: tuple[tuple[int, int], ...]
    sums: tuple[tuple[int, int], ...]
    dtype: DType
    plain: bool
    loaded: int = 0
    turned: bool = False
    turns: bool = False
    products: int = 0
    streamed: bool = False
    beside: tuple[Beside, ...] = ()


def choose_chain_tile(request: ChainRequest, device: DeviceSpec) -> ChainTile:
    """Rows for which registers suffice, fewer where programs would be idle; as many programs as run at once.

    Each problem has programs of its own, at least one.
    Long walks of several programs an SM are cut: one loads its matrices, from L2, while another works, and none is left
    alone with a long rest.
    """
    if request.streamed:
        return _streamed(request, device)
    rows, warps = _plain_rows(request, device) if request.plain else _rows(request, device)
    held = sum(block(k) * block(n) for k, n in request.matrices) * request.dtype.size
    keeps = _shared(request, rows) + RESERVED <= device.shared_per_block
    per_sm = _per_sm(request, rows, device) if keeps and not request.sums else 1
    problems, tiles = request.walk.problems, ceil_div(request.walk.rows, rows)
    walks = request.walk.tiles_each(rows, device.sms * per_sm)
    if per_sm > 1 and not request.plain:
        walks = min(walks, LONGEST_WALK)
    shares = _shares(request, device.sms // (problems * tiles)) if walks == 1 else 1
    kept = f"{held // 1024} KiB of matrices {'kept' if keeps else 'read per tile'}"
    sharing = f", {shares} programs a tile" if shares > 1 else ""
    return ChainTile(
        rows=rows,
        rows_per_chunk=walks * rows,
        num_warps=warps,
        held=keeps,
        turned=request.turned,
        early=walks > 1 and not request.plain and _early_registers(request, rows, warps) <= EARLY_REGISTERS,
        first=_first(request, rows, warps, device) if keeps and walks == 1 else 0,
        shares=shares,
        why=f"{counted(problems * tiles, 'tile')}, {walks} a program{sharing}; {kept}",
    )


def _streamed(request: ChainRequest, device: DeviceSpec) -> ChainTile:
    """Tiles of sums alone: operands go from memory to shared memory, several tiles ahead, and from there to the units.

    One program on each SM, as other chains with sums over as many rows have.
    """
    tiles = ceil_div(request.walk.rows, STREAMED_ROWS)
    walks = ceil_div(tiles, min(tiles, device.sms))
    fitting = (device.shared_per_block - RESERVED) // (STREAMED_ROWS * request.loaded)
    stages = max(1, min(MOST_STAGES, fitting)) if walks > 1 else 1
    why = f"{counted(tiles, 'tile')}, {walks} a program; {counted(stages, 'tile')} in shared memory"
    return ChainTile(STREAMED_ROWS, walks * STREAMED_ROWS, STREAMED_WARPS, stages, why=why)


def _shares(request: ChainRequest, room: int) -> int:
    """Programs that share out the sums of a tile, where there is ``room`` for so many that would be idle.

    Storing sums takes longer than all products before them. Where a program would still store more than two, the
    products that all repeat cost as much.
    """
    shares = max(1, min(request.products, room))
    return shares if 2 * shares >= request.products else 1


def chain_rules(request: ChainRequest, heuristic: ChainTile, device: DeviceSpec) -> ChainRules:
    """What any tile of the chain must satisfy; whether sums are split stays as it is."""
    return ChainRules(
        walk=request.walk,
        width=max(map(block, request.widths)),
        sums=bool(request.sums),
        split=request.walk.rows > heuristic.rows_per_chunk,
        plain=request.plain,
        turns=request.turns,
        narrow=device.narrow_tiles,
        unit=UNIT,
        sms=device.sms,
        most_shares=max(1, request.products),
        most_first=len(request.matrices) if device.loads_first and not request.plain else 0,
        streamed=request.streamed,
    )


def _shared(request: ChainRequest, rows: int) -> int:
    """Bytes of shared memory for all matrices and the widest row tile."""
    held = sum(block(k) * block(n) for k, n in request.matrices)
    return (held + rows * max(map(block, request.widths))) * request.dtype.size


def _per_sm(request: ChainRequest, rows: int, device: DeviceSpec) -> int:
    """Programs that an SM has shared memory for, of which each takes some for itself; two are enough."""
    return max(1, min(2, (device.shared_per_block + OWN) // (_shared(request, rows) + OWN)))


def _rows(request: ChainRequest, device: DeviceSpec) -> tuple[int, int]:
    """Rows and warps on matrix units.

    A row value in fp32 takes 64 registers of a thread at most, 16 where sums over the rows take the others. Tiles of 64
    rows are the smallest that the units of a group of four warps take whole; fewer rows keep more SMs busy, and more
    keep an SM busy that has room for one program only.
    """
    widest = max(map(block, request.widths))
    if request.turned:
        return turned_rows(request.walk, bool(request.sums), device), widest // 16
    if request.sums or widest > 128:
        return (32 if widest <= 128 or not request.sums else 16), 8
    if request.walk.tiles(64) <= device.sms // 2:
        return 32, 4
    alone = _per_sm(request, 64, device) == 1 and request.walk.total >= 128 * device.sms
    return (128, 8) if alone else (64, 4)


def _early_registers(request: ChainRequest, rows: int, warps: int) -> float:
    """Registers of a thread that hold the loaded rows of one tile."""
    return request.loaded * rows / 4 / (32 * warps)


def _first(request: ChainRequest, rows: int, warps: int, device: DeviceSpec) -> int:
    """How many matrices a program of one tile loads first, with the rows up to their products.

    One latency of memory is then waited for, and not one at each product. As many as shared memory holds beside the
    operands, and beside what is exchanged between threads to store a sum, for as many programs as an SM runs. Where
    matrices wait in registers, as many as these hold; none where the units take operands from registers, too, which are
    full then without.
    """
    from_shared = device.arch >= WGMMA_SINCE and (request.turned or rows >= UNIT)
    if request.plain or not device.loads_first or not from_shared:
        return 0
    if _early_registers(request, rows, warps) > FIRST_REGISTERS:
        return 0
    programs = 1 if request.walk.tiles(rows) <= device.sms else _per_sm(request, rows, device)
    room = (device.shared_per_block + OWN) // programs - OWN
    product = SUM_BYTES * rows * max(map(block, request.widths))
    stored = max((SUM_BYTES * block(k) * block(n) for k, n in request.sums), default=0)
    held = itertools.accumulate(block(k) * block(n) * request.dtype.size for k, n in request.matrices)
    count, tiles = 0, rows * request.dtype.size
    for matrices, there in zip(held, request.beside, strict=False):
        fits = matrices + max(tiles * there.most, tiles * there.after + max(product, stored)) <= room
        registers = (matrices + rows * there.rows + product + stored) / 4 / (32 * warps)
        count += fits and (device.stores_at_once or registers <= HELD_REGISTERS)
    return count


def _plain_rows(request: ChainRequest, device: DeviceSpec) -> tuple[int, int]:
    """Rows and warps without matrix units: single rows, where programs would be idle otherwise."""
    largest = max((block(k) * block(n) for k, n in (*request.matrices, *request.sums)), default=0)
    return (1 if request.walk.total <= 2 * device.sms else 16), (8 if largest > MOST_BY_FOUR else 4)
