"""Serving calls: which structure a call has, which binding serves it, and how a binding is made and run."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megafuse.capture.api import capture
from megafuse.capture.leaves import FlatCall, LeafGetter, flatten_call, module_state, without_tensors
from megafuse.capture.state import swapped_state
from megafuse.capture.types import Captured
from megafuse.compiler.driver import Compiled, compile_captured
from megafuse.core.device import device_spec
from megafuse.core.errors import InputError, TargetError
from megafuse.runtime.autograd import StepSpec, apply
from megafuse.runtime.binding import Binder, BindingKey
from megafuse.runtime.device import live_device_spec
from megafuse.runtime.step import LoadedStep

DEFAULT_ARCH = 90
TARGETS = ("auto", "cuda", "interpret")


class NotFusedWarning(UserWarning):
    """The original ops run; the text says why."""


@dataclass(frozen=True)
class Options:
    """How to fuse. ``target``: auto, cuda or interpret. ``backend``: triton or numpy (numpy only under interpret)."""

    target: str = "auto"
    backend: str | None = None
    strict: bool = False
    poison: bool | None = None

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise InputError(f"unknown target {self.target!r}", hint=f"use one of {', '.join(TARGETS)}")


@dataclass(frozen=True)
class Bound:
    """One binding: the compiled values and the step that serves calls of this shape (None: the original runs)."""

    compiled: Compiled | None
    spec: StepSpec | None
    reason: str = ""


class Engine:
    """Serves calls of one original callable: finds the binding, runs the step, puts the outputs together."""

    def __init__(self, original: Callable[..., Any], options: Options) -> None:
        self.original, self.options = original, options
        self._structures: dict[Any, _Structure] = {}
        self._recent: _Structure | None = None
        self._lock = threading.RLock()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call like the original's."""
        structure = self._recent
        if structure is not None and structure.still_fits():
            try:
                return structure.call(args, kwargs)
            except InputError:
                if flatten_call(self.original, args, kwargs).key == structure.key:
                    raise
        return self.structure(args, kwargs).call(args, kwargs)

    def structure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Structure:
        """The structure (argument tree, constants, modes) of a call, captured if it is new."""
        call = flatten_call(self.original, args, kwargs)
        with self._lock:
            if call.key not in self._structures:
                self._structures[call.key] = _Structure(self, call)
            self._recent = self._structures[call.key]
            return self._recent

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """The binding that serves a call."""
        return self.structure(args, kwargs).bound(args, kwargs)

    @property
    def bindings(self) -> list[Bound]:
        """All bindings made so far, oldest first."""
        return [b for s in self._structures.values() for b in s.made]


class _Structure:
    """Calls that differ in their tensors alone."""

    def __init__(self, engine: Engine, call: FlatCall) -> None:
        self.engine, self.flat, self.key = engine, without_tensors(call), call.key
        self.made: list[Bound] = []
        self.states = [(m, module_state(m)) for top in call.modules for m in top.modules()]
        self.getter: LeafGetter | None = None
        self._captured: Captured | None = None  # of the first call, until it is bound
        self._binder: Binder[Bound] = Binder(self._compile)
        self._pending = threading.local()

    def still_fits(self) -> bool:
        """No module changed its mode, attributes, submodules or hooks since this structure was captured."""
        return all(module_state(m) == state for m, state in self.states)

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        return self._find(args, kwargs)[0]

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Bound, list[Tensor]]:
        if self.getter is None:
            self._captured = self.capture(args, kwargs)
            captured = self._captured
            self.getter = LeafGetter(self.engine.original, self.flat, captured.leaves, captured.constants)
        tensors = self.getter(args, kwargs)
        self._pending.call = (args, kwargs)
        try:
            return self._binder.find(tensors), tensors
        finally:
            self._pending.call = None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound, tensors = self._find(args, kwargs)
        if bound.spec is None or bound.compiled is None:
            return self.engine.original(*args, **kwargs)
        return bound.compiled.captured.out_spec.build(apply(bound.spec, *tensors))

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """Capture a call of this structure."""
        inference = torch.is_inference_mode_enabled()
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False) if inference else contextlib.nullcontext(), torch.set_grad_enabled(grad):
            return capture(self.engine.original, args, kwargs, strict=self.engine.options.strict)

    def take_captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """The capture of this call: the structure's first one, once, then a new one."""
        captured, self._captured = self._captured, None
        return captured or self.capture(args, kwargs)

    def run_original(self, *tensors: Tensor) -> list[Tensor]:
        """The user's output tensors from other input tensors, through the original ops."""
        assert self.getter is not None
        args, kwargs, swaps = self.getter.put_back(tensors)
        with swapped_state(self.flat.modules, swaps):
            out = self.engine.original(*args, **kwargs)
        return [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]

    def _compile(self, key: BindingKey, tensors: Sequence[Tensor]) -> Bound:
        args, kwargs = self._pending.call
        try:
            bound = _bind(self, key, args, kwargs, tensors)
        finally:
            self._captured = None  # it belongs to the first call alone
        self.made.append(bound)
        return bound


def _bind(
    structure: _Structure, key: BindingKey, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
) -> Bound:
    options = structure.engine.options
    target = resolve_target(options.target, key.device)
    if target == "original":
        reason = "the tensors are on the CPU; the original ops run (target='interpret' executes the generated code)"
        warnings.warn(reason, NotFusedWarning, stacklevel=6)
        return Bound(None, None, reason)
    if any(0 in t.shape for t in tensors):
        return Bound(None, None, "a tensor of the call is empty; the original ops run")
    spec = live_device_spec(key.device) if target == "cuda" else device_spec(DEFAULT_ARCH)
    captured = structure.take_captured(args, kwargs)
    if any(0 in n.shape for n in captured.graph.nodes):
        return Bound(None, None, "a value of the call is empty; the original ops run")
    compiled = compile_captured(captured, spec)
    backend = options.backend or ("triton" if target == "cuda" else "numpy")
    calls = compiled.captured.calls

    def opaque(call: int, given: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
        call_args, call_kwargs = calls[call].bind(given, key.device)
        out = calls[call].target(*call_args, **call_kwargs)
        return out if isinstance(out, tuple | list) else (out,)

    step = LoadedStep(compiled.artifact(backend), target, key.device, opaque=opaque, poison=options.poison)
    return Bound(
        compiled,
        StepSpec(
            step=step,
            num_inputs=len(captured.leaves),
            differentiable=captured.out_requires_grad,
            tangent_of=captured.tangent_of,
            grad_of=captured.graph.grad_of,
            mutations=captured.mutations,
            original=structure.run_original,
            repeatable=not any(call.random for call in calls),
        ),
    )


def resolve_target(target: str, device: torch.device) -> str:
    """``cuda``, ``interpret`` or ``original`` (run what the user gave).

    Raises:
        TargetError: a GPU is asked for and there is none, or the tensors are elsewhere.
    """
    if target == "interpret":
        if device.type != "cpu":
            raise TargetError(
                f"target='interpret' runs on CPU tensors, these are on {device}", hint="move them with .cpu()"
            )
        return "interpret"
    if device.type == "cuda":
        return "cuda"
    if target == "cuda":
        have = "this PyTorch sees no GPU" if not torch.cuda.is_available() else f"the tensors are on {device}"
        raise TargetError(
            f"target='cuda' asked for, but {have}",
            hint="move module and inputs with .cuda(), or use target='interpret'",
        )
    return "original"
