"""The table of converters: one function per ATen op, found by overload name first, then by op name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from megafuse.capture.context import Context, Result

Converter = Callable[..., Result]
F = TypeVar("F", bound=Converter)

_TABLE: dict[str, Converter] = {}


def converts(*names: str) -> Callable[[F], F]:
    """Register the decorated function for ATen ops, named ``add`` (every overload) or ``add.Tensor``.

    The function is called with the context and the op's own arguments, tensors replaced by nodes.
    """

    def decorate(fn: F) -> F:
        for name in names:
            if name in _TABLE:
                raise ValueError(f"two converters for {name}")
            _TABLE[name] = fn
        return fn

    return decorate


def lookup(op: torch._ops.OpOverload) -> Converter | None:
    """The converter of an op, or None."""
    space, _, name = op._schema.name.partition("::")
    if space != "aten":
        return None
    overload = op._schema.overload_name or "default"
    return _TABLE.get(f"{name}.{overload}") or _TABLE.get(name)


def converted_ops() -> tuple[str, ...]:
    """Names of all ops that have a converter, sorted."""
    return tuple(sorted(_TABLE))


__all__ = ["Context", "Converter", "converted_ops", "converts", "lookup"]
