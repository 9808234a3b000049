"""Tiles that measurement chose: where they are looked up when a call is compiled, and who measures what is missing.

A plan file, where one is given, is all that counts. Otherwise what this machine has measured before is taken from the
cache. Kernels of which nothing is known have the heuristic's tiles.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megafuse.compiler.driver import Compiled, reschedule
from megafuse.core.device import DeviceSpec
from megafuse.core.errors import InputError
from megafuse.runtime.plan_store import Entry, PlanFile, drop_entry, read_entry, read_plan, say
from megafuse.schedule.chain_tile import ChainTile
from megafuse.schedule.types import KernelTiles, Tile

HEURISTIC_ENV = ("MEGAFUSE_FAST_AUTOTUNE", "MLP_FAST_AUTOTUNE")
PLAN_ENV, REQUIRE_ENV = "MEGAFUSE_PLAN", "MEGAFUSE_REQUIRE_PLAN"
CHAIN_SIZES, CHAIN_FLAGS = ("rows", "rows_per_chunk", "num_stages", "shares", "first"), ("held", "turned", "early")
INTERPRETER = "interpreter"  # the device under which measurements of interpreted kernels would be kept

# measures on a device what is not known of a compilation's kernels, and keeps it
Tuner = Callable[[Compiled, torch.device], None]


@dataclass
class KnownTiles:
    """Tiles by kernel key, for ``build_step``. ``found`` holds the entries of the keys asked for.

    ``plan``: a plan file alone is read, not the cache. ``tunes``: what is missing is to be measured. ``required``: a
    kernel without an entry is an error. Without ``device`` nothing is known.
    """

    device: str = ""
    plan: PlanFile | None = None
    tunes: bool = False
    required: bool = False
    found: dict[str, Entry] = field(default_factory=dict)

    def __call__(self, key: str) -> KernelTiles | None:
        """The tiles kept for a kernel.

        Raises:
            InputError: a plan file's entry is none.
        """
        entry = self._entry(key)
        if entry is None:
            return None
        try:
            tiles = tiles_of(entry)
        except ValueError as error:
            if self.plan:
                raise InputError(f"{self.plan.path}: the entry of {entry.name} is not usable: {error}") from error
            drop_entry(key, self.device, str(error))
            return None
        self.found[key] = entry
        return tiles

    def _entry(self, key: str) -> Entry | None:
        if self.plan is not None:
            return self.plan.entries.get(key)
        return read_entry(key, self.device) if self.device else None

    def missing(self, compiled: Compiled) -> list[str]:
        """Names of the kernels that have no entry, or one that is not legal for them."""
        known = self.found.keys() - compiled.step.refused
        return [k.name for k in compiled.step.kernels if k.key and k.key not in known]


def find_known(device: DeviceSpec, target: str, *, tune: bool | None = None, plan: str | None = None) -> KnownTiles:
    """What is known for ``device`` under the user's options and environment.

    ``MEGAFUSE_FAST_AUTOTUNE=1`` or ``tune=False``: the heuristic alone, but for a plan file (``plan`` or
    ``MEGAFUSE_PLAN``).

    Raises:
        InputError: the plan file cannot be read, or is for another device.
    """
    required = os.environ.get(REQUIRE_ENV) == "1"
    name = device.name if target == "cuda" else INTERPRETER
    path = plan or os.environ.get(PLAN_ENV)
    if path:
        file = read_plan(Path(path))
        if target == "cuda" and file.device != name:
            what = f"the plan {path} was measured on {file.device}, this is {name}"
            raise InputError(what, hint="measure one here by `megafuse tune --export FILE`")
        return KnownTiles(name, file, required=required)
    if tune is False or any(os.environ.get(e) == "1" for e in HEURISTIC_ENV):
        return KnownTiles(required=required)
    if tune and target != "cuda":
        say("nothing can be timed without a GPU: kernels have the heuristic's tiles")
    return KnownTiles(name, tunes=bool(tune) and target == "cuda", required=required)


def complete(
    compiled: Compiled, known: KnownTiles, tuner: Tuner | None = None, device: torch.device | None = None
) -> Compiled:
    """``compiled``, with tiles measured now on ``device`` where they are missing and that is asked for.

    Raises:
        InputError: ``MEGAFUSE_REQUIRE_PLAN=1``, and a kernel has no entry.
    """
    if tuner is not None and device is not None and known.tunes and known.missing(compiled):
        tuner(compiled, device)
        known = replace(known, found={})
        compiled = reschedule(compiled, known)
    missing = known.missing(compiled)
    if known.required and missing:
        where = f"the plan {known.plan.path}" if known.plan else "the cache"
        raise InputError(
            f"{REQUIRE_ENV}=1 is set, and {where} has no usable entry for {', '.join(missing)}",
            hint="measure them by `megafuse tune --export FILE`, or unset the variable",
        )
    return with_measured(compiled, known.found)


def with_measured(compiled: Compiled, entries: Mapping[str, Entry]) -> Compiled:
    """``compiled`` with the measured time of each kernel that has one."""
    measured = {k: e.seconds for k, e in entries.items() if e.seconds > 0 and k not in compiled.step.refused}
    return replace(compiled, measured=measured) if measured else compiled


def tiles_as_data(tiles: KernelTiles) -> tuple[dict[str, Any], ...]:
    """What an entry holds of the tiles: one object for each phase, or one for a chain."""
    if tiles.chain is not None:
        return ({name: getattr(tiles.chain, name) for name in (*CHAIN_SIZES, *CHAIN_FLAGS)},)
    return tuple(
        {
            "row_tile": t.row_tile,
            "rows_per_chunk": t.rows_per_chunk,
            "pieces": list(t.pieces),
            "col_block": t.col_block,
            "col_grid": t.col_grid,
            "num_stages": t.num_stages,
            "hoist": t.hoist,
            "abreast": t.abreast,
        }
        for t in tiles.tiles
    )


def tiles_of(entry: Entry) -> KernelTiles:
    """The tiles of an entry; whether they are legal for the kernel is asked later.

    Raises:
        ValueError: it holds no tiles.
    """
    if len(entry.tiles) == 1 and CHAIN_SIZES[0] in entry.tiles[0]:
        return KernelTiles((), entry.num_warps, _chain_tile(entry.tiles[0], entry.num_warps))
    return KernelTiles(tuple(_tile(t, entry.num_warps) for t in entry.tiles), entry.num_warps)


def _tile(data: Mapping[str, Any], warps: int) -> Tile:
    numbers = ("row_tile", "rows_per_chunk", "col_block", "num_stages", "abreast")
    try:
        sizes = {n: data[n] for n in numbers}
        pieces, flags = tuple(data["pieces"]), {n: data[n] for n in ("col_grid", "hoist")}
    except (KeyError, TypeError) as error:
        raise ValueError(f"a tile without {error}") from error
    if not _whole([*sizes.values(), *pieces, warps]) or not all(isinstance(f, bool) for f in flags.values()):
        raise ValueError(f"a tile of {dict(data)!r}")
    return Tile(pieces=pieces, num_warps=warps, why="measured", **sizes, **flags)


def _chain_tile(data: Mapping[str, Any], warps: int) -> ChainTile:
    try:
        sizes, flags = {n: data[n] for n in CHAIN_SIZES}, {n: data[n] for n in CHAIN_FLAGS}
    except KeyError as error:
        raise ValueError(f"a tile without {error}") from error
    if not _whole([*sizes.values(), warps]) or not all(isinstance(f, bool) for f in flags.values()):
        raise ValueError(f"a tile of {dict(data)!r}")
    return ChainTile(num_warps=warps, why="measured", **sizes, **flags)


def _whole(values: Iterable[Any]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)
