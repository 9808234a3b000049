"""``memory_budget=``: less memory for more work, right by the rule; what ``explain`` says of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafuse
from megafuse.compiler import Compiled, compile_call
from megafuse.core.device import device_spec
from megafuse.core.errors import InputError
from megafuse.schedule.memory import memory_use
from pipeline_helpers import check_few, compiled_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Block(nn.Module):
    """A pre-norm network with a residual."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Dropped(Block):
    """With a random mask, which cannot be drawn again."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


def stack(count: int, dim: int, hidden: int) -> nn.Module:
    return nn.Sequential(*(Block(dim, hidden) for _ in range(count)))


def planned(budget: int | None) -> Compiled:
    with torch.device("meta"):
        module = stack(4, 256, 1024).to(torch.bfloat16)
        x = torch.empty(4096, 256, dtype=torch.bfloat16, requires_grad=True)
    return compile_call(module, (x,), {}, device_spec(90), memory_budget=budget)


def test_a_budget_is_kept_for_more_time() -> None:
    free = planned(None)
    before = memory_use(free.step)
    costs = []
    for share in (0.8, 0.6):
        budget = int(before.peak * share)
        made = planned(budget)
        after = memory_use(made.step)
        assert after.peak <= budget and after.saved < before.saved
        said = made.cover.decisions[-1]
        assert "saved values are computed again" in said and "NOT REACHED" not in said
        costs.append(float(said.split(" us more predicted")[0].rsplit(" ", 1)[1]))
    assert 0 < costs[0] < costs[1]


def test_where_there_is_enough_nothing_changes() -> None:
    free = planned(None)
    made = planned(memory_use(free.step).peak)
    assert made.step.forward == free.step.forward and made.step.backward == free.step.backward


def test_a_budget_that_cannot_be_kept_is_said() -> None:
    free, made = planned(None), planned(1)
    assert "is NOT REACHED" in made.cover.decisions[-1]
    assert memory_use(made.step).peak < memory_use(free.step).peak, "the least that was found is taken"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.7, 0.0])
def test_results_are_right(dtype: str, share: float) -> None:
    torch.manual_seed(2)
    module = stack(3, 24, 40).to(DTYPES[dtype])
    x = torch.randn(33, 24, dtype=DTYPES[dtype], requires_grad=True)
    free = megafuse.fuse(module, x, target="interpret", chains=False)
    before = memory_use(compiled_of(free).step)
    fused = megafuse.fuse(module, x, target="interpret", chains=False, memory_budget=int(before.peak * share))
    assert memory_use(compiled_of(fused).step).saved < before.saved
    check_few(module, x, fused=fused)


def test_random_masks_are_kept() -> None:
    module, x = Dropped(24, 40), torch.randn(33, 24, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret", memory_budget=0)
    torch.manual_seed(5)
    expected = torch.autograd.grad(module(x).sum(), (x, *module.parameters()))
    torch.manual_seed(5)
    found = torch.autograd.grad(fused(x).sum(), (x, *module.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_other_sizes_are_served_with_the_same_option() -> None:
    module, x = stack(2, 24, 40), torch.randn(33, 24, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret", chains=False, memory_budget=20_000)
    for rows in (5, 7, 40):
        other = torch.randn(rows, 24)
        torch.testing.assert_close(fused(other), module(other))


def test_explain_says_what_is_allocated() -> None:
    module, x = stack(2, 24, 40), torch.randn(33, 24, requires_grad=True)
    text = str(megafuse.explain(megafuse.fuse(module, x, target="interpret", chains=False, memory_budget=30_000)))
    assert "memory: at most " in text and "memory_budget of 0.0 MB" in text


def test_a_negative_budget_is_refused() -> None:
    module, x = stack(1, 8, 8), torch.randn(3, 8)
    with pytest.raises(InputError, match=r"memory_budget=-1"):
        megafuse.fuse(module, x, target="interpret", memory_budget=-1)
