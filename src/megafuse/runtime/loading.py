"""Generated text as Python modules."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Mapping
from types import CodeType, ModuleType
from typing import Any

from megafuse.runtime import cachedir

_modules: dict[str, ModuleType] = {}
_lock = threading.Lock()


def load_module(text: str, name: str) -> ModuleType:
    """The module of a kernel's ``text``; two equal texts are one module in a process.

    The text is written to the cache directory under its content hash, since Triton reads a kernel's source back from
    the file. The code that runs is compiled from ``text`` itself, never from what the disk holds.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    with _lock:
        if digest not in _modules:
            _modules[digest] = _execute(text, name, digest, {})
        return _modules[digest]


def load_host(text: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Run launch code with ``names`` as its globals; returns the module's namespace. Each call makes a new module."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    return vars(_execute(text, "host", digest, names))


def _execute(text: str, name: str, digest: str, names: Mapping[str, Any]) -> ModuleType:
    path = cachedir.write_text(f"sources/{name}_{digest}.py", text)
    module = ModuleType(f"megafuse_generated_{name}_{digest}")
    module.__file__ = str(path)
    vars(module).update(names)
    exec(_compiled(text, str(path)), vars(module))
    return module


@functools.lru_cache(maxsize=64)
def _compiled(text: str, path: str) -> CodeType:
    """The same launch code serves several sizes, each in a module of its own."""
    return compile(text, path, "exec")
