"""The he-uniform initialiser of every FFN weight and bias."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def he_uniform_bound(shape: Sequence[int]) -> float:
    """Return ``sqrt(6 / fan_in)`` with ``fan_in = product(shape[:-1])``.

    The same rule serves weights and biases: ``w1 [T, D, 2H]`` has ``fan_in = T * D`` and ``b1 [T, 2H]`` has
    ``fan_in = T``.
    """
    fan_in = math.prod(shape[:-1])
    if len(shape) == 0 or fan_in < 1:
        raise ValueError(f"he_uniform needs a non-empty shape with positive sizes, got {tuple(shape)}")
    return math.sqrt(6.0 / fan_in)


def he_uniform(
    shape: Sequence[int],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """Return a parameter of ``shape``, uniform in ``[-bound, bound]`` (see :func:`he_uniform_bound`).

    Values are drawn in float32 from the device's global generator and rounded once to ``dtype``. So one seed gives
    the same weights in every dtype up to that rounding, which may carry a value past ``bound`` by half an ulp.
    """
    bound = he_uniform_bound(shape)
    values: Tensor = torch.empty(tuple(shape), device=device, dtype=torch.float32).uniform_(-bound, bound)
    return nn.Parameter(values.to(dtype or torch.get_default_dtype()))
