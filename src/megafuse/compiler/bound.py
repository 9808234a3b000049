"""Programs, and the bindings that let them serve calls of one exact form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megafuse.capture.types import Captured, OutSpec
from megafuse.capture.unify import Scalar
from megafuse.codegen.artifact import Artifact
from megafuse.compiler.driver import Compiled
from megafuse.core.sizes import settle
from megafuse.runtime.autograd import StepSpec, apply, record
from megafuse.runtime.direct import aligned
from megafuse.runtime.graphs import Budget, graphed
from megafuse.runtime.step import LoadedStep
from megafuse.runtime.tensors import TORCH_DTYPES

Original = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Program:
    """Generated code: for one size, or for all sizes of a class; ``scalars`` are numbers that depend on the size."""

    compiled: Compiled
    artifact: Artifact
    scalars: Sequence[Scalar] = ()


@dataclass(frozen=True)
class Bound:
    """One binding: the compiled values and the step that serves calls of this shape (None: the original runs).

    ``sizes`` are the values of open sizes. The step takes the call's first ``given`` tensors, then ``own`` ones, and is
    run by ``run(spec, *tensors)`` outside of torch.func's transforms.
    ``interpreted`` names the text of which the kernels run on the CPU, where they do.
    """

    compiled: Compiled | None
    spec: StepSpec | None
    reason: str = ""
    out: OutSpec | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    given: int = 0
    own: tuple[Tensor, ...] = ()
    interpreted: str = ""
    run: Callable[..., tuple[Tensor | None, ...]] = apply

    def inputs(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors that the step takes, from those of the call."""
        return [*tensors[: self.given], *self.own] if self.own else tensors


@dataclass(frozen=True)
class Place:
    """Where steps run: target, device, whether fresh memory is filled with NaN, and how many more get CUDA graphs.

    ``is_aligned``: all tensors of the calls that a step serves start at multiples of 16 bytes. ``grad``: they are made
    with grad mode on.
    """

    target: str
    device: torch.device
    poison: bool | None
    budget: Budget | None = None
    is_aligned: bool = False
    grad: bool = False


def bind(program: Program, sizes: Mapping[str, int], place: Place, original: Original) -> Bound:
    """The binding of ``program`` at given sizes. ``original``: the user's outputs from the call's tensors."""
    captured: Captured = program.compiled.captured
    calls = settle(captured.calls, sizes)

    def opaque(call: int, given: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
        call_args, call_kwargs = calls[call].bind(given, place.device)
        out = calls[call].target(*call_args, **call_kwargs)
        return out if isinstance(out, tuple | list) else (out,)

    fixed = any(leaf.kind == "const" and leaf.requires_grad for leaf in captured.leaves)  # beyond the original's reach
    given = sum(leaf.kind != "const" for leaf in captured.leaves)
    own = (*captured.constants, *(_tensor(s, sizes, place.device) for s in program.scalars))
    step = LoadedStep(
        program.artifact,
        place.target,
        place.device,
        opaque=opaque,
        poison=place.poison,
        sizes=sizes,
        is_aligned=place.is_aligned and aligned(own),
    )
    return Bound(
        program.compiled,
        StepSpec(
            step=step if place.budget is None else graphed(step, place.budget),
            num_inputs=len(captured.leaves),
            differentiable=captured.out_requires_grad,
            tangent_of=captured.tangent_of,
            grad_of=captured.graph.grad_of,
            mutations=captured.mutations,
            original=None if fixed else lambda *tensors: original(*tensors[:given]),
            repeatable=not any(call.random for call in calls),
        ),
        out=replace(captured.out_spec, leaves=settle(captured.out_spec.leaves, sizes)),
        sizes=sizes,
        given=given,
        own=own,
        run=record if place.grad and step.has_backward and not captured.mutations else apply,
        interpreted=next((k.backend for k in program.artifact.kernels if place.target == "interpret"), ""),
    )


def _tensor(scalar: Scalar, sizes: Mapping[str, int], device: torch.device) -> Tensor:
    return torch.full((), scalar.at(sizes), dtype=TORCH_DTYPES[scalar.dtype], device=device)
