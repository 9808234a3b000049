"""Matrix products with one weight matrix per token: the backends ``bmm`` and ``grouped``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def bmm_gemm(inputs: Tensor, weights: Tensor) -> Tensor:
    """``[T, B, K] @ [T, K, N] -> [T, B, N]`` by one ``torch.bmm`` over the token axis."""
    return torch.bmm(inputs, weights)


def grouped_gemm(inputs: Tensor, weights: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """Multiply consecutive groups of rows, each by its own matrix: ``[sum(group_sizes), K] -> [.., N]``.

    Args:
        inputs: ``[R, K]``; group ``g`` holds the next ``group_sizes[g]`` rows.
        weights: ``[G, K, N]``.
        group_sizes: ``G`` row counts, zero allowed, with sum ``R``.

    Groups of one size run as ``torch.bmm``; groups of different sizes run as one ``torch.matmul`` each, joined by
    ``torch.cat``. Both keep autograd support for ``inputs`` and ``weights``.

    Raises:
        ValueError: where the group sizes do not fit ``inputs`` or ``weights``.
    """
    sizes = [int(size) for size in group_sizes]
    _check_groups(inputs, weights, sizes)
    if len(set(sizes)) == 1:
        grouped = inputs.reshape(len(sizes), sizes[0], inputs.shape[1])  # [G, R/G, K]
        return torch.bmm(grouped, weights).reshape(inputs.shape[0], weights.shape[2])
    rows = torch.split(inputs, sizes, dim=0)
    products = [torch.matmul(group, weight) for group, weight in zip(rows, weights.unbind(0), strict=True)]
    return torch.cat(products, dim=0)  # [R, N]


def _check_groups(inputs: Tensor, weights: Tensor, sizes: list[int]) -> None:
    if len(sizes) == 0 or len(sizes) != weights.shape[0]:
        raise ValueError(f"group_sizes has {len(sizes)} entries, weights has {weights.shape[0]} matrices")
    if min(sizes) < 0 or sum(sizes) != inputs.shape[0]:
        raise ValueError(f"group_sizes must be >= 0 with sum {inputs.shape[0]} (rows of inputs), got {sizes}")


def equal_grouped_gemm(inputs: Tensor, weights: Tensor) -> Tensor:
    """``[T, B, K] @ [T, K, N] -> [T, B, N]`` as a grouped product of ``T`` groups with ``B`` rows each."""
    tokens, batch, features = inputs.shape
    rows = inputs.reshape(tokens * batch, features)  # packed rows, a copy where inputs is a transposed view
    return grouped_gemm(rows, weights, [batch] * tokens).reshape(tokens, batch, weights.shape[2])


GEMM_BACKENDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"bmm": bmm_gemm, "grouped": equal_grouped_gemm}
"""Per-token product ``[T, B, K], [T, K, N] -> [T, B, N]`` by backend name."""


def token_gemm(inputs: Tensor, weights: Tensor, backend: str = "bmm") -> Tensor:
    """``[T, B, K] @ [T, K, N] -> [T, B, N]`` with the named backend.

    Raises:
        ValueError: for an unknown backend name.
    """
    if backend not in GEMM_BACKENDS:
        raise ValueError(f"gemm_backend must be one of {sorted(GEMM_BACKENDS)}, got {backend!r}")
    return GEMM_BACKENDS[backend](inputs, weights)
