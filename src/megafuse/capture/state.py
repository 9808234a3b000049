"""Stand-ins put in the place of modules' parameters and buffers while a function is traced, and taken out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def all_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Every submodule of ``modules``, each once."""
    seen: dict[int, nn.Module] = {}
    for top in modules:
        for module in top.modules():
            seen.setdefault(id(module), module)
    return list(seen.values())


@contextmanager
def swapped_state(modules: Sequence[nn.Module], swaps: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Within the context parameters and buffers are those that ``swaps`` names by the id of the real tensor.

    Whatever the traced function rebinds on a module (buffers, tensor attributes) is undone at the end.
    """
    every = all_modules(modules)
    saved = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in every]
    try:
        for module in every:
            state: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in state:
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = swaps.get(id(tensor), tensor)
        yield
    finally:
        for module, attributes, parameters, buffers in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for current, old in _pairs(module, parameters, buffers):
                current.clear()
                current.update(old)


def _pairs(module: nn.Module, *old: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    yield from zip((module._parameters, module._buffers), old, strict=True)
