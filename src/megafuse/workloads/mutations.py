"""The RankMixer block with one thing changed: what a fuser that only knows the block would get wrong."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafuse.workloads.rank_mixer_block import BLOCK_SIZES, RankMixerBlock, he_uniform
from megafuse.workloads.types import Workload, normal, register

INV_SQRT2 = 1.0 / math.sqrt(2.0)


class RMSNormBlock(RankMixerBlock):
    """[B,T,D] -> [B,T,D]. Every norm is x * rsqrt(mean(x^2) + eps) * weight: no mean, no beta."""

    def outer_norm(self) -> nn.Module:
        return nn.RMSNorm(self.dim, eps=1e-3)

    def inner_norm(self) -> nn.Module:
        return nn.RMSNorm(self.hidden, eps=1e-5)


class NoResidualBlock(RankMixerBlock):
    """[B,T,D] -> [B,T,D]. norm2(ffn(norm1(mix(norm0(x))))): neither sum is there."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.token_mixer(self.norm0(x)))
        return self.norm2(self.dense_ffn_v2(x))


class ThreeGatesBlock(RankMixerBlock):
    """[B,T,D] -> [B,T,D]. w1 is [T,D,3H]; hidden = LN(U) * silu(LN(G)) * sigmoid(LN(V))."""

    def __init__(self, tokens: int, dim: int, k: int) -> None:
        super().__init__(tokens, dim, k)
        self.w1 = he_uniform(tokens, dim, 3 * self.hidden)
        self.b1 = he_uniform(tokens, 3 * self.hidden)
        self.norm_v = self.inner_norm()

    def gate(self, z: Tensor) -> Tensor:
        u, g, v = torch.chunk(z, 3, dim=-1)
        return self.norm_x(u) * F.silu(self.norm_gate(g)) * torch.sigmoid(self.norm_v(v))


