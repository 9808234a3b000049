"""Blocks over [B,D] rows (ranking, control, regression) that have nothing to do with RankMixer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafuse.workloads.types import InputMaker, Sizes, Workload, normal, register, size_table


class CrossNetV2(nn.Module):
    """DCN-v2 cross layers, [B,D] -> [B,D]: x_{l+1} = x_0 * (W_l x_l + b_l) + x_l."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.kernels = nn.ParameterList(nn.init.xavier_normal_(torch.empty(dim, dim)) for _ in range(layers))
        self.bias = nn.ParameterList(nn.init.zeros_(torch.empty(dim, 1)) for _ in range(layers))

    def forward(self, inputs: Tensor) -> Tensor:
        x_0 = inputs.unsqueeze(2)
        x_l = x_0
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            x_l = x_0 * (torch.matmul(kernel, x_l) + bias) + x_l
        return torch.squeeze(x_l, dim=2)


class SoftmaxExperts(nn.Module):
    """Dense mixture, [B,D] -> [B,D]: sum_e softmax(Wg x)_e * (W2_e relu(W1_e x + b1_e) + b2_e)."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.b1 = nn.Parameter(torch.zeros(experts, hidden))
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)
        self.b2 = nn.Parameter(torch.zeros(experts, dim))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(dim=-1)
        h = torch.relu(torch.einsum("bd,edh->beh", x, self.w1) + self.b1)
        y = torch.einsum("beh,ehd->bed", h, self.w2) + self.b2
        return torch.einsum("be,bed->bd", weights, y)


class ConcatSkipMLP(nn.Module):
    """Residual MLP with concat skips, [B,D] -> [B,D].

    h_{i+1} = h_i + selu(W_i LN([h_i, x]) + b_i), the input concatenated again before every layer.
    """

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(2 * dim) for _ in range(layers)])
        self.layers = nn.ModuleList([nn.Linear(2 * dim, dim) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = h + F.selu(layer(norm(torch.cat([h, x], dim=-1))))
        return h


class SoftplusMLP(nn.Module):
    """Three bias-free layers as for a physics-informed network, [B,D] -> [B,O].

    W3 s(W2 s(W1 x)), s(z) = softplus(5 z) / 5 - ln(2) / 5.
    """

    def __init__(self, dim: int, hidden: int, out: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(hidden, dim) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(hidden, hidden) / hidden**0.5)
        self.w3 = nn.Parameter(torch.randn(out, hidden) / hidden**0.5)

    @staticmethod
    def act(z: Tensor) -> Tensor:
        return F.softplus(z, beta=5.0) - 0.13862943611198905

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.act(x @ self.w1.t()) @ self.w2.t()) @ self.w3.t()


class PolicyMLP(nn.Module):
    """Actor-critic, obs [B,D] -> (action [B,A] in (-2, 2), value [B]).

    h = tanh(W2 tanh(W1 obs)); action = 2 tanh(Wa h); value = Wv h.
    """

    def __init__(self, dim: int, hidden: int, actions: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.action_head = nn.Linear(hidden, actions)
        self.value_head = nn.Linear(hidden, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(obs)
        return 2.0 * torch.tanh(self.action_head(h)), self.value_head(h).squeeze(-1)


class DotInteraction(nn.Module):
    """DLRM without its tables, dense [B,D] and looked-up embeddings [B,F,E] -> click probability [B].

    v = relu(bottom(dense)) [B,E]; Z = C C^T with C = [v; embeddings]; sigmoid(top([v, strictly lower part of Z])).
    """

    lower_rows: Tensor
    lower_columns: Tensor

    def __init__(self, dim: int, fields: int, embed: int, hidden: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(fields + 1, fields + 1, offset=-1)
        self.register_buffer("lower_rows", rows, persistent=False)
        self.register_buffer("lower_columns", columns, persistent=False)
        self.bottom = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, embed), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(embed + rows.numel(), hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        v = self.bottom(dense)
        combined = torch.cat([v[:, None, :], embeddings], dim=1)
        dots = torch.bmm(combined, combined.transpose(1, 2))
        flat = dots[:, self.lower_rows, self.lower_columns]
        return torch.sigmoid(self.top(torch.cat((v, flat), dim=1))).flatten()


class CategoricalTower(nn.Module):
    """Ranking from tables: dense [B,D], categories [B,F] and clicked items [B,C], both integers -> logit [B].

    h = LN([dense; E_1(c_1); ...; E_F(c_F); sum_k I(item_k) w_k]), w = softmax(P) over the C positions; W2 gelu(W1 h).
    """

    def __init__(self, dim: int, fields: int, clicks: int, vocabulary: int, embed: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(vocabulary + i, embed) for i in range(fields))
        self.items = nn.Embedding(vocabulary, embed, padding_idx=0)
        self.position = nn.Parameter(torch.randn(clicks))
        width = dim + (fields + 1) * embed
        self.norm = nn.LayerNorm(width)
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, dense: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        found = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        bag = (self.items(clicked) * self.position.softmax(0)[:, None]).sum(1)
        return self.net(self.norm(torch.cat([dense, *found, bag], dim=1))).squeeze(-1)


def dense_and_ids(
    sizes: Sizes, *, dtype: torch.dtype, device: torch.device, seed: int, requires_grad: bool
) -> tuple[Tensor, ...]:
    """Dense features [B,D], categories [B,F] and clicked items [B,C] below the size of the vocabulary."""
    (dense,) = ROWS(sizes, dtype=dtype, device=device, seed=seed, requires_grad=requires_grad)
    numbers = torch.Generator(device).manual_seed(seed + 1)
    shapes = [(sizes["batch"], sizes[name]) for name in ("fields", "clicks")]
    ids = (torch.randint(sizes["vocabulary"], shape, generator=numbers, device=device) for shape in shapes)
    return dense, *ids


class HighwayLayers(nn.Module):
    """Highway network, [B,D] -> [B,D]: g * relu(Wh x + bh) + (1 - g) * x, g = sigmoid(Wg x + bg); one joint matrix."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.dim = dim
        self.weight = nn.Parameter(torch.randn(layers, dim, 2 * dim) * dim**-0.5)
        self.bias = nn.Parameter(torch.full((layers, 2 * dim), -1.0))

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weight.unbind(0), self.bias, strict=True):
            h, g = torch.split(torch.addmm(bias, x, weight), [self.dim, self.dim], dim=1)
            x = torch.lerp(x, h.clamp(min=0), g.sigmoid())
        return x


