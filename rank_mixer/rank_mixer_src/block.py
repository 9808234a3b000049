"""The full RankMixer block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rank_mixer_src.config import check_backend, check_ffn_type, check_shape
from rank_mixer_src.layers import DensePFFNv2, NezhaLayerNorm, TokenMixer


class RankMixerBlock(nn.Module):
    """One RankMixer block without expert parallelism (EP=1); its computation is also called RankMixerBlockFwd.

    ::

        out1   = token_mixer(norm0(inputs))
        out1   = norm1(out1 + inputs)
        out2   = ffn(out1)
        output = norm2(out1 + out2)

    Args:
        tokens: ``T``.
        dim: ``D``, a multiple of ``T``.
        k: hidden factor, ``H = k * D``.
        ffn_type: ``"dense_v2"``.
        gemm_backend: ``"bmm"`` or ``"grouped"``.
        device: where the parameters live.
        dtype: working dtype of parameters and computation.

    Raises:
        ConfigError: for an argument that does not fit; it names the argument.
    """

    def __init__(
        self,
        tokens: int,
        dim: int,
        k: int = 2,
        *,
        ffn_type: str = "dense_v2",
        gemm_backend: str = "bmm",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_shape(tokens, dim, k)
        check_ffn_type(ffn_type)
        check_backend(gemm_backend)
        self.tokens = tokens
        self.dim = dim
        self.norm0 = NezhaLayerNorm(dim, device=device, dtype=dtype)
        self.token_mixer = TokenMixer(tokens)
        self.norm1 = NezhaLayerNorm(dim, device=device, dtype=dtype)
        self.ffn = DensePFFNv2(tokens, dim, k * dim, gemm_backend=gemm_backend, device=device, dtype=dtype)
        self.norm2 = NezhaLayerNorm(dim, device=device, dtype=dtype)

    def forward(self, inputs: Tensor, overlap: str = "none", comp_only: bool = False) -> Tensor:
        """``[B, T, D] -> [B, T, D]``.

        Args:
            inputs: ``[B, T, D]`` in the dtype of the parameters.
            overlap: ``"none"``, the only mode with EP=1.
            comp_only: leave the expert exchanges out. With EP=1 both are the identity, so it changes nothing.

        Raises:
            ValueError: for another ``overlap`` or another input shape.
        """
        if overlap != "none":
            raise ValueError(f"overlap must be 'none' (EP=1 has no exchange to overlap), got {overlap!r}")
        if inputs.dim() != 3 or tuple(inputs.shape[1:]) != (self.tokens, self.dim):
            raise ValueError(f"inputs must be [B, {self.tokens}, {self.dim}], got {list(inputs.shape)}")
        out1 = self.token_mixer(self.norm0(inputs))
        out1 = self.norm1(out1 + inputs)
        out2 = self.ffn(out1)
        output: Tensor = self.norm2(out1 + out2)
        return output
