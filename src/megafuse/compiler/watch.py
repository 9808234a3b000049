"""Whether a module is still what it was when it was captured, quickly enough to ask on every call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from megafuse.capture.leaves import module_state
from megafuse.capture.state import real_table

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules")
# The version of a dictionary (PEP 509), which every change of it renews; later Pythons do without.
_version: Callable[[Any], int] | None = (
    getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "dict_version", None)
    if sys.version_info < (3, 12)
    else None
)
_MODULE_PARTS = frozenset(nn.Module().__dict__)  # those that code of users never replaces are not looked at


class ModuleWatch:
    """Compares modules with their state of now, as ``module_state`` tells it.

    The quick answer holds the attributes and submodules against those of now by identity, where the dictionaries that
    hold them were changed at all or do not tell; only where one is another object, or a list or dictionary that may
    have changed inside, is the state itself compared.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._states = [module_state(m) for m in self._modules]
        self._tensors = self._tensor_tables()
        self._look()

    def _look(self) -> None:
        own: list[Any] = [m.__dict__ for m in self._modules]
        submodules = [m._modules for m in self._modules]
        tensors = self._tensor_tables()
        hooks = [getattr(m, name) for m in self._modules for name in _HOOKS]
        standard = ("training", *_TABLES, *_HOOKS)
        self._standard: list[tuple[Any, ...]] = [(t, len(t), *map(t.get, standard)) for t in own]
        kept = [(t, k) for t in own for k in t if k not in _MODULE_PARTS] + [(t, k) for t in submodules for k in t]
        kept += [(t, k) for t in tensors for k, v in t.items() if v is None]
        self._kept: list[tuple[Any, Any, Any]] = [(t, k, t[k]) for t, k in kept]
        sized: list[Any] = [*hooks, *submodules, *tensors]  # a tensor that is gone is missed when it is read
        self._empty = tuple(t for t in sized if not t)
        self._filled = [(t, [*t]) for t in sized if t]
        tables = [*own, *(t for t, _ in self._filled)]
        ordered = any(type(t) is not dict for t in tables)  # such a table's order may change and its version not
        self._tables = () if ordered else tuple(tables)
        self._versions: list[int] = []  # those with which all was last seen to be the same
        self._open = any(
            isinstance(v, list | dict) for table in own for k, v in table.items() if k not in _MODULE_PARTS
        )

    def unchanged(self) -> bool:
        """True when every module's state is what it was."""
        try:
            if not self._open and not any(self._empty):
                versions = self._versions_now()
                if (versions and versions == self._versions) or self._looks_the_same():
                    self._versions = versions
                    return True
        except KeyError:  # something was deleted
            pass
        if [module_state(m) for m in self._modules] != self._states:
            return False
        if self.moved():
            return False
        self._look()
        return True

    def moved(self) -> bool:
        """True when tables of parameters or buffers were replaced: tensors are read from the tables of then."""
        return any(now is not then for now, then in zip(self._tensor_tables(), self._tensors, strict=True))

    def _versions_now(self) -> list[int]:
        """Of the dictionaries that hold what the quick answer looks at; none where they do not tell."""
        return [*map(_version, self._tables)] if _version is not None else []

    def _tensor_tables(self) -> list[Any]:
        return [real_table(t) for m in self._modules for t in (m._parameters, m._buffers)]

    def _looks_the_same(self) -> bool:
        """The quick answer, in plain loops: this may be asked at every call."""
        for own, size, training, parameters, buffers, submodules, forward, before, back, before_back in self._standard:
            if (
                len(own) != size
                or own["training"] is not training
                or own["_parameters"] is not parameters
                or own["_buffers"] is not buffers
                or own["_modules"] is not submodules
                or own["_forward_hooks"] is not forward
                or own["_forward_pre_hooks"] is not before
                or own["_backward_hooks"] is not back
                or own["_backward_pre_hooks"] is not before_back
            ):
                return False
        for table, keys in self._filled:
            if [*table] != keys:
                return False
        for table, key, value in self._kept:  # noqa: SIM110 (a generator takes longer)
            if table[key] is not value:
                return False
        return True
