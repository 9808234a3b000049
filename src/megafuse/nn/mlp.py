"""Multilayer perceptrons, with the parameters of the ``nn.Sequential`` that they stand for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from megafuse.compiler import Options
from megafuse.core.errors import InputError
from megafuse.nn.layers import Activation, mlp_layers
from megafuse.nn.lazy import LazilyFused


class MLP(LazilyFused, nn.Sequential):
    """Linear layers with an activation between each two: ``y = W_n(... act(W_2 act(W_1 x + b_1) + b_2) ...) + b_n``.

    An ``nn.Sequential`` in all but its calls: layers, parameter names and ``state_dict`` are those of
    ``nn.Sequential(nn.Linear(...), nn.Softplus(), nn.Linear(...), ...)``, with weight norm those of the one whose
    linear layers went through ``torch.nn.utils.parametrizations.weight_norm``. Calls run in generated kernels, which
    are made at the first call of each situation (dtype, device, training or inference, sizes), as by
    :func:`megafuse.fuse`. CPU tensors run the original ops, with a warning, unless ``target="interpret"``.

    Args:
        widths: widths of input, hidden layers and output, such as ``[37, 100, 60, 3]``; any from 1 on.
        activation: a name of ``megafuse.nn.ACTIVATIONS``, a module (each layer gets a copy) or a function that makes
            one.
        bias: whether the linear layers have biases.
        weight_norm: whether each weight is ``g * v / ||v||``, with a norm for each output feature.
        last_activation: the same after the last layer; None: no activation there.
        device: of the parameters.
        dtype: of the parameters.
        **options: of :func:`megafuse.fuse`: ``target``, ``strict``, ``dots``, ``tune``, ``plan``, ...

    Raises:
        InputError: unusable widths, activation or options; at a call, an input of another width.
    """

    __plain__ = nn.Sequential

    def __init__(
        self,
        widths: Sequence[int],
        activation: Activation = "softplus",
        *,
        bias: bool = True,
        weight_norm: bool = False,
        last_activation: Activation | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        layers = mlp_layers(
            widths,
            activation,
            bias=bias,
            weight_norm=weight_norm,
            last_activation=last_activation,
            device=device,
            dtype=dtype,
        )
        super().__init__(*layers)
        self.fuse_options = _options(options)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., widths[0]] -> [..., widths[-1]]``, in the dtype of the parameters.

        Raises:
            InputError: ``x`` is no tensor, or its last axis has another width.
        """
        try:
            result: Tensor = super().forward(x)
        except Exception:
            self._check_width(x)  # looked at afterwards: beforehand it would cost every call
            raise
        return result

    def _check_width(self, x: Any) -> None:
        wanted = getattr(self._modules.get("0"), "in_features", None)
        if not isinstance(x, Tensor):
            raise InputError(f"argument x: expected a tensor, got {type(x).__name__}")
        if wanted is not None and (x.dim() == 0 or x.shape[-1] != wanted):
            hint = f"give a tensor of shape [..., {wanted}]"
            raise InputError(f"argument x: its shape is {list(x.shape)}, the MLP takes {wanted} features", hint=hint)

    def __getitem__(self, index: int | slice) -> Any:
        """A layer; a slice is a plain ``nn.Sequential`` of the layers themselves."""
        if isinstance(index, slice):
            return nn.Sequential(*list(self)[index])
        return super().__getitem__(index)


def _options(given: dict[str, Any]) -> Options:
    if given.get("plan") is not None:
        given = {**given, "plan": os.fspath(given["plan"])}
    known = [field.name for field in fields(Options)]
    if unknown := [name for name in given if name not in known]:
        layers = "activation, bias, weight_norm, last_activation, device, dtype"
        raise InputError(f"unknown option {unknown[0]}", hint=f"of the layers: {layers}; of fuse: {', '.join(known)}")
    return Options(**given)


class FusedMLPSoftplus(MLP):
    """``layers`` linear layers with softplus between them, without biases: widths D, H, ..., H, ``out_features``.

    Args:
        D: width of the input.
        H: width of the hidden layers.
        out_features: width of the output.
        layers: number of linear layers.
        beta: of the softplus, ``log(1 + exp(beta x)) / beta``.
        threshold: of the softplus; where ``beta x`` is above it, the result is ``x``.
        bias: whether the linear layers have biases.
        **keywords: further ones of :class:`MLP`.

    Raises:
        InputError: fewer than one layer, or unusable widths.
    """

    def __init__(
        self,
        D: int,  # noqa: N803 (the names that callers of such modules use)
        H: int,  # noqa: N803
        out_features: int,
        layers: int = 3,
        *,
        beta: float = 1.0,
        threshold: float = 20.0,
        bias: bool = False,
        **keywords: Any,
    ) -> None:
        if layers < 1:
            raise InputError(f"argument layers: {layers}", hint="give at least 1")
        widths = [D, *[H] * (layers - 1), out_features]
        super().__init__(widths, nn.Softplus(beta, threshold), bias=bias, **keywords)


class FusedMLPSoftplusWN(FusedMLPSoftplus):
    """:class:`FusedMLPSoftplus` with weight norm: each weight is ``g * v / ||v||``, with a norm for each output."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"weight_norm": True, **keywords})
