"""Where each value came from: the user's line, and the module's path where that says more or stands alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafuse
from megafuse.capture.api import capture
from megafuse.core.errors import CaptureError

X = torch.randn(3, 8)
THIS = "test_capture_origins.py"


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x) + self.net(x)  # inner


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sin()  # outer


def scaled(x: Tensor) -> Tensor:
    return x.tanh() * 0.5  # helper


def apply(x: Tensor, net: nn.Module) -> Tensor:
    return net(x).cos()  # apply


def origins(fn: Callable[..., Any], *args: Any) -> set[str]:
    """Each origin as text, lines given by the comments at their ends."""
    found = {n.origin for n in capture(fn, args).graph.nodes if n.origin is not None}
    assert {o.file for o in found} <= {THIS, ""}
    return {str(o).replace(f"{THIS}:{o.line}", o.code.rpartition("# ")[2]) for o in found}


def test_without_a_line_of_the_users_the_module_is_named() -> None:
    weight_norm = nn.utils.parametrizations.weight_norm
    made = nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Sequential(nn.GELU(), nn.LayerNorm(8)))
    assert origins(made, X) == {
        "module 0 (ParametrizedLinear)",
        "module 0.parametrizations.weight.0 (_WeightNorm)",
        "module 1.0 (GELU)",
        "module 1.1 (LayerNorm)",
    }


def test_the_line_is_told_with_the_module_it_ran_in() -> None:
    assert origins(Outer(), X) == {
        *(f"helper in blocks.{n} (Inner)" for n in (0, 1)),
        *(f"inner in blocks.{n} (Inner)" for n in (0, 1)),
        *(f"inner in blocks.{n}.net.0 (Linear)" for n in (0, 1)),
        *(f"inner in blocks.{n}.net.1 (GELU)" for n in (0, 1)),
        "outer",
    }


def test_modules_among_the_arguments_have_the_arguments_name() -> None:
    assert origins(apply, X, nn.GELU()) == {"apply in net (GELU)", "apply"}
    assert origins(apply, X, nn.Sequential(nn.GELU())) == {"apply in net.0 (GELU)", "apply"}


def test_a_module_of_pytorchs_by_itself_is_named_by_its_class() -> None:
    assert origins(nn.LayerNorm(8), X) == {"module LayerNorm"}


def test_an_error_inside_of_pytorchs_modules_names_the_module() -> None:
    with pytest.raises(CaptureError, match=r"\n  at module 1 \(Linear\)"):
        megafuse.fuse(nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 4)), X, target="interpret")
    with pytest.raises(CaptureError, match=rf"\n  at {THIS}:\d+ in blocks.0.net.0 \(Linear\)  return scaled"):
        megafuse.fuse(Outer(), torch.randn(3, 5), target="interpret")


def test_generated_code_and_explain_say_the_same() -> None:
    fused = megafuse.fuse(Outer(), X, target="interpret", chains=False)
    line = next(n for n, text in enumerate(inspect.getsource(Inner).splitlines()) if "# inner" in text)
    place = f"{THIS}:{inspect.getsourcelines(Inner)[1] + line} in blocks.1.net.1 (GELU)"
    (bound,) = fused.__megafuse__.bindings
    assert any(f"# src[{place}]: return" in kernel.text for kernel in bound.compiled.artifact("triton").kernels)
    assert f"computes {place}: return" in str(megafuse.explain(fused))
