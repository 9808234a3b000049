"""The directory on disk where generated text and results are kept: per user, owner-only, or temporary."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path

import platformdirs

ENV = "MEGAFUSE_CACHE_DIR"


def cache_dir() -> Path:
    """The cache directory: ``MEGAFUSE_CACHE_DIR``, else the platform's per-user one.

    It is created with mode 0700. Where it cannot be created, written or kept private (read-only disk, another owner), a
    temporary directory of this process stands in.
    """
    return _prepared(_wanted())


def is_lasting(path: Path) -> bool:
    """False for a path in the temporary directory, which goes with this process."""
    return path.is_relative_to(_wanted())


def read_text(relative: str) -> str | None:
    """The text at ``relative``, as ``write_text`` left it; None where there is none.

    Raises:
        UnicodeDecodeError: what is there is no text.
    """
    folders = [cache_dir(), *([_temporary()] if _temporary.cache_info().currsize else [])]
    for folder in reversed(folders):  # what could not be written to the first is in the second
        try:
            return (folder / relative).read_text(encoding="utf-8")
        except OSError:
            continue
    return None


def remove(relative: str) -> None:
    """Remove the file at ``relative`` where that is possible."""
    with contextlib.suppress(OSError):
        (cache_dir() / relative).unlink()


def write_text(relative: str, text: str) -> Path:
    """Put ``text`` at ``relative`` in the cache directory, atomically; a file that has this text already is kept.

    A file with other text (corrupted, tampered with) is replaced. Survives a full or read-only disk by a temporary
    directory.
    """
    try:
        return _write(cache_dir() / relative, text)
    except OSError:
        return _write(_temporary() / relative, text)


def _wanted() -> Path:
    return Path(os.environ.get(ENV) or platformdirs.user_cache_dir("megafuse"))


def _write(path: Path, text: str) -> Path:
    if _same(path, text):
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def _same(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


@functools.lru_cache(maxsize=16)
def _prepared(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError:
        return _temporary()
    return path


def _make_private(path: Path) -> None:
    """Take the rights of group and others away; ``PermissionError`` where the directory is another user's."""
    found = path.stat()
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)


@functools.lru_cache(maxsize=1)
def _temporary() -> Path:
    path = Path(tempfile.mkdtemp(prefix="megafuse-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path
