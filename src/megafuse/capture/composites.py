"""Makes autograd see through composite ops on meta tensors while tracing.

PyTorch gives many composite ops (``relu6``, ``var``, ``where`` with a number, ...) a Python kernel for meta tensors.
Python dispatch then takes them for ops of their own that have no derivative: on meta tensors, and on them only, their
gradients are silently missing. Within ``composite_gradients()`` they decompose as they do on real devices;
The reverse holds for a few backwards (``KEPT``): one kernel on real devices, taken apart on meta; they stay whole here.
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
KEPT = (torch.ops.aten.silu_backward.default, torch.ops.aten.mish_backward.default)
_AUTOGRAD = DispatchKey.AutogradMeta
_REAL = (DispatchKey.CPU, DispatchKey.CUDA, DispatchKey.Autograd)  # a kernel here: not composite on real devices
_COMPOSITE = DispatchKey.CompositeImplicitAutograd


@functools.cache
def hidden_composites() -> tuple[torch._ops.OpOverload, ...]:
    """ATen ops that are composite on every device but have a Python kernel for meta."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        if space != "aten" or not has(name, _COMPOSITE) or any(has(name, key) for key in _REAL):
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


def _whole(op: torch._ops.OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return kernel


def _not_decomposed(*_: Any, **__: Any) -> Any:
    return NotImplemented


@contextmanager
def composite_gradients() -> Iterator[None]:
    """See the module's docstring. PyTorch's tables are as before afterwards."""
    kernels = [(op, _AUTOGRAD, _decomposing(op)) for op in hidden_composites()]
    for op in KEPT:
        kernels += [(op, _AUTOGRAD, _whole(op)), (op, _COMPOSITE, _not_decomposed)]
    added = [(op, key, kernel) for op, key, kernel in kernels if key not in op.py_kernels]
    mode = torch._C._get_autograd_fallback_mode()
    torch._C._set_autograd_fallback_mode("warn")
    for op, key, kernel in added:
        op.py_kernels[key] = kernel
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        torch._C._set_autograd_fallback_mode(mode)
        for op, key, _ in added:
            del op.py_kernels[key]
            op._dispatch_cache.clear()
