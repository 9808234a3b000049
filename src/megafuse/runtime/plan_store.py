"""Measured tiles on disk: one small JSON file for each kernel on each device, and plan files that hold many.

A file's name is a digest of all that a measurement depends on: kernel, device, versions. Files are replaced whole, so
that a process that is killed, or seven others, leave no half of one; what cannot be read is said, dropped and measured
anew. Nothing that is read is executed: entries hold numbers, which the schedule stage checks before it takes them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import filelock

from megafuse.core.errors import InputError
from megafuse.core.warn import warn_user
from megafuse.runtime import cachedir

FORMAT = 5  # of entries, and of what tiles mean to the code generator
FOLDER = "tuned"
MOST_CHARACTERS = 16_384  # of an entry
_KIND = "megafuse plan"


class TuningWarning(UserWarning):
    """Tuning, or what is kept of it, did not go as asked; the text says what happens instead."""


@dataclass(frozen=True)
class Entry:
    """The tiles that measurement chose for one kernel, and what was measured.

    ``tiles`` holds one object for each phase. ``seconds`` is the median time of one launch with these tiles,
    ``heuristic_seconds`` with the heuristic's. ``facts``: registers, spills, shared memory and the like, for reports.
    """

    key: str
    name: str
    tiles: tuple[Mapping[str, Any], ...]
    num_warps: int
    seconds: float
    heuristic_seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Any) -> Entry:
        """From JSON data.

        Raises:
            ValueError: it is not an entry.
        """
        try:
            tiles = tuple(dict(t) for t in data["tiles"])
            key, name, facts = str(data["key"]), str(data["name"]), dict(data["facts"])
            times, warps = (float(data["seconds"]), float(data["heuristic_seconds"])), data["num_warps"]
            if type(warps) is not int:
                raise ValueError(f"num_warps {warps!r}")
            return cls(key, name, tiles, warps, *times, facts)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"no entry: {type(error).__name__} {error}") from error


@dataclass(frozen=True)
class PlanFile:
    """An exported plan: entries by kernel key, for one device."""

    path: Path
    device: str
    entries: Mapping[str, Entry]


def read_entry(key: str, device: str) -> Entry | None:
    """What was measured of a kernel on this device with these versions; None: nothing.

    A file that cannot be read is removed, with a warning.
    """
    relative = _place(key, device)
    try:
        text = cachedir.read_text(relative)
        if text is None:
            return None
        entry = Entry.of(_parsed(text))
        if entry.key != key:
            raise ValueError(f"it is of kernel {entry.key}")
    except ValueError as error:  # wrong JSON and wrong UTF-8 are among these
        drop_entry(key, device, str(error))
        return None
    return entry


def _parsed(text: str) -> Any:
    """JSON data of the size of an entry; ``ValueError`` for anything else."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text)} characters")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def drop_entry(key: str, device: str, why: str) -> None:
    """Remove an entry that is not usable, and say so."""
    relative = _place(key, device)
    cachedir.remove(relative)
    say(f"the kept measurement {cachedir.cache_dir() / relative} is not usable ({why}); it is dropped")


def write_entry(entry: Entry, device: str) -> Path:
    """Keep an entry; says so where it will not outlive this process."""
    data = {"format": FORMAT, "device": device, "versions": _versions(), **asdict(entry)}
    path = cachedir.write_text(_place(entry.key, device), json.dumps(data, indent=1) + "\n")
    if not cachedir.is_lasting(path):
        _say_once(f"the cache directory cannot be written; what is measured is kept in {path.parent} for now")
    return path


def all_entries() -> list[tuple[str, Entry]]:
    """(device, entry) of everything kept, by device and name; files that cannot be read are left out."""
    found = []
    for path in sorted((cachedir.cache_dir() / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = _parsed(path.read_text(encoding="utf-8"))
            found.append((str(data["device"]), Entry.of(data)))
    return sorted(found, key=lambda pair: (pair[0], pair[1].name, pair[1].key))


@contextlib.contextmanager
def tuning_lock(timeout: float) -> Iterator[None]:
    """Only one process of a user measures at a time; the others wait, and then find what it has measured.

    After ``timeout`` seconds, or where no lock can be made, measuring goes on without, with a warning.
    """
    lock = filelock.FileLock(str(cachedir.cache_dir() / "tuning.lock"), timeout=timeout)
    try:
        lock.acquire()
    except (OSError, filelock.Timeout) as error:
        what = f"waited {timeout:.0f} s for another process" if isinstance(error, filelock.Timeout) else str(error)
        say(f"tuning without its lock ({what}): other processes may disturb the measurement")
    try:
        yield
    finally:
        lock.release()


def write_plan(path: Path, device: str, entries: Iterable[Entry]) -> None:
    """Write a plan file.

    Raises:
        InputError: the file cannot be written.
    """
    kernels = {e.key: asdict(e) for e in entries}
    data = {"kind": _KIND, "format": FORMAT, "device": device, "versions": _versions(), "kernels": kernels}
    try:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the plan {path}: {error}", hint="give a path that can be written") from error


def read_plan(path: Path) -> PlanFile:
    """Read a plan file.

    Raises:
        InputError: it is not there, or not a plan file of this format.
    """
    hint = "write one on the GPU by `megafuse tune --module pkg.mod:factory --input ... --export FILE`"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kind, written = (data.get("kind"), data.get("format")) if isinstance(data, dict) else (None, None)
        if kind != _KIND:
            raise ValueError(f"its field 'kind' is {kind!r}, not {_KIND!r}")
        if written != FORMAT:
            raise ValueError(f"it has format {written!r} of another release of megafuse")
        entries = {str(key): Entry.of(e) for key, e in data["kernels"].items()}
        return PlanFile(path, str(data["device"]), entries)
    except OSError as error:
        raise InputError(f"cannot read the plan {path}: {error}", hint=hint) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is no plan file of format {FORMAT}: {error}", hint=hint) from error


def say(text: str) -> None:
    """Warn."""
    warn_user(text, TuningWarning)


@functools.lru_cache(maxsize=8)
def _say_once(text: str) -> None:
    say(text)


def _place(key: str, device: str) -> str:
    text = json.dumps([FORMAT, key, device, _versions()])
    return f"{FOLDER}/{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@functools.lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    try:
        return {"triton": importlib.metadata.version("triton")}
    except importlib.metadata.PackageNotFoundError:
        return {"triton": ""}
