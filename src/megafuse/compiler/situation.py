"""Surroundings of a call in which generated kernels would be wrong: the original ops run there instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module

from megafuse.capture.autocast import is_tracing

TRANSFORMED = "under torch.func transforms (grad, vmap, jvp, ...) the original ops run"
FORWARD_MODE = "under forward-mode differentiation the original ops run"
GLOBAL_HOOKS = "global module hooks are registered, which a captured step would not call; the original ops run"
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_hooks: tuple[Any, ...] = (
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
    nn_module._global_backward_pre_hooks,
    nn_module._global_backward_hooks,
)
_TRACERS = tuple(
    getattr(torch._C._TorchDispatchModeKey, name)
    for name in ("FAKE", "PROXY", "FUNCTIONAL")
    if hasattr(torch._C._TorchDispatchModeKey, name)
)


def reason_for_original() -> str | None:
    """Why the original has to serve a call now; the empty string where that needs no word; None: it need not."""
    if _transform() is not None:
        return TRANSFORMED
    if forward_ad._current_level >= 0:
        return FORWARD_MODE
    if any(_hooks):
        return GLOBAL_HOOKS
    if is_tracing() or (_modes() and any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)):
        return ""  # a compiler, ours or another, traces through the call
    return None
