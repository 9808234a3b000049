"""One kernel with other tiles: as the ordinary stages make it, with its finishers, ready to run on its own.

What a chunk of rows is decides how many partial sums there are, and thereby the kernels that add them up. So a variant
is not a patched kernel: the step is scheduled again with the tiles in question, and the kernels are taken from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.chain_program import ChainProgram, flat_chain
from megafuse.codegen.program import ColReduce, Convert, RowReduce, TileProgram
from megafuse.compiler.driver import PRINTERS, Compiled, reschedule
from megafuse.core.dtypes import DType
from megafuse.core.sizes import open_dims, settle
from megafuse.ir.graph import Node
from megafuse.ir.types import Input
from megafuse.schedule.chain_tile import ChainRules, ChainTile
from megafuse.schedule.row_walk import pieces_of_accesses
from megafuse.schedule.types import Buffer, KernelSchedule, KernelTiles, Step, Tile, TileRules
from megafuse.select.choose import select

__all__ = [
    "ChainRules", "ChainTile", "KernelSource", "KernelTiles", "Place", "Subject", "Tile", "TileRules", "Variant",
    "alike", "in_precision", "make_variants", "pieces_of_accesses", "select", "subjects", "tiles_of_kernel",
]  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A buffer of a variant. ``kind``: given (read), made (a result), partial (between its kernels).

    ``name`` is the same in all variants of a kernel. ``inner``: what a chain's matrix is summed over, 0 for the rest.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    kind: str
    inner: int = 0


@dataclass(frozen=True)
class Variant:
    """A kernel with given tiles, and behind it the kernels that add up its partial sums.

    ``args[i]``: names of the places that ``programs[i]`` takes. Open sizes are at their typical values.
    """

    key: str
    tiles: KernelTiles
    programs: tuple[TileProgram | ChainProgram, ...]
    sources: tuple[KernelSource, ...]
    args: tuple[tuple[str, ...], ...]
    places: tuple[Place, ...]

    @property
    def reduces(self) -> bool:
        """Some result is a reduction, whose order of additions may depend on the tiles."""
        if any(isinstance(p, ChainProgram) for p in self.programs):
            return True  # the order within products, too
        bodies = (w.body for p in self.programs for phase in p.phases for w in phase.passes)
        return any(isinstance(s, RowReduce | ColReduce) for body in bodies for s in body)


@dataclass(frozen=True)
class Subject:
    """A kernel to be tuned. ``rules``: one for each phase, or ``chain``; ``dram_bytes``: of one launch."""

    key: str
    name: str
    tiles: KernelTiles
    rules: tuple[TileRules, ...]
    dram_bytes: int
    finishes: str
    chain: ChainRules | None = None


def subjects(step: Step) -> list[Subject]:
    """The kernels of a step, each once, in order; tiles of generated products are not tuned."""
    found: dict[str, Subject] = {}
    for kernel in (k for k in step.kernels if k.key):
        rules = tuple(p.rules for p in kernel.phases if p.rules is not None)
        found.setdefault(
            kernel.key,
            Subject(
                kernel.key,
                kernel.name,
                tiles_of_kernel(kernel),
                rules,
                kernel.dram_bytes,
                kernel.finishes,
                kernel.chain.rules if kernel.chain else None,
            ),
        )
    return list(found.values())


def tiles_of_kernel(kernel: KernelSchedule) -> KernelTiles:
    """The tiles that a kernel has; a chunk that follows from the walk is 0."""
    if kernel.chain is not None:
        return KernelTiles((), kernel.num_warps, replace(kernel.chain.tile, why=""))
    tiles = [replace(p.tile, num_warps=kernel.num_warps, why="") for p in kernel.phases]
    whole = [p.rules is not None and p.rules.whole_loop for p in kernel.phases]
    tiles = [replace(t, rows_per_chunk=0) if w else t for t, w in zip(tiles, whole, strict=True)]
    return KernelTiles(tuple(tiles), kernel.num_warps)


def make_variants(
    compiled: Compiled, tiles: Mapping[str, KernelTiles], wanted: Iterable[str], backend: str
) -> dict[str, Variant]:
    """The kernels ``wanted`` (by key) of the step that is scheduled with ``tiles``.

    Kernels do not see one another's tiles, so that many can be asked for at once. One that is not in the step (its
    partial sums went) is left out, and so is one whose tiles were not taken.
    """
    made = reschedule(compiled, tiles.get, finishers_alone=True)
    at = {d.name: d.typical for d in open_dims(made.step.buffers)}
    by_key = {k.key: n for n, k in reversed(list(enumerate(made.step.kernels)))}
    found = {}
    for key in wanted:
        if key not in by_key:
            continue
        variant = _variant(made, by_key[key], backend, at)
        if key not in tiles or alike(variant.tiles, tiles[key]):
            found[key] = variant
    return found


def alike(made: KernelTiles, asked: KernelTiles) -> bool:
    """Equal but for what follows from the rest."""
    if made.chain is not None or asked.chain is not None:
        return made.chain == (asked.chain and replace(asked.chain, why=""))
    pairs = list(zip(made.tiles, asked.tiles, strict=False))
    return (made.num_warps, len(made.tiles)) == (asked.num_warps, len(asked.tiles)) and all(
        all(getattr(m, name) == getattr(a, name) for name in ("row_tile", "pieces", "num_stages", "hoist", "abreast"))
        for m, a in pairs
    )


def _variant(compiled: Compiled, number: int, backend: str, at: Mapping[str, int]) -> Variant:
    step = compiled.step
    main = step.kernels[number]
    mine = [number, *_finishers(step, main)]
    kernels = [step.kernels[n] for n in mine]
    written = {name for k in kernels for name in k.writes}
    nodes = {name: node for node, name in step.names.items()}
    buffers = {b.name: b for b in step.buffers}
    names = dict.fromkeys(name for k in kernels for name in k.args)
    places = {n: _place(settle(buffers[n], at), nodes[n], n in written, len(mine) > 1) for n in names}
    made = (compiled.programs[n] for n in mine)
    programs = tuple(p for p in made if isinstance(p, TileProgram | ChainProgram))  # all: a subject is no product
    inner = programs[0].inner if isinstance(programs[0], ChainProgram) else {}
    places = {n: replace(place, inner=inner.get(n, 0)) for n, place in places.items()}
    return Variant(
        main.key,
        tiles_of_kernel(main),
        programs,
        tuple(compiled.alike(PRINTERS[backend](p)).at(at) for p in programs),
        tuple(tuple(places[n].name for n in k.args) for k in kernels),
        tuple(places.values()),
    )


def _finishers(step: Step, main: KernelSchedule) -> list[int]:
    """The kernels that add up ``main``'s partial sums, in order."""
    own = set(main.writes)
    return [n for n, k in enumerate(step.kernels) if k.finishes == main.key and own & set(k.reads)]


