"""Blocks over [B,T,D] sequences that have nothing to do with RankMixer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafuse.workloads.types import InputMaker, Sizes, Workload, normal, register, size_table


class GeluFFN(nn.Module):
    """Pre-norm transformer FFN, [B,T,D] -> [B,T,D]: x + W2 gelu_tanh(W1 LN(x) + b1) + b2."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(self.norm(x))


class LlamaRMSNorm(nn.Module):
    """weight * (x_fp32 * rsqrt(mean(x_fp32^2) + eps)) cast to x's dtype before the weight."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return self.weight * hidden_states.to(input_dtype)


class SwiGLUFFN(nn.Module):
    """LLaMA FFN, [B,T,D] -> [B,T,D]: x + down(silu(gate(h)) * up(h)), h = RMSNorm(x); no biases."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(dim)
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return residual + x


class TokenFFN(nn.Module):
    """A GELU network for each token, [B,T,D] -> [B,T,D]: gelu(x_t W1_t) W2_t; no biases."""

    def __init__(self, tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(tokens, dim, hidden) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(tokens, hidden, dim) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(torch.bmm(x.transpose(0, 1), self.w1))  # [T, B, H]
        return torch.bmm(hidden, self.w2).transpose(0, 1)


class MLPMixerBlock(nn.Module):
    """MLP-Mixer block, [B,T,D] -> [B,T,D].

    y = x + (W2 gelu(W1 LN(x)^T))^T, mixing tokens; y + W4 gelu(W3 LN(y)), mixing channels.
    """

    def __init__(self, tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.token_norm = nn.LayerNorm(dim)
        self.token_in = nn.Linear(tokens, hidden)
        self.token_out = nn.Linear(hidden, tokens)
        self.channel_norm = nn.LayerNorm(dim)
        self.channel_in = nn.Linear(dim, hidden)
        self.channel_out = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.token_norm(x).transpose(1, 2)
        y = self.token_out(F.gelu(self.token_in(y)))
        x = x + y.transpose(1, 2)
        y = self.channel_norm(x)
        return x + self.channel_out(F.gelu(self.channel_in(y)))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``x * (1 + scale) + shift``, with shift and scale [B,D] broadcast over the tokens of x [B,T,D]."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class AdaLNBlock(nn.Module):
    """DiT's adaLN modulation of an MLP, x [B,T,D], c [B,D] -> [B,T,D].

    (shift, scale, gate) = chunk(W silu(c) + b); x + gate * mlp(LN(x) * (1 + scale) + shift), LN without affine part.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, dim))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 3 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(c).chunk(3, dim=1)
        return x + gate.unsqueeze(1) * self.mlp(modulate(self.norm(x), shift, scale))


class GatedMLP(nn.Module):
    """gMLP block, [B,T,D] -> [B,T,D]: u, v = split(gelu(W1 LN(x))); x + W2 (u * (Ws LN(v) + bs)), Ws [T,T]."""

    def __init__(self, tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.proj_in = nn.Linear(dim, 2 * hidden)
        self.spatial_norm = nn.LayerNorm(hidden)
        self.spatial_weight = nn.Parameter(torch.randn(tokens, tokens) / tokens)
        self.spatial_bias = nn.Parameter(torch.ones(tokens))
        self.proj_out = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.proj_in(self.norm(x))).chunk(2, dim=-1)
        v = torch.einsum("ts,bsh->bth", self.spatial_weight, self.spatial_norm(v))
        v = v + self.spatial_bias[None, :, None]
        return x + self.proj_out(u * v)


class FiLM(nn.Module):
    """Feature-wise modulation, x [B,T,D], cond [B,C] -> [B,T,D].

    gamma, beta = split(cond W + b); leaky_relu(gamma * (x V) + beta, 0.2) + x.
    """

    def __init__(self, dim: int, cond: int) -> None:
        super().__init__()
        self.to_film = nn.Linear(cond, 2 * dim)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        film = self.to_film(cond).view(cond.size(0), 2, 1, -1)
        gamma, beta = film[:, 0], film[:, 1]
        h = torch.addcmul(beta.expand(-1, x.size(1), -1), gamma, self.proj(x))
        return F.leaky_relu(h, negative_slope=0.2).add(x)


class LayerScaleBlock(nn.Module):
    """CaiT / ConvNeXt residual, [B,T,D] -> [B,T,D]: x + gamma * W2 quick_gelu(W1 LN(x)), gamma starts at 1e-4."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6, bias=False)
        self.pwconv1 = nn.Linear(dim, hidden)
        self.pwconv2 = nn.Linear(hidden, dim)
        self.gamma = nn.Parameter(1e-4 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.pwconv1(self.norm(x))
        x = x * torch.sigmoid(1.702 * x)
        x = self.gamma * self.pwconv2(x)
        x += shortcut
        return x


class SqueezeExcite(nn.Module):
    """Squeeze-excite over tokens, [B,T,D] -> [B,T,D]: y * hardsigmoid(W2 relu(W1 mean_t(y))), y = hardswish(x V)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.reduce = nn.Linear(dim, hidden)
        self.expand = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.proj(x))
        s = F.relu(self.reduce(y.mean(dim=1, keepdim=True)), inplace=True)
        return y * F.hardsigmoid(self.expand(s))


class SharedResidual(nn.Module):
    """A post-norm residual step with the same parameters applied twice, [B,T,D] -> [B,T,D].

    step(x) = LN(x + W elu(W^T x + b) + c), W [D,H] used both ways round; step(step(x)).
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(dim, hidden)))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.out_bias = nn.Parameter(torch.zeros(dim))

    def step(self, x: Tensor) -> Tensor:
        h = F.elu(x @ self.weight + self.bias)
        return self.norm(x + F.linear(h, self.weight, self.out_bias))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.step(x)
        return x


class LogSoftmaxHead(nn.Module):
    """Classifier head, [B,T,D] -> [B,T,C] in float32: log_softmax_fp32(30 tanh(W LN(x) / 30)), soft-capped logits."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes, bias=False)
        self.cap = 30.0

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        logits = self.cap * torch.tanh(logits / self.cap)
        return F.log_softmax(logits, dim=-1, dtype=torch.float32)


class MaskedPool(nn.Module):
    """Masked mean pooling with a unit-length result, x [B,T,D], mask [B,T] bool -> [B,D].

    normalize(sum_t(h * m) / max(sum_t(m), 1)), h = mish(x W + b); ||.|| clamped at 1e-12.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = F.mish(self.proj(x)).masked_fill(~mask.unsqueeze(-1), 0.0)
        count = mask.sum(dim=1, keepdim=True).clamp(min=1)
        return F.normalize(h.sum(dim=1) / count, dim=-1)


def masked_tokens(
    sizes: Sizes, *, dtype: torch.dtype, device: torch.device, seed: int, requires_grad: bool
) -> tuple[Tensor, ...]:
    """x [B,T,D] and a bool mask [B,T] keeping the first token and about three quarters of the others."""
    (x,) = SEQUENCE(sizes, dtype=dtype, device=device, seed=seed, requires_grad=requires_grad)
    generator = torch.Generator(device).manual_seed(seed + 1)
    mask = torch.rand(sizes["batch"], sizes["tokens"], generator=generator, device=device) < 0.75
    mask[:, 0] = True
    return x, mask


SEQUENCE = normal(("batch", "tokens", "dim"))
HIDDEN = (64, 53, 4096)


def _add(
    name: str,
    build: type[nn.Module],
    inputs: InputMaker = SEQUENCE,
    input_sizes: tuple[str, ...] = ("batch", "tokens"),
    **columns: tuple[int, int, int],
) -> None:
    """Register a stranger over [B,T,D]; `columns` gives the sizes it has beyond batch, tokens and dim."""
    sizes = size_table(batch=(2, 3, 64), tokens=(8, 5, 512), dim=(32, 27, 1024), **columns)
    register(Workload(name, build, inputs, sizes, "stranger", frozenset(input_sizes)))


_add("gelu_ffn", GeluFFN, hidden=HIDDEN)
_add("swiglu_ffn", SwiGLUFFN, hidden=HIDDEN)
_add("mlp_mixer", MLPMixerBlock, input_sizes=("batch",), hidden=(48, 37, 2048))
_add("adaln", AdaLNBlock, normal(("batch", "tokens", "dim"), ("batch", "dim")), hidden=HIDDEN)
_add("gmlp", GatedMLP, input_sizes=("batch",), hidden=HIDDEN)
_add("film", FiLM, normal(("batch", "tokens", "dim"), ("batch", "cond")), cond=(12, 7, 256))
_add("layer_scale", LayerScaleBlock, hidden=HIDDEN)
_add("squeeze_excite", SqueezeExcite, hidden=(8, 5, 64))
_add("shared_residual", SharedResidual, hidden=HIDDEN)
_add("log_softmax_head", LogSoftmaxHead, classes=(40, 31, 8192))
_add("masked_pool", MaskedPool, masked_tokens)
register(
    Workload(
        "token_ffn",
        TokenFFN,
        normal(("batch", "tokens", "dim")),
        size_table(batch=(2, 3, 1024), tokens=(8, 5, 64), dim=(32, 27, 1280), hidden=(64, 53, 2560)),
        "stranger",
    )
)
