"""A captured step as one node of PyTorch's autograd graph.

* **Saved tensors** all go through ``save_for_backward``: an in-place change of one before backward raises as in eager
  mode, and saved-tensor hooks (activation checkpointing, offloading) see them. What a hook gives back in another layout
  is brought back to the one that the kernels rely on.
* **Early death**: unless the graph is kept (``retain_graph=True``), the node drops its saved tensors when backward
  starts, and launch code frees each after its last use. Where the graph is kept, saved tensors that backward would
  write over are copied first.
* **Gradients** are returned with no second reference, so that ``AccumulateGrad`` takes them over instead of cloning.
* **Double backward**: with grad mode on inside backward (``create_graph=True``) the original callable runs again under
  autograd, and its gradients, differentiable once more, are returned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from megafuse.core.errors import LaunchError
from megafuse.core.warn import warn_user
from megafuse.runtime.graphs import GraphedStep, Saved
from megafuse.runtime.step import LoadedStep
from megafuse.runtime.tensors import restore

PARTLY_UNDEFINED = (
    "a fused step got gradients for some of its outputs only: the original ops run in this backward. Fuse a callable "
    "that returns just the outputs in use to have it fused."
)
Original = Callable[..., Sequence[Tensor | None]]
_keep_graph: Callable[[], bool] | None = getattr(
    getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None
)
_transforms: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_grad, _strides = torch.is_grad_enabled, Tensor.stride
_clears = hasattr(torch._C._FunctionBase, "maybe_clear_saved_tensors")


@dataclass(frozen=True)
class StepSpec:
    """How a loaded step meets autograd.

    ``tangent_of[j]``: the forward output whose cotangent the j-th tangent is. ``grad_of[j]``: the input to which the
    j-th gradient belongs. ``differentiable[i]``: the user's output i requires grad. ``num_inputs``: tensors given to
    the step. ``mutations``: (input, output) pairs; the output, a forward output behind the user's own, is the input's
    new value. ``original(*inputs)`` returns the user's outputs under autograd, for double backward only.
    ``keep_inputs`` holds on to all inputs for that; otherwise inputs that the step does not save are found again only
    if somebody else keeps them alive. ``repeatable``: the original may run again (it draws no random numbers).

    What follows from these: ``unsaved`` are the inputs that the step does not save. ``plain_outputs``: some outputs are
    not differentiable. ``all_grads``: the gradients are those of all inputs, in order. ``apart`` are the tangents whose
    gradients the original can tell apart, where only some are given. ``remembers``: calls may leave more on their nodes
    than saved tensors.
    """

    step: LoadedStep | GraphedStep
    num_inputs: int
    differentiable: tuple[bool, ...]
    tangent_of: tuple[int, ...] = ()
    grad_of: tuple[int, ...] = ()
    mutations: tuple[tuple[int, int], ...] = ()
    original: Original | None = None
    keep_inputs: bool = False
    repeatable: bool = True
    unsaved: tuple[int, ...] = field(init=False)
    plain_outputs: bool = field(init=False)
    all_grads: bool = field(init=False)
    apart: tuple[int, ...] = field(init=False)
    remembers: bool = field(init=False)

    def __post_init__(self) -> None:
        unsaved = tuple(i for i in range(self.num_inputs) if i not in self.step.saved_inputs)
        object.__setattr__(self, "unsaved", unsaved)
        object.__setattr__(self, "plain_outputs", bool(self.mutations) or not all(self.differentiable))
        object.__setattr__(self, "all_grads", self.grad_of == tuple(range(self.num_inputs)))
        again = self.step.returned_again  # autograd hands the gradient of a tensor returned twice to the later alone
        own = tuple(j for j, i in enumerate(self.tangent_of) if i not in again)
        object.__setattr__(self, "apart", own if self.original is not None and self.repeatable else ())
        remembers = isinstance(self.step, GraphedStep) or (self.original is not None and bool(unsaved))
        object.__setattr__(self, "remembers", remembers)


@dataclass
class _Aside:
    """What a call leaves on its node beside saved tensors, where that is anything.

    ``others`` finds the inputs that are not saved again, for double backward, and ``versions`` says how often each was
    changed; ``autocast`` makes the context of the call; ``ticket`` is that of a replayed graph.
    """

    others: Sequence[Any] = ()
    versions: Sequence[int] = ()
    autocast: Callable[[], AbstractContextManager[Any]] = torch._C._DisableAutocast
    ticket: Any = None


def apply(spec: StepSpec, *tensors: Tensor) -> tuple[Tensor | None, ...]:
    """Run a step on its inputs, recorded by autograd where grad mode is on and the step has a backward.

    Returns the user's forward outputs, then nothing: new values of mutated inputs are written to those inputs.
    """
    if not (spec.step.has_backward and _grad()):
        outputs = _infer(spec, tensors)
    elif _transforms():
        outputs = _FusedStep.apply(spec, *tensors)
    else:
        outputs = record(spec, *tensors)
    return _mutate(spec, tensors, outputs) if spec.mutations else outputs


def _infer(spec: StepSpec, tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Forward alone; what it saved is dropped at once."""
    if _grad():
        with torch.no_grad():
            return tuple(_plainly(spec.step.forward, list(tensors))[0])
    if _any_autocast():
        return tuple(_plainly(spec.step.forward, list(tensors))[0])
    return tuple(spec.step.forward(list(tensors))[0])