class StandardisedHuber(nn.Module):
    """Regression loss of a linear model, x [B,D], target [B,O] -> scalar.

    r = (x W + b - target) * exp(-s); mean(where(|r| < 1, r^2 / 2, |r| - 1/2)) + mean(s), s [O] a learned log scale.
    """

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, out)
        self.log_scale = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        residual = (self.linear(x) - target) * torch.exp(-self.log_scale)
        size = residual.abs()
        loss = torch.where(size < 1, 0.5 * residual**2, size - 0.5)
        return loss.mean() + self.log_scale.mean()


BATCH = (16, 13, 65536)
DIM = (32, 27, 1024)
ROWS = normal(("batch", "dim"))


def _add(name: str, build: type[nn.Module], inputs: InputMaker = ROWS, **columns: tuple[int, int, int]) -> None:
    """Register a stranger over [B,D]; `columns` gives its sizes, batch and dim among them where they differ."""
    sizes = size_table(**{"batch": BATCH, "dim": DIM, **columns})
    register(Workload(name, build, inputs, sizes, "stranger"))


_add("dcn_v2", CrossNetV2, layers=(3, 2, 3))
_add("softmax_experts", SoftmaxExperts, batch=(16, 13, 16384), hidden=(24, 19, 1024), experts=(4, 3, 8))
_add("concat_skip_mlp", ConcatSkipMLP, layers=(3, 2, 3))
_add("softplus_mlp", SoftplusMLP, dim=(3, 5, 64), hidden=(32, 29, 1024), out=(1, 3, 16))
_add("policy_mlp", PolicyMLP, dim=(17, 11, 376), hidden=(32, 29, 1024), actions=(6, 3, 17))
_add(
    "dot_interaction",
    DotInteraction,
    normal(("batch", "dim"), ("batch", "fields", "embed")),
    dim=(13, 7, 13),
    fields=(5, 4, 26),
    embed=(16, 9, 128),
    hidden=(32, 21, 512),
)
_add(
    "categorical_tower",
    CategoricalTower,
    dense_and_ids,
    dim=(12, 7, 64),
    fields=(3, 2, 8),
    clicks=(4, 3, 20),
    vocabulary=(13, 11, 100000),
    embed=(16, 9, 64),
    hidden=(32, 21, 512),
)
_add("highway", HighwayLayers, layers=(2, 3, 3))
_add("standardised_huber", StandardisedHuber, normal(("batch", "dim"), ("batch", "out")), out=(24, 17, 1024))
