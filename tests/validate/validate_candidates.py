"""A small gated FFN inside two norms, and hand-written candidates for it: two right ones and five with a fault each.

Shapes: B samples, T tokens, D columns, H hidden columns. Parameters as in the module; x, out: [B, T, D].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

EPS_OUTER, EPS_INNER = 1e-3, 1e-5


def layer_norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float) -> torch.Tensor:
    """Statistics in fp32, one rounding at the end."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (scaled * gamma.float() + beta.float()).to(x.dtype)


class GatedBlock(nn.Module):
    """out = norm(x1 + ffn(x1)), x1 = norm(x), ffn(x) = (LN(U) * silu(LN(G))) @ wout + bout, (U, G) = x @ w1 + b1."""

    def __init__(self, tokens: int = 2, dim: int = 24, hidden: int = 40) -> None:
        super().__init__()

        def uniform(*shape: int) -> nn.Parameter:
            bound = (6.0 / (shape[-2] if len(shape) > 2 else 4 * shape[-1])) ** 0.5
            return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

        self.w1, self.b1 = uniform(tokens, dim, 2 * hidden), uniform(tokens, 2 * hidden)
        self.wout, self.bout = uniform(tokens, hidden, dim), uniform(tokens, dim)
        self.norm_x, self.norm_gate = nn.LayerNorm(hidden, EPS_INNER), nn.LayerNorm(hidden, EPS_INNER)
        self.gamma0, self.beta0 = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.gamma2, self.beta2 = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1 = layer_norm(x, self.gamma0, self.beta0, EPS_OUTER)
        z = torch.bmm(x1.transpose(0, 1), self.w1) + self.b1[:, None]  # [T, B, 2H]
        u, g = z.chunk(2, -1)
        hidden = self.norm_x(u) * F.silu(self.norm_gate(g))  # [T, B, H]
        out = torch.bmm(hidden, self.wout) + self.bout[:, None]  # [T, B, D]
        return layer_norm(x1 + out.transpose(0, 1), self.gamma2, self.beta2, EPS_OUTER)


def make_block(dtype: torch.dtype, seed: int = 0) -> GatedBlock:
    """A block with random parameters in ``dtype``."""
    torch.manual_seed(seed)
    return GatedBlock().to(dtype)


class MissingPartial(torch.autograd.Function):
    """Expands ``gamma`` [H] to [T, B, H]; its gradient lacks what the last quarter of the rows contributed."""

    @staticmethod
    def forward(ctx, gamma: torch.Tensor, x_hat: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x_hat)
        return gamma.expand_as(x_hat).clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        kept = grad[:, : grad.shape[1] - grad.shape[1] // 4]
        return kept.float().sum((0, 1)).to(grad.dtype), None


@dataclass
class Candidate:
    """The block computed in ``inner`` precision with one rounding at the end, and with one planted fault if named."""

    block: GatedBlock
    inner: torch.dtype = torch.float32
    fault: str = ""
    scratch: dict[str, torch.Tensor] = field(default_factory=dict)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        p = {n: v.to(self.inner) for n, v in self.block.named_parameters()}
        x1 = layer_norm(x.to(self.inner), p["gamma0"], p["beta0"], 1e-5 if self.fault == "wrong_eps" else EPS_OUTER)
        z = torch.einsum("btd,tdh->tbh", x1, p["w1"])
        if self.fault != "dropped_bias":
            z = z + p["b1"][:, None]
        u, g = z.chunk(2, -1)
        if self.fault == "swapped_halves":
            u, g = g, u
        x_hat = self._stale(layer_norm(u, torch.ones_like(u), torch.zeros_like(u), EPS_INNER))
        gamma = p["norm_x.weight"]
        if self.fault == "missing_dgamma_partial":
            gamma = MissingPartial.apply(gamma, x_hat)
        gate = layer_norm(g, p["norm_gate.weight"], p["norm_gate.bias"], EPS_INNER)
        hidden = (x_hat * gamma + p["norm_x.bias"]) * F.silu(gate)
        out = torch.einsum("tbh,thd->btd", hidden, p["wout"]) + p["bout"]
        return layer_norm(x1 + out, p["gamma2"], p["beta2"], EPS_OUTER).to(x.dtype)

    def _stale(self, x_hat: torch.Tensor) -> torch.Tensor:
        """With the fault: one row of the workspace still holds what the previous call wrote."""
        if self.fault != "stale_workspace":
            return x_hat
        old = self.scratch.get("x_hat", torch.zeros_like(x_hat))
        self.scratch["x_hat"] = x_hat.detach().clone()
        return torch.cat([x_hat[:, :-1], old[:, -1:]], 1)


def rounds_like_reference(block: GatedBlock, eps_inner: float = EPS_INNER) -> Callable[[torch.Tensor], torch.Tensor]:
    """Another order of the same roundings: norms by hand, contractions by einsum, bias after a cast."""

    def call(x: torch.Tensor) -> torch.Tensor:
        x1 = layer_norm(x, block.gamma0, block.beta0, EPS_OUTER)
        z = torch.einsum("btd,tdh->tbh", x1, block.w1) + block.b1[:, None]
        u, g = z.chunk(2, -1)
        h0 = layer_norm(u, block.norm_x.weight, block.norm_x.bias, eps_inner)
        gate = layer_norm(g, block.norm_gate.weight, block.norm_gate.bias, eps_inner)
        hidden = h0 * (gate.float() * torch.sigmoid(gate.float())).to(x.dtype)
        out = torch.einsum("tbh,thd->btd", hidden, block.wout) + block.bout
        return layer_norm(x1 + out, block.gamma2, block.beta2, EPS_OUTER)

    return call
