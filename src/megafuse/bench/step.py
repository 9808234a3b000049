"""The measured call: one forward and backward pass of any callable on fixed arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Step = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Case:
    """A module with its example call and upstream gradients: what every rival runs.

    ``cotangents``: one for each output tensor that requires grad, in order; none: the step is a forward pass.
    ``facts`` describe the case in records (shape, dtype, seed, ...). ``samples``: batch size, for samples/s. ``source``
    is what ``cases.make_case`` takes to make the same case in another process. ``dots``: how megafuse runs products,
    see ``megafuse.fuse``.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    cotangents: tuple[Tensor, ...]
    samples: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    dots: str = "library"

    def inputs(self) -> list[Tensor]:
        """Argument tensors that require grad."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]

    def grad_mode(self) -> AbstractContextManager[Any]:
        """The mode in which the case's calls are made: without gradients if it is a forward pass alone."""
        return nullcontext() if self.cotangents else torch.no_grad()

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        for tensor in self.inputs():
            tensor.grad = None
        self.module.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """Gradients that are set, of inputs and parameters."""
        holders = {id(t): t for t in (*self.inputs(), *self.module.parameters())}
        return [t.grad for t in holders.values() if t.grad is not None]


def differentiable(out: Any) -> list[Tensor]:
    """Output tensors that require grad, in order."""
    return [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]


def make_step(case: Case, fn: Callable[..., Any]) -> Step:
    """The step of ``fn``: clear ``inputs.grad``, ``zero_grad(set_to_none=True)``, forward, ``out.backward(grad)``.

    Without upstream gradients: the forward pass, under ``no_grad``.

    All rivals clear through the case's own module, so that they do the same work outside their forward and backward.
    """
    inputs, zero_grad = case.inputs(), case.module.zero_grad
    args, kwargs, cotangents = case.args, dict(case.kwargs), case.cotangents

    def forward() -> Any:
        with torch.no_grad():
            return fn(*args, **kwargs)

    def step() -> Any:
        for tensor in inputs:
            tensor.grad = None
        zero_grad(set_to_none=True)
        out = fn(*args, **kwargs)
        if isinstance(out, Tensor):
            out.backward(cotangents[0])  # type: ignore[no-untyped-call]
        else:
            torch.autograd.backward(differentiable(out), cotangents)
        return out

    return step if cotangents else forward


def draw_cotangents(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int
) -> tuple[Tensor, ...]:
    """Normal upstream gradients, shaped like the module's outputs on these arguments."""
    found = []
    for out in differentiable(module(*args, **kwargs)):
        rng = torch.Generator(device=out.device).manual_seed(seed)
        found.append(torch.randn(out.shape, generator=rng, device=out.device, dtype=torch.float32).to(out.dtype))
    return tuple(found)
