"""The plain layers of an MLP: activations by name, and the list of modules that an ``nn.Sequential`` would hold."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm as with_weight_norm

from megafuse.core.errors import InputError

Activation = str | nn.Module | Callable[[], nn.Module]


class Sin(nn.Module):
    """sin(x), as sinusoidal networks use it."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise; any shape."""
        return torch.sin(x)


class SquaredReLU(nn.Module):
    """max(x, 0)^2."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise; any shape."""
        return torch.square(torch.relu(x))


#: Activations by name. For other settings give a module: ``nn.Softplus(beta=10.0)``, ``nn.LeakyReLU(0.2)``.
ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "softplus": nn.Softplus,
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "sin": Sin,
    "squared_relu": SquaredReLU,
    "identity": nn.Identity,
}


def make_activation(activation: Activation) -> nn.Module:
    """A new activation module: by name, a copy of a module, or what a function without arguments makes.

    Raises:
        InputError: an unknown name, or something that is or makes no module.
    """
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            hint = f"use one of {', '.join(ACTIVATIONS)}, or give a module"
            raise InputError(f"argument activation: unknown name {activation!r}", hint=hint)
        return ACTIVATIONS[activation]()
    if isinstance(activation, nn.Module):
        return copy.deepcopy(activation)
    hint = "give a name, a module, or a function without arguments that makes one"
    try:
        made = activation() if callable(activation) else activation
    except TypeError as error:
        raise InputError(f"argument activation: {activation!r} makes no module: {error}", hint=hint) from error
    if not isinstance(made, nn.Module):
        raise InputError(f"argument activation: got {activation!r}, which is no module", hint=hint)
    return made


def check_widths(widths: Sequence[int]) -> tuple[int, ...]:
    """The widths, all of them whole numbers from 1 on, at least two.

    Raises:
        InputError: they are not.
    """
    found = tuple(widths)
    if len(found) < 2 or not all(isinstance(w, int) and w >= 1 for w in found):
        hint = "give the widths of input, hidden layers and output: whole numbers from 1 on, such as [128, 64, 10]"
        raise InputError(f"argument widths: {list(found)}", hint=hint)
    return found


def mlp_layers(
    widths: Sequence[int],
    activation: Activation = "softplus",
    *,
    bias: bool = True,
    weight_norm: bool = False,
    last_activation: Activation | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> list[nn.Module]:
    """Linear, activation, linear, ..., linear (and the last activation, if any), for ``nn.Sequential(*layers)``.

    ``weight_norm``: each linear layer's weight is ``g * v / ||v||``, a norm for each output feature, by
    ``torch.nn.utils.parametrizations.weight_norm``.
    """
    sizes = check_widths(widths)
    make_activation(activation)  # refuses what makes none, in networks of one layer too
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise(sizes)):
        if number:
            layers.append(make_activation(activation))
        linear = nn.Linear(before, after, bias=bias, device=device, dtype=dtype)
        layers.append(with_weight_norm(linear) if weight_norm else linear)
    return layers if last_activation is None else [*layers, make_activation(last_activation)]
