"""Makes autograd see through composite ops on meta tensors while tracing.

PyTorch gives many composite ops (``relu6``, ``var``, ``where`` with a number, ...) a Python kernel for meta tensors.
Python dispatch then takes them for ops of their own that have no derivative: on meta tensors, and on them only, their
gradients are silently missing. Within ``composite_gradients()`` they decompose as they do on real devices;
``op_without_gradient`` tells from PyTorch's warnings whether an op without a derivative was met all the same.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._meta_registrations
from torch._C import DispatchKey

_WARNING = "an autograd kernel was not registered"
_AUTOGRAD = DispatchKey.AutogradMeta
_COMPOSITE = DispatchKey.CompositeImplicitAutograd


@functools.cache
def hidden_composites() -> tuple[torch._ops.OpOverload, ...]:
    """ATen ops that are composite on every device but have a Python kernel for meta."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        if space != "aten" or not torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE):
            continue
        base, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is not None and DispatchKey.Meta in op.py_kernels and DispatchKey.Autograd not in op.py_kernels:
            found.append(op)
    return tuple(found)


def op_without_gradient(messages: Sequence[warnings.WarningMessage]) -> str | None:
    """Name of the op through which PyTorch could not differentiate."""
    texts = (str(m.message) for m in messages)
    return next((t.partition(": ")[0] for t in texts if _WARNING in t), None)


def _decomposing(op: torch._ops.OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(_COMPOSITE, *args, **kwargs)

    return kernel


@contextmanager
def composite_gradients() -> Iterator[None]:
    """See the module's docstring. PyTorch's tables are as before afterwards."""
    ops = [op for op in hidden_composites() if _AUTOGRAD not in op.py_kernels]
    mode = torch._C._get_autograd_fallback_mode()
    torch._C._set_autograd_fallback_mode("warn")
    for op in ops:
        op.py_kernels[_AUTOGRAD] = _decomposing(op)
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        torch._C._set_autograd_fallback_mode(mode)
        for op in ops:
            del op.py_kernels[_AUTOGRAD]
            op._dispatch_cache.clear()
