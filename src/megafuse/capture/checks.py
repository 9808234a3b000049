"""Checks of the user's arguments before anything is traced; every message names the argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from megafuse.capture.dtypes import FROM_TORCH
from megafuse.core.errors import InputError, NotFusableError

REGISTER = "torch.export.register_dataclass"
Named = tuple[str, torch.Tensor]
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def check_callable(fn: Any) -> None:
    """``fn`` can be called.

    Raises:
        InputError: it cannot.
    """
    if not callable(fn):
        raise InputError(f"the first argument must be a module or function, got {type(fn).__name__}")


def check_values(values: Sequence[tuple[str, Any]]) -> None:
    """No argument that is neither tensor nor module holds tensors inside: they would be taken for constants.

    Raises:
        InputError: one does; the message names it.
    """
    for name, value in values:
        held = {} if isinstance(value, torch.Tensor | nn.Module | type) else getattr(value, "__dict__", {})
        if any(isinstance(v, torch.Tensor) for v in held.values()):
            raise InputError(
                f"{name} is a {type(value).__name__} that holds tensors inside",
                hint=f"pass the tensors themselves, or call {REGISTER} for the class",
            )


def check_tensors(tensors: Sequence[Named]) -> None:
    """All tensors are plain, dense, of a supported type and on one device.

    Raises:
        InputError: one is not; the message names it.
        NotFusableError: one is a single number on the CPU beside tensors of a GPU, where kernels cannot read it.
    """
    for name, tensor in tensors:
        _check_tensor(name, tensor)
    _check_devices(tensors)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
        raise InputError(f"{name} is not initialised", hint="run the module once before fusing it")
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer if hasattr(nn, "Buffer") else nn.Parameter):
        raise InputError(
            f"{name} is a {type(tensor).__name__}: tensor subclasses are not supported",
            hint="pass a plain torch.Tensor (for a distributed tensor, its local part)",
        )
    if tensor.layout is not torch.strided:
        raise InputError(f"{name} has layout {tensor.layout}", hint="call .to_dense() on it")
    if tensor.dtype not in FROM_TORCH:
        raise InputError(
            f"{name} has element type {tensor.dtype}, which is not supported",
            hint=f"convert it to one of {', '.join(str(d).removeprefix('torch.') for d in FROM_TORCH)}",
        )


def _check_devices(tensors: Sequence[Named]) -> None:
    first, number = None, None
    for name, tensor in tensors:
        if tensor.dim() == 0 and tensor.device.type == "cpu" and not tensor.requires_grad:
            number = name  # PyTorch takes it beside tensors of any device
            continue
        if first is None:
            first = (name, tensor)
        elif tensor.device != first[1].device:
            raise InputError(
                f"{first[0]} is on {first[1].device}, but {name} is on {tensor.device}",
                hint="move all tensors and the module to one device",
            )
    if first is not None and number is not None and first[1].device.type != "cpu":
        raise NotFusableError(
            f"{number} is a number on the CPU, while {first[0]} is on {first[1].device}",
            hint="give a Python number, or move it to the device of the others",
        )


def check_float_inputs(arguments: Sequence[Named], floats_elsewhere: bool) -> None:
    """There is something to differentiate or compute in floating point.

    Raises:
        InputError: every tensor is an integer.
    """
    if arguments and not floats_elsewhere and not any(t.dtype.is_floating_point for _, t in arguments):
        name, tensor = arguments[0]
        raise InputError(
            f"{name} has the integer type {tensor.dtype}; a floating-point input is needed",
            hint=f"convert it, for instance {name.removeprefix('argument ')}.float()",
        )


def check_hooks(modules: Sequence[nn.Module], around: nn.Module | None) -> None:
    """No module has a hook that would run at capture alone.

    Those of ``around``, the module whose ``forward`` is captured, run around the step at every call. PyTorch's own
    weight norm and pruning only compute a weight from parameters: they are traced.

    Raises:
        NotFusableError: one has; the message names hook and module.
    """
    for top in modules:
        for name, module in top.named_modules():
            hook = None if module is around else next(_untraced_hooks(module), None)
            if hook is not None:
                kind, value = hook
                raise NotFusableError(
                    f"{name or 'the module'} ({type(module).__name__}) has a {kind}, {_name_of(value)}, which a "
                    "captured step would not call",
                    hint="remove the hook, or put it on the module that is fused: hooks of that one run at every call",
                )


def _untraced_hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for table in _HOOKS:
        for hook in getattr(module, table).values():
            if not isinstance(hook, WeightNorm | BasePruningMethod):
                yield table.strip("_")[:-1].replace("_", " "), hook


def _name_of(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def check_side_effects(changed: Sequence[str], modules: Sequence[nn.Module]) -> None:
    """The function changed no attribute of a module (but buffers) on its stand-ins.

    Raises:
        NotFusableError: it did; the message names the attribute.
    """
    computed = {
        f"{type(m).__name__}.{getattr(h, 'name', None) or getattr(h, '_tensor_name', None)}"
        for top in modules for m in top.modules() for h in m._forward_pre_hooks.values()
    }  # fmt: skip
    lost = [name for name in changed if name not in computed]
    if lost:
        raise NotFusableError(
            f"the call changes {lost[0]}, which a captured step would not do",
            hint="return the value instead, or register it as a buffer",
        )
