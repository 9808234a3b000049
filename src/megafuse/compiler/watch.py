"""Whether a module is still what it was when it was captured, quickly enough to ask on every call."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from megafuse.capture.leaves import module_state
from megafuse.capture.state import real_table

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODULE_PARTS = frozenset(nn.Module().__dict__)


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
        self._tables: list[dict[str, Any]] = [*own, *(m._modules for m in self._modules)]
        self._hooks = [getattr(m, name) for m in self._modules for name in _HOOKS]
        self._values = [v for table in self._tables for v in table.values()]
        self._listening = sum(map(len, self._hooks))
        self._tensors = [real_table(t) for m in self._modules for t in (m._parameters, m._buffers)]
        self._count = sum(map(len, self._tensors))
        self._missing = [(table, name) for table in self._tensors for name, t in table.items() if t is None]
        self._open = any(
            isinstance(v, list | dict) for table in own for k, v in table.items() if k not in _MODULE_PARTS
        )

    def unchanged(self) -> bool:
        """True when every module's state is what it was."""
        if (
            not self._open
            and sum(map(len, self._hooks)) == self._listening
            and sum(map(len, self._tables)) == len(self._values)
            and sum(map(len, self._tensors)) == self._count  # one that is gone is missed when its tensor is read
            and all(table.get(name, self) is None for table, name in self._missing)
            and all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._values))
        ):
            return True
        if [module_state(m) for m in self._modules] != self._states:
            return False
        self._look()
        return True
