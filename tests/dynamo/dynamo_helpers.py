"""Compiles with the backend under the interpreter, and finds the compiled graphs behind a compiled callable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megafuse.compiler import Compiled
from megafuse.dynamo.backend import CompiledGraph
from megafuse.validate import CheckOptions, check

INTERPRET = {"target": "interpret"}
# poisoned allocations come from a dispatch mode, under which PyTorch would not compile
FEW = CheckOptions(seeds=2, small_seeds=1, repeats=1, poison=False)


def compiled(fn: Any, *, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """``fn`` through the backend's name, its generated programs run on CPU tensors."""
    return torch.compile(fn, backend="megafuse", options=options or INTERPRET, **kwargs)


@contextmanager
def graphs_made() -> Iterator[list[CompiledGraph]]:
    """The graphs that the backend serves, as they are made."""
    made: list[CompiledGraph] = []
    init = CompiledGraph.__init__

    def record(self: CompiledGraph, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    with mock.patch.object(CompiledGraph, "__init__", record):
        yield made


def compilations(made: list[CompiledGraph]) -> list[Compiled]:
    """What runs in generated kernels, by graph and shape."""
    return [b.compiled for g in made if not g.unfused for b in g.engine.bindings if b.compiled is not None]


def check_compiled(fn: Callable[..., Any], *args: Any, graphs: int = 1, **kwargs: Any) -> list[CompiledGraph]:
    """``fn`` compiled agrees with ``fn`` by the acceptance rule, and ``graphs`` of its graphs run generated kernels."""
    with graphs_made() as made:
        check(fn, *args, fused=compiled(fn, **kwargs), options=FEW).raise_if_failed()
    served = [g for g in made if compilations([g])]
    assert len(served) == graphs, [g.unfused for g in made]
    return made