def _plainly(fn: Callable[..., Any], *lists: Any) -> Any:
    """Run launch code with autocast off: its casts are in the step already."""
    if not _any_autocast():
        return fn(*lists)
    with torch._C._DisableAutocast():
        return fn(*lists)


def _mutate(spec: StepSpec, tensors: Sequence[Tensor], outputs: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    with torch.no_grad():
        for position, output in spec.mutations:
            tensors[position].copy_(outputs[output])
    return outputs[: len(outputs) - len(spec.mutations)]


def share_memory(mutations: Sequence[tuple[int, int]], tensors: Sequence[Tensor]) -> bool:
    """True where an input that a step changes lies in the memory of another one."""
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    return any(storages[position] and storages.count(storages[position]) > 1 for position, _ in mutations)


class _FusedStep(torch.autograd.Function):
    """The node. ``ctx.call`` is the spec, with an ``_Aside`` or None."""

    @staticmethod
    def forward(ctx: Any, spec: StepSpec, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        if autocast := _any_autocast():
            outputs, saved = _plainly(spec.step.forward, list(tensors))
        else:
            outputs, saved = spec.step.forward(list(tensors))
        ctx.call = spec, _aside(spec, tensors, saved) if autocast or spec.remembers else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if spec.plain_outputs:
            plain = [o for o, wanted in zip_longest(outputs, spec.differentiable) if o is not None and not wanted]
            ctx.mark_non_differentiable(*plain)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if _grad():
            return None, *_differentiable_gradients(ctx, tangents)
        spec, aside = ctx.call
        wanted = [tangents[i] for i in spec.tangent_of]
        if len(spec.apart) > 1 and _partly_undefined(ctx, wanted):
            return None, *_differentiable_gradients(ctx, tangents, create_graph=False)
        saved = _take_saved(ctx, spec.step)
        if aside is not None:
            saved = Saved(saved)
            saved.ticket = aside.ticket
            if not _kept():
                aside.ticket = None
        grads = _plainly(spec.step.backward, saved, wanted) if _any_autocast() else spec.step.backward(saved, wanted)
        return (None, *grads) if spec.all_grads else (None, *_by_input(spec, grads))


# ``apply`` where it is known that autograd records, no transform of torch.func is active and no input is changed; it is
# PyTorch's own, past its look at every argument for torch.func.
record: Callable[..., tuple[Tensor | None, ...]] = super(torch.autograd.Function, _FusedStep).apply


def _aside(spec: StepSpec, tensors: Sequence[Tensor], saved: Any) -> _Aside:
    ticket = getattr(saved, "ticket", None)
    if spec.original is None:
        return _Aside(ticket=ticket)
    others = [tensors[i] for i in spec.unsaved]
    found = others if spec.keep_inputs else [weakref.ref(t) for t in others]
    return _Aside(found, [_version(t) for t in others], _autocast_state(spec.step.device.type), ticket)


def _partly_undefined(ctx: Any, tangents: list[Tensor | None]) -> bool:
    """Some outputs, but not all, take part in this backward, and the original callable can tell their gradients apart.

    The step's backward would take zeros for the others, and 0 * inf is NaN where eager computes nothing. Where the
    original cannot run again (random ops, inputs that are gone) zeros it is.
    """
    own = [tangents[j] for j in ctx.call[0].apart]
    if not 0 < sum(t is None for t in own) < len(own):
        return False
    try:
        _all_inputs(ctx)
    except LaunchError:
        return False
    warn_user(PARTLY_UNDEFINED, UserWarning)
    return True


def _by_input(spec: StepSpec, grads: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients in the order of the step's inputs; the list is emptied."""
    by_input: list[Tensor | None] = [None] * spec.num_inputs
    for position in reversed(range(len(grads))):
        by_input[spec.grad_of[position]] = grads.pop()
    return by_input


def _kept() -> bool:
    """The graph of the running backward is kept, or may be."""
    return _keep_graph is None or _keep_graph()


def _take_saved(ctx: Any, step: LoadedStep | GraphedStep) -> list[Tensor | None]:
    """The saved tensors. Unless the graph is kept, the node forgets them; where it is, those at risk are copied."""
    saved, strides = [*ctx.saved_tensors], step.saved_strides
    if strides and [*map(_strides, saved)] != strides:
        saved = [restore(t, s) for t, s in zip(saved, strides, strict=True)]
    if step.overwritten and _kept():
        for position in step.overwritten:
            saved[position] = saved[position].clone()
    if _clears:
        ctx.maybe_clear_saved_tensors()  # PyTorch asks itself whether the graph is kept
    return saved


def _differentiable_gradients(
    ctx: Any, tangents: tuple[Tensor | None, ...], *, create_graph: bool = True
) -> list[Tensor | None]:
    """Gradients by every input through the original callable, themselves differentiable if ``create_graph``.

    Each input enters as an alias of its own, so that an input which is computed from another one does not count
    twice.
    """
    spec, aside = ctx.call
    if spec.original is None:
        raise LaunchError(
            "this fused step cannot be differentiated twice: it takes gradients of tensors inside of other objects",
            hint="pass those tensors as arguments, or use the unfused module where create_graph=True is needed",
        )
    inputs = _all_inputs(ctx)
    with torch.enable_grad(), (aside or _Aside()).autocast():
        aliases = [t.view_as(t) if t.requires_grad else t for t in inputs]
        for position, _ in spec.mutations:
            aliases[position] = inputs[position].detach().clone()  # the second run must not change it again
        outputs = spec.original(*aliases)
        pairs = zip(outputs, tangents, strict=False)
        roots = [(o, g) for o, g in pairs if o is not None and g is not None and o.requires_grad]
        wanted = [i for i, t in enumerate(aliases) if t.requires_grad]
        grads: list[Tensor | None] = [None] * spec.num_inputs
        if not roots or not wanted:
            return grads
        found = torch.autograd.grad(
            [o for o, _ in roots],
            [aliases[i] for i in wanted],
            [g for _, g in roots],
            create_graph=create_graph,
            allow_unused=True,
        )
    for position, grad in zip(wanted, found, strict=True):
        grads[position] = grad
    return grads


def _all_inputs(ctx: Any) -> list[Tensor]:
    """The step's inputs as given, each connected to its own history."""
    spec, aside = ctx.call
    saved = ctx.saved_tensors
    inputs: list[Any] = [None] * spec.num_inputs
    mutated = [position for position, _ in spec.mutations]
    for place, position in enumerate(spec.step.saved_inputs):
        if position >= 0:
            inputs[position] = saved[place]
    given = aside or _Aside()
    for position, held, version in zip(spec.unsaved, given.others, given.versions, strict=True):
        tensor = held() if isinstance(held, weakref.ref) else held
        changed = tensor is not None and _version(tensor) != version and position not in mutated
        if tensor is None or changed:
            state = "no longer exists" if tensor is None else "was changed in place"
            raise LaunchError(
                f"double backward needs input {position} of the fused step, which {state}",
                hint="fuse with double_backward=True, which keeps all inputs, and do not change them before backward",
            )
        inputs[position] = tensor
    return inputs


def _version(tensor: Tensor) -> int:
    """How often ``tensor`` was changed in place; inference tensors do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _autocast_state(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """A maker of the autocast context in force now, which backward may run without, or under another."""
    if not _any_autocast() or not torch.is_autocast_enabled(device_type):
        return torch._C._DisableAutocast
    dtype = torch.get_autocast_dtype(device_type)
    cache = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device_type, dtype=dtype, cache_enabled=cache)
