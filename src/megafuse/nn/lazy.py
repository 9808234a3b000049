"""Modules that fuse themselves at their first call in each situation."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
from torch import nn

from megafuse.api import make_engine, plain, served
from megafuse.compiler import Engine, Options

_LOCK = threading.Lock()


class LazilyFused(nn.Module):
    """Base of modules whose calls run the ``forward`` of ``__plain__`` in generated kernels.

    The engine belongs to the object and not to its state: copies and pickles are of the state alone and capture at
    their first call. Where another compiler traces through, the plain ``forward`` is what it sees.
    """

    __slots__ = ("_engine",)
    __plain__: ClassVar[type[nn.Module]]
    fuse_options: Options

    @property
    def __megafuse__(self) -> Engine:
        """The engine that serves this object's calls."""
        try:
            return self._engine
        except AttributeError:
            return self._first_engine()

    def _first_engine(self) -> Engine:
        with _LOCK:  # of several first calls, one makes it
            if not hasattr(self, "_engine"):
                self._engine = make_engine(plain(self).forward, self.fuse_options)
            return self._engine

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The plain class's ``forward``, fused."""
        if torch.compiler.is_compiling():
            return self.__plain__.forward(self, *args, **kwargs)
        return served(self.__megafuse__, args, kwargs)
