"""Whether a module is still what it was when it was captured, quickly enough to ask on every call."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import is_
from typing import Any

from torch import nn

from megafuse.capture.leaves import module_state
from megafuse.capture.state import real_table

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODULE_PARTS = frozenset(nn.Module().__dict__)
_NEVER_REPLACED = _MODULE_PARTS - {"training", "_parameters", "_buffers", "_modules", *_HOOKS}  # by code of users


class ModuleWatch:
    """Compares modules with their state of now, as ``module_state`` tells it.

    The quick answer holds the attributes and submodules against those of now by identity; only where one is another
    object, or a list or dictionary that may have changed inside, is the state itself compared.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._states = [module_state(m) for m in self._modules]
        self._look()

    def _look(self) -> None:
        own = [m.__dict__ for m in self._modules]
        submodules = [m._modules for m in self._modules]
        tensors = [real_table(t) for m in self._modules for t in (m._parameters, m._buffers)]
        hooks = [getattr(m, name) for m in self._modules for name in _HOOKS]
        kept = [(t, k) for t in own for k in t if k not in _NEVER_REPLACED] + [(t, k) for t in submodules for k in t]
        kept += [(t, k) for t in tensors for k, v in t.items() if v is None]
        self._tables, self._keys = [t for t, _ in kept], [k for _, k in kept]
        self._values = [t[k] for t, k in kept]
        self._sized: list[Any] = [
            *hooks,
            *own,
            *submodules,
            *tensors,
        ]  # a tensor that is gone is missed when it is read
        self._sizes = [*map(len, self._sized)]
        self._open = any(
            isinstance(v, list | dict) for table in own for k, v in table.items() if k not in _MODULE_PARTS
        )

    def unchanged(self) -> bool:
        """True when every module's state is what it was."""
        if (
            not self._open
            and [*map(len, self._sized)] == self._sizes
            and all(map(is_, map(dict.get, self._tables, self._keys, repeat(self)), self._values))
        ):
            return True
        if [module_state(m) for m in self._modules] != self._states:
            return False
        self._look()
        return True
