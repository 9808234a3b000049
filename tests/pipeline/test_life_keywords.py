"""Keywords of ``fuse`` and ``check``: options, arguments of the callable, or mistakes, named before capture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafuse
from megafuse import validate
from megafuse.api import FUSE_OPTIONS, fuse
from megafuse.validate import CheckOptions

FEW = CheckOptions(seeds=1, small_seeds=0, repeats=1)


class Scaled(nn.Module):
    """Takes one argument beside its input."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(x) * scale


class Untouched(Scaled):
    """Fails where it runs."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        raise AssertionError("forward was called")


def batch() -> Tensor:
    return torch.randn(3, 5, requires_grad=True)


def compared(module: nn.Module, x: Tensor, **keywords: Any) -> Any:
    return megafuse.check(module, x, fused=module, **keywords)


def compared_inside(module: nn.Module, x: Tensor, **keywords: Any) -> Any:
    return validate.check(module, x, fused=module, **keywords)


CALLS: dict[str, Callable[..., Any]] = {
    "fuse": megafuse.fuse,
    "check": megafuse.check,
    "check of a fused": compared,
    "check without fuse": compared_inside,
}
TYPOS = {
    "fuse": ("targt", "target"),
    "check": ("strickt", "strict"),
    "check of a fused": ("sedes", "seeds"),
    "check without fuse": ("require_finit", "require_finite"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_mistyped_keyword_is_named_before_anything_runs(call: str) -> None:
    typo, meant = TYPOS[call]
    message = (
        rf"keyword '{typo}' is neither an option of {call[:5].strip()}\(\) nor an argument of Untouched.forward\(\)"
    )
    with pytest.raises(megafuse.InputError, match=rf"{message}\n.*did you mean '{meant}'"):
        CALLS[call](Untouched(), batch(), scale=2.0, **{typo: "interpret"})


@pytest.mark.parametrize("option", ["cuda_graphs", *FUSE_OPTIONS])
def test_options_of_fuse_have_no_meaning_beside_a_fused_callable(option: str) -> None:
    with pytest.raises(megafuse.InputError, match=f"'{option}' is neither"):
        megafuse.check(Scaled(), batch(), fused=Scaled(), **{option: None})


def test_check_takes_its_own_options_those_of_fuse_and_arguments() -> None:
    report = megafuse.check(Scaled(), batch(), scale=2.0, target="interpret", strict=True, options=FEW)
    assert report.ok and not report.notes
    report = megafuse.check(Scaled(), batch(), scale=2.0, target="interpret", seeds=1, require_finite=True)
    assert report.ok and report.seeds == 1


def test_an_argument_with_an_options_name_is_an_argument_beside_a_fused_callable() -> None:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        return (x - target).square().sum()

    x, y = batch(), torch.randn(3, 5)
    assert megafuse.check(loss, x, target=y, fused=loss, options=FEW).ok


def decorated(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(fn)
    def run(x: Tensor, *, twice: bool = False, **rest: Any) -> Tensor:
        return fn(x, **rest) * (2 if twice else 1)

    return run


def scaled(x: Tensor, scale: float = 1.0) -> Tensor:
    return torch.tanh(x) * scale


ACCEPTED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "an argument": (Scaled(), {"scale": 2.0}),
    "any keyword": (lambda x, **more: x * more["by"], {"by": 3.0}),
    "a decorator's": (decorated(scaled), {"twice": True, "scale": 0.5}),
    "a partial's": (functools.partial(scaled, scale=3.0), {"scale": 4.0}),
    "without a signature": (torch.add, {"other": 2.0, "alpha": 3.0}),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_keywords_that_the_callable_takes_reach_it(kind: str) -> None:
    fn, keywords = ACCEPTED[kind]
    x = batch()
    fused = megafuse.fuse(fn, x, target="interpret", **keywords)
    torch.testing.assert_close(fused(x, **keywords), fn(x, **keywords))
    assert megafuse.check(fn, x, target="interpret", options=FEW, **keywords).ok


def test_a_keyword_that_a_hook_takes_is_the_hooks() -> None:
    module = Scaled()
    module.register_forward_pre_hook(lambda m, args, kwargs: (args, {"scale": kwargs["twice"] * 2}), with_kwargs=True)
    assert megafuse.check(module, batch(), twice=1.0, fused=module, options=FEW).ok


def test_a_missing_example_is_named_with_what_to_give() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(
        megafuse.InputError, match=r"missing a required argument: 'input'(.|\n)*Sequential.forward\(input\)"
    ):
        fuse(net, target="interpret")
    with pytest.raises(megafuse.InputError, match="too many positional arguments"):
        fuse(net, torch.ones(2, 4), torch.ones(2, 4), target="interpret")
