"""Stand-ins for modules' parameters and buffers while a function is traced, seen by the tracing thread only.

Other threads that use the same modules meanwhile find the real tensors. Whatever the traced function rebinds on a
module is undone at the end, and reported, since later calls of a captured step would not do it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megafuse.capture.kept import refill, same_content

TRACING = threading.RLock()  # one thread at a time traces, or runs a function on other tensors than its own
_TABLES = ("_parameters", "_buffers")
_ABSENT = object()


class Overlay(MutableMapping[str, Any]):
    """A module's table of parameters or buffers that holds other tensors for the thread that made it."""

    def __init__(self, real: MutableMapping[str, Any], seen: dict[str, Any]) -> None:
        self.real, self.seen, self._owner = real, seen, threading.get_ident()

    def _now(self) -> MutableMapping[str, Any]:
        return self.seen if threading.get_ident() == self._owner else self.real

    def __getitem__(self, name: str) -> Any:
        return self._now()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._now()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def copy(self) -> dict[str, Any]:
        """A plain table, as ``dict.copy`` gives."""
        return dict(self._now())


def real_table(table: Any) -> Any:
    """The table behind an overlay, or the table itself."""
    return table.real if isinstance(table, Overlay) else table


def all_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Every submodule of ``modules``, each once."""
    seen: dict[int, nn.Module] = {}
    for top in modules:
        for module in top.modules():
            seen.setdefault(id(module), module)
    return list(seen.values())


@contextmanager
def swapped_state(modules: Sequence[nn.Module], swaps: Mapping[int, torch.Tensor]) -> Iterator[list[str]]:
    """Within the context parameters and buffers are those that ``swaps`` names by the id of the real tensor.

    Yields a list that holds, after the context, the names of what the function changed on modules: all but buffers
    bound to new tensors. Everything is as before then.
    """
    changed: list[str] = []
    with TRACING:
        every = [_Watched(module) for module in all_modules(modules)]
        try:
            for watched in every:
                watched.overlay(swaps)
            yield changed
        finally:
            for watched in every:
                changed += watched.restore()


class _Watched:
    """One module, as it was when the context was entered."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = {n: v for n, v in module.__dict__.items() if n not in _TABLES}
        self.contents = {n: v.copy() for n, v in self.attributes.items() if type(v) in (list, dict)}
        self.tables = {n: module.__dict__[n] for n in _TABLES}

    def overlay(self, swaps: Mapping[int, torch.Tensor]) -> None:
        for name, table in self.tables.items():
            seen = {n: t if t is None else swaps.get(id(t), t) for n, t in table.items()}
            self.module.__dict__[name] = Overlay(table, seen)

    def restore(self) -> Iterator[str]:
        """Undo the function's changes; their names."""
        now = self.module.__dict__
        kind = type(self.module).__name__
        for name, table in self.tables.items():
            yield from (f"{kind}.{n}" for n in now[name].seen if n not in table)
            now[name] = table
        for name in {**now, **self.attributes}:
            if name not in _TABLES and now.get(name, _ABSENT) is not self.attributes.get(name, _ABSENT):
                yield f"{kind}.{name}"
                self._put_back(name)
        for name, content in self.contents.items():
            value = self.attributes[name]
            if not same_content(value, content):
                yield f"{kind}.{name}"
                refill(value, content)

    def _put_back(self, name: str) -> None:
        if name in self.attributes:
            self.module.__dict__[name] = self.attributes[name]
        else:
            del self.module.__dict__[name]
