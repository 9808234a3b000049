"""Checks of the user's arguments before anything is traced; every message names the argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megafuse.capture.dtypes import FROM_TORCH
from megafuse.core.errors import CaptureError, InputError

Named = tuple[str, torch.Tensor]


def check_callable(fn: Any) -> None:
    """``fn`` can be called.

    Raises:
        InputError: it cannot.
    """
    if not callable(fn):
        raise InputError(f"the first argument must be a module or function, got {type(fn).__name__}")


def check_tensors(tensors: Sequence[Named]) -> None:
    """All tensors are plain, dense, of a supported type and on one device.

    Raises:
        InputError: one is not; the message names it.
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
        raise InputError(f"{name} has element type {tensor.dtype}, which is not supported")


def _check_devices(tensors: Sequence[Named]) -> None:
    first: Named | None = None
    for name, tensor in tensors:
        if tensor.dim() == 0 and tensor.device.type == "cpu" and not tensor.requires_grad:
            continue  # PyTorch takes a CPU scalar beside tensors of any device
        if first is None:
            first = (name, tensor)
        elif tensor.device != first[1].device:
            raise InputError(
                f"{first[0]} is on {first[1].device}, but {name} is on {tensor.device}",
                hint="move all tensors and the module to one device",
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
            hint=f"convert it, for instance {name}.float()",
        )


def check_autocast(device: torch.device) -> None:
    """Autocast is off: its casts are not seen on stand-ins.

    Raises:
        CaptureError: it is on.
    """
    kinds = {device.type, "cuda"} - {"meta"}
    if any(torch.is_autocast_enabled(kind) for kind in kinds):
        raise CaptureError("capture under torch.autocast is not supported",
                           hint="convert the module to the narrow type, or fuse outside of autocast")  # fmt: skip
