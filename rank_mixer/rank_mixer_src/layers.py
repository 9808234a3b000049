"""The parts of a RankMixer block: outer normalisation, token mixing and the dense per-token FFN."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from rank_mixer_src.gemm import token_gemm
from rank_mixer_src.initializers import he_uniform

INNER_NORM_EPS = 1e-5
OUTER_NORM_EPS = 1e-3


class NezhaLayerNorm(nn.Module):
    """LayerNorm over the last axis with ``gamma [D]`` (ones) and ``beta [D]`` (zeros).

    ``y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * gamma + beta``

    For 16-bit inputs the statistics and the affine map are computed in float32 and ``y`` is rounded once, to the
    dtype of ``x``: what ``torch.nn.functional.layer_norm`` does.
    """

    def __init__(
        self,
        dim: int,
        eps: float = OUTER_NORM_EPS,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.beta = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., D] -> [..., D]``, same dtype."""
        return layer_norm(inputs, (self.dim,), self.gamma, self.beta, self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class TokenMixer(nn.Module):
    """Token mixing without parameters: cut each token into ``T`` pieces and swap piece index and token index.

    ``[[0, 1, 2, 3], [4, 5, 6, 7]]`` (two tokens of four features) becomes ``[[0, 1, 4, 5], [2, 3, 6, 7]]``.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, inputs: Tensor) -> Tensor:
        """``[B, T, D] -> [B, T, D]``."""
        batch, tokens, dim = inputs.shape
        pieces = inputs.reshape(batch, tokens, tokens, dim // tokens)  # [B, T, T, D/T]
        return pieces.transpose(1, 2).reshape(batch, tokens, dim)

    def extra_repr(self) -> str:
        return f"tokens={self.tokens}"


def dense_ffn_v2_compute(
    inputs: Tensor,
    w1: Tensor,
    b1: Tensor,
    wout: Tensor,
    bout: Tensor,
    norm_x: nn.Module,
    norm_gate: nn.Module,
    *,
    gemm_backend: str = "bmm",
) -> Tensor:
    """The gated dense FFN with weights of its own for every token.

    ::

        Z[b,t,:]      = inputs[b,t,:] @ w1[t,:,:] + b1[t,:]
        (U, G)        = Z split into two halves
        hidden        = norm_x(U) * silu(norm_gate(G))
        output[b,t,:] = hidden[b,t,:] @ wout[t,:,:] + bout[t,:]

    Args:
        inputs: ``[B, T, D]``.
        w1: ``[T, D, 2H]``.
        b1: ``[T, 2H]``.
        wout: ``[T, H, D]``.
        bout: ``[T, D]``.
        norm_x: normalisation of the value half, over ``H``.
        norm_gate: normalisation of the gate half, over ``H``.
        gemm_backend: ``"bmm"`` or ``"grouped"``.

    Returns:
        ``[B, T, D]`` in the dtype of ``inputs``, a transposed view of a ``[T, B, D]`` tensor. Every operation runs
        in the working dtype: each product is rounded before its bias is added.
    """
    tokens_first = inputs.transpose(0, 1)  # [T, B, D]
    z = token_gemm(tokens_first, w1, gemm_backend) + b1.unsqueeze(1)  # [T, B, 2H]
    u, gate = z.chunk(2, dim=-1)  # [T, B, H] each
    hidden = norm_x(u) * silu(norm_gate(gate))  # [T, B, H]
    outputs = token_gemm(hidden, wout, gemm_backend) + bout.unsqueeze(1)  # [T, B, D]
    return outputs.transpose(0, 1)


class DensePFFNv2(nn.Module):
    """The parameters of :func:`dense_ffn_v2_compute` for ``T`` tokens: ``w1``, ``b1``, ``wout``, ``bout`` and norms."""

    def __init__(
        self,
        tokens: int,
        dim: int,
        hidden: int,
        *,
        gemm_backend: str = "bmm",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gemm_backend = gemm_backend
        self.w1 = he_uniform((tokens, dim, 2 * hidden), device=device, dtype=dtype)
        self.b1 = he_uniform((tokens, 2 * hidden), device=device, dtype=dtype)
        self.wout = he_uniform((tokens, hidden, dim), device=device, dtype=dtype)
        self.bout = he_uniform((tokens, dim), device=device, dtype=dtype)
        self.norm_x = nn.LayerNorm(hidden, eps=INNER_NORM_EPS, device=device, dtype=dtype)
        self.norm_gate = nn.LayerNorm(hidden, eps=INNER_NORM_EPS, device=device, dtype=dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[B, T, D] -> [B, T, D]``."""
        return dense_ffn_v2_compute(
            inputs,
            self.w1,
            self.b1,
            self.wout,
            self.bout,
            self.norm_x,
            self.norm_gate,
            gemm_backend=self.gemm_backend,
        )

    def extra_repr(self) -> str:
        tokens, dim, hidden_twice = self.w1.shape
        return f"tokens={tokens}, dim={dim}, hidden={hidden_twice // 2}, gemm_backend={self.gemm_backend!r}"
