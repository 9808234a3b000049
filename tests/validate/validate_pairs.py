"""Short, ill-conditioned modules with heavy-tailed errors, and candidates for them with errors of known size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from megafuse.validate import RULE, Sample, Verdict, decided, in_doubt, judge, measure

FEATURES, DRAWS = 16, 5


class Pairs(nn.Module):
    """Two norms over 16 features, a product with 2 columns, and a norm over those 2.

    Where the two columns are nearly equal, the last norm enlarges the rounding errors before it by up to
    1/sqrt(eps) = 31, and its derivative by up to 1/eps: a few elements carry nearly all of a result's error.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(FEATURES, generator=rng))
        self.weight = nn.Parameter(0.2 * torch.randn(2, FEATURES, generator=rng))
        self.scale = nn.Parameter(torch.randn(2, generator=rng))
        self.shift = nn.Parameter(torch.randn(2, generator=rng))

    def forward(self, x: torch.Tensor, order: torch.Tensor | None = None) -> torch.Tensor:
        """The module; with ``order`` its features are taken in that order: the same mathematics, other sums."""
        gain, weight, scale, shift = (p.to(x.dtype) for p in (self.gain, self.weight, self.scale, self.shift))
        if order is not None:
            x, gain, weight = x.index_select(-1, order), gain.index_select(0, order), weight.index_select(1, order)
        v = F.layer_norm(x, x.shape[1:], eps=1e-2)
        v = F.rms_norm(v, (FEATURES,), gain, 1e-3) @ weight.t()
        v = F.layer_norm(v, (2,), scale, shift, 1e-3)
        return torch.addcmul(v, shift, torch.tanh(v))


@dataclass(frozen=True)
class Trial:
    """One order of the features, judged on draws of its own: four rows, each four times by ``expand``."""

    module: Pairs
    number: int

    @property
    def order(self) -> torch.Tensor:
        """The candidate's order of the features."""
        return torch.randperm(FEATURES, generator=torch.Generator().manual_seed(self.number))

    def verdicts(self, first: int, count: int, factor: float = 1.0) -> tuple[Verdict, ...]:
        """The rule on draws ``first`` and following: output and input gradient, all errors ``factor`` times as large.

        With 1 the candidate is right. With k its true RMS ratio is k, by whatever its inner values are off.
        """
        sums: dict[str, Sample] = {}
        for seed in range(first, first + count):
            rng = torch.Generator().manual_seed(1_000_003 * (self.number + 1) + seed)
            x, g = torch.randn(1, 4, FEATURES, generator=rng), torch.randn(4, 4, 2, generator=rng)
            exact, unfused = self._run(x.double(), g, None), self._run(x, g, None)
            ours = self._run(x, g, self.order)
            for name, true in exact.items():
                near = (true + factor * (ours[name].double() - true)).float()
                found = measure(name, name, near, unfused[name], true, seed=seed)
                sums[name] = sums[name] + found if name in sums else found
        return judge(sums.values())

    def _run(self, x: torch.Tensor, g: torch.Tensor, order: torch.Tensor | None) -> dict[str, torch.Tensor]:
        x = x.expand(4, 4, FEATURES).requires_grad_()
        out = self.module(x, order)
        (grad,) = torch.autograd.grad(out, x, g.to(out.dtype))
        return {"output": out.detach(), "input gradient": grad}


@dataclass(frozen=True)
class Shift:
    """A shift and a norm that takes it out again, with rows and columns in another order, on draws of its own.

    The gradient of the shift is zero in exact arithmetic, and so all errors: of summands that are large where the three
    columns of a norm are nearly equal. On every draw ``fault`` is added to one element of it. Its gradients are
    ``pooled``, with a well-behaved one of ``others`` elements if there are any, or judged each alone.
    """

    number: int
    fault: float = 0.0
    others: int = 0
    pooled: bool = True

    def verdicts(self, first: int, count: int, factor: float = 1.0) -> tuple[Verdict, ...]:
        """The rule on draws ``first`` and following: parameter gradients, all errors ``factor`` times as large."""
        rng = torch.Generator().manual_seed(self.number)
        rows, columns = torch.randperm(2, generator=rng), torch.randperm(3, generator=rng)
        sums: dict[str, Sample] = {}
        for seed in range(first, first + count):
            rng = torch.Generator().manual_seed(1_000_003 * (self.number + 1) + seed)
            x, g, scale = (torch.randn(*shape, generator=rng) for shape in ((2, 4, 3), (2, 4, 3), (3,)))
            exact, unfused = self._run(x.double(), g.double(), scale.double()), self._run(x, g, scale)
            ours = self._run(x[rows][..., columns], g[rows][..., columns], scale[columns])
            ours["scale"] = ours["scale"][columns.argsort()]
            ours["shift"][0] += self.fault
            if self.others:
                terms = torch.randn(self.others, 8, generator=rng, dtype=torch.float64)
                exact["others"], unfused["others"] = terms.sum(1), terms.float().sum(1)
                ours["others"] = terms.float().flip(1).cumsum(1)[:, -1]
            for name, true in exact.items():
                near = (true + factor * (ours[name].double() - true)).float()
                role = "parameter gradient" if self.pooled else name
                found = measure(name, role, near, unfused[name], true, seed=seed)
                sums[name] = sums[name] + found if name in sums else found
        return judge(sums.values())

    @staticmethod
    def _run(x: torch.Tensor, g: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        shift, scale = torch.zeros(4, 1, dtype=x.dtype).requires_grad_(), scale.clone().requires_grad_()
        out = torch.tanh(F.layer_norm(x + shift, (3,), scale, None, 1e-5))
        return dict(zip(("shift", "scale"), torch.autograd.grad(out, (shift, scale), g), strict=True))


def outcome(trial: Trial | Shift, factor: float = 1.0, draws: int = DRAWS) -> tuple[tuple[Verdict, ...], bool]:
    """The doubts that the first draws left, and whether the candidate is accepted."""
    first = trial.verdicts(0, draws, factor)
    doubts = in_doubt(first)
    if not doubts:
        return (), all(v.ok for v in first)
    further = trial.verdicts(draws, draws * RULE.further_draws, factor)
    return doubts, all(v.ok for v in decided(doubts, further))
