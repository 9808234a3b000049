"""Activations x widths x dtypes of MLPs, judged by the acceptance rule on the generated tile programs."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import megafuse
from megafuse.api import plain
from megafuse.nn import ACTIVATIONS, MLP
from megafuse.validate import CheckOptions
from mlp_modules import rows

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUICK = CheckOptions(small_seeds=0, repeats=1)  # five seeds, as the rule has it
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33)
SETTINGS = {
    "softplus": (lambda: nn.Softplus(beta=7.0, threshold=3.0), lambda: nn.Softplus(beta=0.25)),
    "leaky_relu": (lambda: nn.LeakyReLU(0.3),),
    "elu": (lambda: nn.ELU(0.4),),
}


def draw(seed: str, activation: object, dtype: torch.dtype) -> tuple[MLP, torch.Tensor]:
    """An MLP of two to four layers of odd and round widths, and a batch with one or two leading axes."""
    rng = random.Random(seed)
    widths = [rng.choice(WIDTHS) for _ in range(rng.randint(3, 5))]
    bias, norm, last = (rng.random() < 0.5 for _ in range(3))
    shape = (rng.choice((1, 13, 40)),) if rng.random() < 0.6 else (2, rng.choice((1, 7)))
    print(f"{seed}: widths {widths}, bias {bias}, weight norm {norm}, last activation {last}, batch {shape}")
    torch.manual_seed(rng.randrange(2**31))
    module = MLP(
        widths,
        activation,
        bias=bias,
        weight_norm=norm,
        last_activation=activation if last else None,
        dtype=dtype,
        target="interpret",
        strict=True,
    )
    return module, rows(*shape, widths[0], dtype=dtype, seed=rng.randrange(1000))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_any_activation_at_any_widths(name: str, dtype: str) -> None:
    module, x = draw(f"{name} {dtype}", name, DTYPES[dtype])
    report = megafuse.check(module, x, options=QUICK)
    assert report.ok, str(report)


@pytest.mark.parametrize(("name", "make"), [(n, m) for n, makers in SETTINGS.items() for m in makers])
def test_settings_of_activations(name: str, make: object) -> None:
    module, x = draw(f"settings of {name}", make, torch.float32)
    report = megafuse.check(module, x, options=QUICK)
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["softplus", "sin", "elu"])
def test_tails(name: str, dtype: str) -> None:
    """Inputs of some hundreds: thresholds, saturation, and the sine of large arguments."""
    torch.manual_seed(5)
    module = MLP([6, 9, 4], name, dtype=DTYPES[dtype], target="interpret", strict=True)
    x = (rows(24, 6, grad=False) * 300).to(DTYPES[dtype]).requires_grad_()
    report = megafuse.check(module, x, options=QUICK)
    assert report.ok, str(report)


def test_a_wrong_activation_is_found() -> None:
    """The rule sees a softplus that goes over into the identity too early."""
    module, wrong = (MLP([6, 9, 4], nn.Softplus(threshold=t), target="interpret") for t in (20.0, 2.0))
    wrong.load_state_dict(module.state_dict())
    assert not megafuse.check(plain(module), rows(24, 6), fused=wrong, options=QUICK).ok
    wrong[1].threshold = 20.0
    assert megafuse.check(plain(module), rows(24, 6), fused=wrong, options=QUICK).ok
