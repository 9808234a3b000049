"""The cache directory: where it is, what is in it, what was measured, and emptying it."""

from __future__ import annotations

import shutil
from itertools import groupby
from pathlib import Path

from megafuse.cli.measured import as_text, tuned_table
from megafuse.core.text import counted, quantity
from megafuse.runtime.cachedir import ENV, cache_dir
from megafuse.runtime.plan_store import FOLDER, all_entries


def _files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]


def cache_report() -> str:
    """Where the cache is, and the number and size of its files."""
    folder = cache_dir()
    files = _files(folder)
    size = sum(f.stat().st_size for f in files)
    lines = [
        f"{folder}",
        f"{counted(len(files), 'file')}, {quantity(size, 'B')} (the environment variable {ENV} moves it)",
    ]
    for device, entries in groupby(all_entries(), key=lambda pair: pair[0]):
        lines.append(f"{counted(len(list(entries)), 'kernel')} measured on {device} (--tuned lists them)")
    return "\n".join(lines)


def tuned_report() -> str:
    """Everything that was measured, by device."""
    groups = groupby(all_entries(), key=lambda pair: pair[0])
    return "\n\n".join(as_text(tuned_table([e for _, e in g], device)) for device, g in groups) or "nothing measured"


def clear_cache(*, tuned: bool = False) -> str:
    """Delete everything in the cache directory, or only what was measured; says what was freed."""
    folder = cache_dir() / FOLDER if tuned else cache_dir()
    files = _files(folder)
    size = sum(f.stat().st_size for f in files)
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return f"{folder}\ndeleted {counted(len(files), 'file')}, {quantity(size, 'B')}"
