"""Autocast on stand-ins: the casts that PyTorch's autocast makes on a device, made while a function is traced.

Tensors on the meta device have no autocast of their own, so the ops that autocast knows get kernels at the dispatch key
of a back end that PyTorch reserves and nobody runs (``KEY``). It is active while the user's function is traced, above
autograd, as the real one is. Which ops those are is asked of PyTorch, for the device that is traced; what each does
with its arguments is in the tables below (ATen's ``autocast_mode.h``); the state and dtype are those in force at each
op, so regions that the function itself enters count.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

Op = torch._ops.OpOverload
KEY = "AutocastIPU"
_KEY = getattr(torch._C.DispatchKey, KEY)
_KEYS = torch._C.DispatchKeySet(_KEY)

LOWER = frozenset(
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution "
    "cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear "
    "addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell "
    "rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention _addmm_activation "
    "mkldnn_rnn_layer _native_multi_head_attention".split()
)
WIDEST = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add stack cat "
    "index_copy".split()
)
FP32_RESULT = frozenset("prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum".split())
CPU_FP32 = frozenset({"prod", "grid_sampler"})  # the CPU treats these unlike CUDA: all arguments to fp32
NORMS = frozenset({"norm"})
BANNED = frozenset({"binary_cross_entropy"})  # on CUDA


class _Casts(threading.local):
    """What is traced in this thread: for which device, and the casts of leaves made so far."""

    device: str = ""
    leaves: Collection[int] = ()

    def __init__(self) -> None:
        self.made: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}


_casts = _Casts()


@contextmanager
def autocast_on(device: str, leaves: Collection[int]) -> Iterator[None]:
    """Within the context ops on stand-ins are cast as autocast casts those on ``device`` ("cpu" or "cuda").

    ``leaves``: ids of the stand-ins of leaves that require gradients. Those are cast once in the context, so that
    gradients of several uses are added up in the narrow type, as with PyTorch's cache.
    """
    _register()
    _casts.device, _casts.leaves, _casts.made = device, leaves, {}
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, excluded)
        _casts.device, _casts.leaves, _casts.made = "", (), {}


def is_tracing() -> bool:
    """True while this thread traces a function on stand-ins."""
    return _casts.device != ""


@functools.cache
def _register() -> tuple[torch.library.Library, ...]:
    """Kernels at ``KEY`` for every op that has one for autocast on the CPU or on CUDA; all others fall through."""
    rest, ours = torch.library.Library("_", "IMPL", KEY), torch.library.Library("aten", "IMPL", KEY)
    rest.fallback(torch.library.fallthrough_kernel)
    for name in torch._C._dispatch_get_all_op_names():
        space, _, full = name.partition("::")
        on = [d for d, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"))
              if space == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]  # fmt: skip
        if on:
            base, _, overload = full.partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            ours.impl(full, functools.partial(_kernel, op, base, on))
    return rest, ours


def _kernel(op: Op, name: str, devices: list[str], *args: Any, **kwargs: Any) -> Any:
    """``op`` as autocast runs it now."""
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        device = _casts.device
        if device not in devices or not torch.is_autocast_enabled(device):
            return op(*args, **kwargs)
        if name in FP32_RESULT and not (device == "cpu" and name in CPU_FP32):
            return _with_fp32_result(op, args, kwargs)
        if name in NORMS:
            return _norm(op, *args)
        if name in BANNED and device == "cuda":
            raise RuntimeError(f"{name} is unsafe to autocast: use {name}_with_logits instead")
        args, kwargs = _cast_all((args, kwargs), _wanted(name, device, (args, kwargs)))
        return op(*args, **kwargs)


def _wanted(name: str, device: str, tree: Any) -> torch.dtype:
    """The type to which autocast brings the arguments of an op."""
    low = torch.get_autocast_dtype(device)
    if name in LOWER:
        return low
    if name in WIDEST and not (device == "cpu" and name in CPU_FP32):
        wide = any(t.dtype is torch.float32 for t in pytree.tree_leaves(tree) if _eligible(t))
        return torch.float32 if wide else low
    return torch.float32


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _cast_all(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda v: _cast(v, dtype) if _eligible(v) and v.dtype is not dtype else v, tree)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    narrows = tensor.dtype is torch.float32 and dtype is torch.get_autocast_dtype(_casts.device)
    if not narrows or id(tensor) not in _casts.leaves or not torch.is_autocast_cache_enabled():
        return tensor.to(dtype)
    key = (id(tensor), dtype)
    if key not in _casts.made:
        _casts.made[key] = (tensor, tensor.to(dtype))
    return _casts.made[key][1]


def _with_fp32_result(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``op`` computing in fp32 through its own optional dtype, unless the caller chose one."""
    if not _eligible(args[0]):
        return op(*args, **kwargs)
    place, argument = next((i, a) for i, a in enumerate(op._schema.arguments) if a.name == "dtype")
    given = kwargs.get("dtype") if argument.kwarg_only or place >= len(args) else args[place]
    if given is not None:
        return op(*args, **kwargs)
    args = args if argument.kwarg_only else args[:place]
    return op(*args, **{**kwargs, "dtype": torch.float32})


def _norm(op: Op, tensor: torch.Tensor, p: Any = 2, *rest: Any) -> torch.Tensor:
    """The overload of ``norm`` that takes a dtype: fp32."""
    dtype = torch.float32 if _eligible(tensor) else tensor.dtype
    if not rest:
        return torch.ops.aten.norm.ScalarOpt_dtype(tensor, p, dtype=dtype)
    dim, keepdim = rest[0], rest[1] if len(rest) > 1 else False
    return torch.ops.aten.norm.ScalarOpt_dim_dtype(tensor, p, dim, keepdim, dtype=dtype)
