"""Run shared programs' Triton texts under Triton's interpreter (``TRITON_INTERPRET=1``); prints differences by size."""

from __future__ import annotations

import torch
from torch import nn

from sharing_modules import differences, engine


class Plain(nn.Module):
    """A norm, a product and a residual: ops that the interpreter has."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x).transpose(0, 1)).transpose(0, 1))


def main() -> None:
    """One line a size: the size, the difference, and how often code was generated."""
    torch.manual_seed(0)
    module = Plain(6)
    fused, found = engine(module, torch.randn(9, 3, 6, requires_grad=True), backend="triton")
    for n in (9, 13, 2, 64, 31, 16):
        x = torch.randn(n, 3, 6, requires_grad=True)
        print(n, differences(module, fused, [x]), found.generations)


if __name__ == "__main__":
    main()