def _place(buffer: Buffer, node: Node, written: bool, summed: bool) -> Place:
    partial = isinstance(node.attrs, Input) and node.attrs.role == "partial"
    kind = "given" if not written else "partial" if partial and summed else "made"
    return Place(f"{'p' if partial else 'n'}{node.uid}", buffer.shape, buffer.strides, buffer.dtype, kind)


def in_precision(variant: Variant, backend: str, dtype: DType) -> Variant:
    """The same computation with all floating-point values and buffers in ``dtype``, and no rounding on the way.

    Row loops are not pipelined: wider values would not fit the shared memory. Chains walk single rows, whose products
    need no matrix units.
    """
    pairs = zip(variant.programs, variant.sources, strict=True)
    sizes = {d.name: n for p, s in pairs for d, n in zip(p.dims, s.sizes, strict=True)}
    programs = tuple(_single(_promoted(p, dtype)) for p in variant.programs)
    places = tuple(_promoted(p, dtype) for p in variant.places)
    sources = tuple(PRINTERS[backend](p).at(sizes) for p in programs)
    return replace(variant, programs=programs, sources=sources, places=places)


def _single(program: TileProgram | ChainProgram) -> TileProgram | ChainProgram:
    return flat_chain(program) if isinstance(program, ChainProgram) else replace(program, num_stages=1)


def _promoted(value: Any, dtype: DType) -> Any:
    """``value`` with every floating-point type in it replaced by ``dtype``."""
    if isinstance(value, DType):
        return dtype if value.is_float else value
    if isinstance(value, tuple):
        return tuple(_promoted(v, dtype) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        new = {f.name: _promoted(getattr(value, f.name), dtype) for f in fields(value) if f.init}
        new |= {"through": None} if isinstance(value, Convert) else {}
        return replace(value, **new)
    return value
