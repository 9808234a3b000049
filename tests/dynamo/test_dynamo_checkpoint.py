"""Activation checkpointing: what the regions compute is not saved but computed again, with the same results."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dynamo_helpers import check_compiled, compilations, compiled, graphs_made
from megafuse.compiler import Compiled
from megafuse.ir.types import Dot, Input, Opaque


class Block(nn.Module):
    def __init__(self, d: int, p: float) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.p = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d), p

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.down(F.dropout(F.gelu(self.up(self.norm(x))), self.p)))


class Stack(nn.Module):
    """Blocks with ops between them, or one right behind the other; each a checkpointed region if ``how`` is given."""

    def __init__(self, blocks: int, how: dict[str, Any] | None, *, between: bool, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.how, self.between = nn.ModuleList(Block(8, p) for _ in range(blocks)), how, between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x) if self.how is None else checkpoint(block, x, use_reentrant=False, **self.how)
            x = y * 2 + x if self.between else y
        return x


def compilation_of(module: nn.Module, x: Tensor) -> tuple[Compiled, list[Tensor]]:
    """The compiled graph, and its output and gradients."""
    with graphs_made() as made:
        torch.manual_seed(3)
        out = compiled(module, fullgraph=True)(x)
        results = [out, *torch.autograd.grad((out * out).sum(), [x, *module.parameters()])]
    (compilation,) = compilations(made)
    return compilation, results


def computed_and_saved(compilation: Compiled) -> list[Any]:
    """Saved values that are no inputs of the step."""
    graph, step = compilation.graph, compilation.step
    given = {step.names[n] for n in graph.inputs}
    return [name for name in step.saved if name not in given]


def dots(compilation: Compiled) -> tuple[int, int]:
    """Matrix products in forward and in backward."""
    forward = compilation.graph.forward_nodes()
    made = [n in forward for n in compilation.graph.nodes if n.is_a(Dot)]
    return sum(made), len(made) - sum(made)


@pytest.fixture
def _products_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No chains: what they save and how they round depends on what else is in them."""
    monkeypatch.setattr("megafuse.fusion.planner.WORTH_CHAINING", float("inf"))


@pytest.mark.usefixtures("_products_of_their_own")
@pytest.mark.parametrize("between", [True, False])
def test_only_what_enters_a_region_is_saved(between: bool) -> None:
    x = torch.randn(5, 8, requires_grad=True)
    plain, theirs = compilation_of(Stack(3, None, between=between), x)
    torch._dynamo.reset()
    tagged, ours = compilation_of(Stack(3, {}, between=between), x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(computed_and_saved(plain)) >= 9
    assert len(computed_and_saved(tagged)) == 2  # the inputs of the second and the third region
    assert dots(plain) == (6, 12)
    assert dots(tagged) == (6, 12 + 6)


def test_checkpointed_module_by_the_rule() -> None:
    check_compiled(Stack(2, {}, between=True), torch.randn(5, 8, requires_grad=True))


def test_nothing_is_computed_twice_without_gradients() -> None:
    with graphs_made() as made, torch.no_grad():
        compiled(Stack(2, {}, between=True))(torch.randn(5, 8))
    (compilation,) = compilations(made)
    assert dots(compilation) == (4, 0)


@pytest.mark.usefixtures("_products_of_their_own")
def test_random_draws_are_kept() -> None:
    """Dropout in a region: forward and backward see one mask."""
    x = torch.randn(5, 8, requires_grad=True)
    _, theirs = compilation_of(Stack(1, None, between=True, p=0.4), x)
    torch._dynamo.reset()
    tagged, ours = compilation_of(Stack(1, {}, between=True, p=0.4), x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    forward = tagged.graph.forward_nodes()
    drawn = [n for n in tagged.graph.nodes if isinstance(n.attrs, Opaque) and n.attrs.reason == "draws random numbers"]
    assert drawn
    assert all(n in forward for n in drawn)


def save_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_policy_that_saves_products() -> None:
    """Selective checkpointing: no product runs twice."""
    context = functools.partial(create_selective_checkpoint_contexts, save_products)
    x = torch.randn(5, 8, requires_grad=True)
    chosen, ours = compilation_of(Stack(2, {"context_fn": context}, between=True), x)
    assert dots(chosen) == (4, 8)
    torch._dynamo.reset()
    _, theirs = compilation_of(Stack(2, None, between=True), x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_inputs_are_no_copies() -> None:
    """A region that reads an input as it is saves the input itself."""
    x = torch.randn(5, 8, requires_grad=True)
    tagged, _ = compilation_of(Stack(1, {}, between=True), x)
    assert not computed_and_saved(tagged)
    assert all(n.is_a(Input) for n in tagged.graph.inputs)