class ShuffleMixBlock(RankMixerBlock):
    """[B,T,D] -> [B,T,D]. Mixing is a channel shuffle: [B,t,e,s] -> [B,s,t,e], so features are gathered by stride T."""

    def token_mixer(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        return x.view(b, t, d // t, t).permute(0, 3, 1, 2).contiguous().view(b, t, d)


class RollFlipMixBlock(RankMixerBlock):
    """[B,T,D] -> [B,T,D]. Mixing reverses the tokens and rolls the features of all of them by D/T + 1."""

    def token_mixer(self, x: Tensor) -> Tensor:
        return x.flip(1).roll(self.dim // self.tokens + 1, dims=-1)


class NormAfterGateBlock(RankMixerBlock):
    """[B,T,D] -> [B,T,D]. hidden = LN(U * silu(G)): one inner norm, after the product."""

    def __init__(self, tokens: int, dim: int, k: int) -> None:
        super().__init__(tokens, dim, k)
        del self.norm_gate

    def gate(self, z: Tensor) -> Tensor:
        u, g = z[..., : self.hidden], z[..., self.hidden :]
        return self.norm_x(u * F.silu(g))


class TanhGateBlock(RankMixerBlock):
    """[B,T,D] -> [B,T,D]. hidden = LN_x(U) * tanh(LN_gate(G))."""

    def gate(self, z: Tensor) -> Tensor:
        u, g = z.tensor_split(2, dim=-1)
        return self.norm_x(u) * self.norm_gate(g).tanh()


class InterleavedGateBlock(RankMixerBlock):
    """[B,T,D] -> [B,T,D]. U and G are the even and odd features of Z instead of its halves."""

    def gate(self, z: Tensor) -> Tensor:
        u, g = z.view(*z.shape[:-1], self.hidden, 2).unbind(-1)
        return self.norm_x(u) * F.silu(self.norm_gate(g))


class ExtraScaleBlock(RankMixerBlock):
    """[B,T,D] -> [B,T,D]. hidden * hidden_scale [H]; y = norm2((out1 + layer_scale [D] * ffn(out1)) / sqrt(2))."""

    def __init__(self, tokens: int, dim: int, k: int) -> None:
        super().__init__(tokens, dim, k)
        self.hidden_scale = nn.Parameter(torch.ones(self.hidden))
        self.layer_scale = nn.Parameter(torch.full((dim,), 0.5))

    def gate(self, z: Tensor) -> Tensor:
        return super().gate(z) * self.hidden_scale

    def forward(self, x: Tensor) -> Tensor:
        out1 = self.norm1((self.token_mixer(self.norm0(x)) + x) * INV_SQRT2)
        out2 = self.layer_scale * self.dense_ffn_v2(out1)
        return self.norm2((out1 + out2) / 2**0.5)


class MixBiasBlock(RankMixerBlock):
    """[B,T,D] -> [B,T,D]. mix(norm0(x)) + mix_bias [T,D] before the residual."""

    def __init__(self, tokens: int, dim: int, k: int) -> None:
        super().__init__(tokens, dim, k)
        self.mix_bias = nn.Parameter(torch.zeros(tokens, dim))

    def token_mixer(self, x: Tensor) -> Tensor:
        return super().token_mixer(x) + self.mix_bias


class HandNorm(nn.Module):
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * gamma + beta, every step rounded to the input's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(dim=-1, keepdim=True)
        variance = (centered * centered).mean(dim=-1, keepdim=True)
        return centered / torch.sqrt(variance + self.eps) * self.gamma + self.beta


class HandNormCastBeforeAffine(HandNorm):
    """The same with float32 statistics; back to the input's dtype before gamma and beta."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        mean = x.mean(-1, keepdim=True)
        variance = x.pow(2).mean(-1, keepdim=True) - mean.pow(2)
        x = (x - mean) * torch.rsqrt(variance.clamp(min=0.0) + self.eps)
        return self.gamma * x.to(dtype) + self.beta


class HandNormCastAfterAffine(HandNorm):
    """The same with float32 statistics and a float32 affine part; one rounding, at the end."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x.float(), dim=-1, correction=0, keepdim=True)
        normed = (x.float() - mean) * (variance + self.eps).rsqrt()
        return (normed * self.gamma.float() + self.beta.float()).type_as(x)


class HandNormBlock(RankMixerBlock):
    """[B,T,D] -> [B,T,D]. All five norms written out in the input's dtype."""

    norm_class: type[HandNorm] = HandNorm

    def outer_norm(self) -> nn.Module:
        return self.norm_class(self.dim, eps=1e-3)

    def inner_norm(self) -> nn.Module:
        return self.norm_class(self.hidden, eps=1e-5)


class CastBeforeAffineBlock(HandNormBlock):
    """[B,T,D] -> [B,T,D]. Norms by hand in float32 from mean(x^2) - mean^2, cast back before the affine part."""

    norm_class = HandNormCastBeforeAffine


class CastAfterAffineBlock(HandNormBlock):
    """[B,T,D] -> [B,T,D]. Norms by hand in float32 from var_mean, cast back after the affine part."""

    norm_class = HandNormCastAfterAffine


class ChannelsFirstNorm(nn.Module):
    """LayerNorm over axis 1 of [B,C,N] with weight and bias [C], as in ConvNeXt."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None] * x + self.bias[:, None]


class ChannelsFirstBlock(nn.Module):
    """[B,D,T] -> [B,D,T]: the block on transposed storage. Norms reduce axis 1, weights stay per token (last axis).

    Z[b,h,t] = sum_d x[b,d,t] w1[t,d,h] + b1[h,t]; the gate halves are split along axis 1.
    """

    def __init__(self, tokens: int, dim: int, k: int) -> None:
        super().__init__()
        hidden = k * dim
        self.w1 = he_uniform(tokens, dim, 2 * hidden)
        self.b1 = nn.Parameter(torch.zeros(2 * hidden, tokens))
        self.wout = he_uniform(tokens, hidden, dim)
        self.bout = nn.Parameter(torch.zeros(dim, tokens))
        self.outer = nn.ModuleList(ChannelsFirstNorm(dim, 1e-3) for _ in range(3))
        self.inner = nn.ModuleList(ChannelsFirstNorm(hidden, 1e-5) for _ in range(2))

    def mix(self, x: Tensor) -> Tensor:
        b, d, t = x.shape
        return x.reshape(b, t, d // t, t).transpose(1, 3).flatten(1, 2)

    def ffn(self, x: Tensor) -> Tensor:
        u, g = (torch.einsum("bdt,tdh->bht", x, self.w1) + self.b1).chunk(2, dim=1)
        hidden = self.inner[0](u) * F.silu(self.inner[1](g))
        return torch.einsum("bht,thd->bdt", hidden, self.wout) + self.bout

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer[1](self.mix(self.outer[0](x)) + x)
        return self.outer[2](x + self.ffn(x))


class PerChannelBlock(nn.Module):
    """[B,T,D] -> [B,T,D] with T and D swapped: every channel has its own FFN over the T tokens, H = k*T.

    Norms reduce the token axis (gamma [T]); Z[b,d,:] = x[b,:,d] @ w1[d] + b1[d]; mixing as in the block.
    """

    def __init__(self, tokens: int, dim: int, k: int) -> None:
        super().__init__()
        hidden = k * tokens
        self.w1 = he_uniform(dim, tokens, 2 * hidden)
        self.b1 = he_uniform(dim, 2 * hidden)
        self.wout = he_uniform(dim, hidden, tokens)
        self.bout = he_uniform(dim, tokens)
        self.norm0, self.norm1, self.norm2 = (nn.LayerNorm(tokens, eps=1e-3) for _ in range(3))
        self.norm_x, self.norm_gate = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def mix(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        return x.view(b, t, t, d // t).transpose(1, 2).reshape(b, t, d)

    def ffn(self, x: Tensor) -> Tensor:
        z = (x.permute(2, 0, 1) @ self.w1).transpose(0, 1) + self.b1
        u, g = z.chunk(2, -1)
        hidden = self.norm_x(u) * F.silu(self.norm_gate(g))
        return (hidden.transpose(0, 1) @ self.wout + self.bout[:, None]).permute(1, 2, 0)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.norm0(x.mT).mT.contiguous())
        out1 = self.norm1((mixed + x).mT).mT
        return self.norm2((out1 + self.ffn(out1)).mT).mT


_TOKEN_MAJOR: dict[str, type[nn.Module]] = {
    "rms_norm": RMSNormBlock,
    "no_residual": NoResidualBlock,
    "three_gates": ThreeGatesBlock,
    "shuffle_mix": ShuffleMixBlock,
    "roll_flip_mix": RollFlipMixBlock,
    "norm_after_gate": NormAfterGateBlock,
    "tanh_gate": TanhGateBlock,
    "interleaved_gate": InterleavedGateBlock,
    "extra_scale": ExtraScaleBlock,
    "mix_bias": MixBiasBlock,
    "hand_norm": HandNormBlock,
    "cast_before_affine": CastBeforeAffineBlock,
    "cast_after_affine": CastAfterAffineBlock,
    "per_channel": PerChannelBlock,
}

for _name, _block in _TOKEN_MAJOR.items():
    register(Workload(_name, _block, normal(("batch", "tokens", "dim")), BLOCK_SIZES, "mutation"))
register(Workload("channels_first", ChannelsFirstBlock, normal(("batch", "dim", "tokens")), BLOCK_SIZES, "mutation"))
