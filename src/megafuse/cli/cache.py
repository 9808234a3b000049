"""The cache directory: where it is, what is in it, and emptying it."""

from __future__ import annotations

import shutil
from pathlib import Path

from megafuse.explanation.text import quantity
from megafuse.runtime.cachedir import ENV, cache_dir


def _files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]


def cache_report() -> str:
    """Where the cache is, and the number and size of its files."""
    folder = cache_dir()
    files = _files(folder)
    size = sum(f.stat().st_size for f in files)
    return f"{folder}\n{len(files)} files, {quantity(size, 'B')} (moved by the environment variable {ENV})"


def clear_cache() -> str:
    """Delete everything in the cache directory; says what was freed."""
    folder = cache_dir()
    files = _files(folder)
    size = sum(f.stat().st_size for f in files)
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return f"{folder}\ndeleted {len(files)} files, {quantity(size, 'B')}"
