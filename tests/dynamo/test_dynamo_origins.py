"""Lines and modules of what Dynamo recorded are those of the module captured directly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dynamo_helpers import compilations, compiled, graphs_made
from megafuse.capture.api import capture
from megafuse.ir.graph import Graph


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).tanh()  # inner


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sin()  # outer


def origins(graph: Graph) -> set[str]:
    return {str(n.origin) for n in graph.nodes if n.origin is not None}


@pytest.mark.parametrize("made", [Outer(), nn.Sequential(nn.Linear(8, 8), nn.GELU())], ids=["lines", "no lines"])
def test_origins_are_those_of_the_module(made: nn.Module) -> None:
    x = torch.randn(3, 8)
    with graphs_made() as graphs:
        compiled(made)(x)
    (found,) = compilations(graphs)
    assert origins(found.captured.graph) == origins(capture(made, (x,)).graph) != set()
