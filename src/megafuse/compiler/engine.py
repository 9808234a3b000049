"""Serving calls: which structure a call has, which binding serves it, and how a binding is made and run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megafuse.capture.api import capture
from megafuse.capture.checks import check_tensors
from megafuse.capture.leaves import FlatCall, LeafGetter, flatten_call, without_tensors
from megafuse.capture.modes import Substituted
from megafuse.capture.open_call import Layout
from megafuse.capture.scope import ScopeWatch
from megafuse.capture.state import TRACING, swapped_state
from megafuse.capture.types import Captured
from megafuse.capture.unify import Scalar
from megafuse.compiler.bound import Bound, Place, Program, bind
from megafuse.compiler.driver import Compiled, compile_captured
from megafuse.compiler.plans import Tuner, complete, find_known
from megafuse.compiler.proof import first_sound
from megafuse.compiler.sharing import Sharing, stand_ins
from megafuse.compiler.situation import reason_for_original
from megafuse.compiler.watch import ModuleWatch
from megafuse.core.device import DeviceSpec, device_spec
from megafuse.core.errors import InputError, LaunchError, NotFusableError, TargetError, UnsupportedError
from megafuse.core.warn import warn_user
from megafuse.fusion.epilogue import DotRule
from megafuse.runtime.autograd import share_memory
from megafuse.runtime.binding import Binder, BindingKey
from megafuse.runtime.device import live_device_spec
from megafuse.runtime.graphs import Budget
from megafuse.runtime.shim import DESCRIPTORS_SINCE, triton_version

DEFAULT_ARCH = 90
MOST_UNFIT = 4  # structures in a row that could not be captured: then the original serves all calls
DOTS = ("library", "auto")
TARGETS = ("auto", "cuda", "interpret")


class NotFusedWarning(UserWarning):
    """The original ops run; the text says why."""


@dataclass(frozen=True)
class Options:
    """How to fuse. ``target``: auto, cuda or interpret. ``backend``: triton or numpy (numpy only under interpret).

    ``max_specializations``: how many programs may be made for calls that differ in their sizes alone and share none.
    ``dots``: "library" (matrix products are library calls) or "auto" (generated ones, which take in what follows, where
    these are predicted to win).
    ``chains``: several products of the same rows run in one kernel, with what is between them, where that wins.
    ``memory_budget``: bytes that a step may have allocated at a time; saved values are computed again to keep to it.
    ``tune``: measure tiles that are not known; None: take those that are; False: the heuristic's. ``plan``: a file.
    ``cuda_graph``: steps are replayed as CUDA graphs where they can be recorded.
    """

    target: str = "auto"
    backend: str | None = None
    strict: bool = False
    poison: bool | None = None
    max_specializations: int = 8
    dots: str = "library"
    chains: bool = True
    memory_budget: int | None = None
    tune: bool | None = None
    plan: str | None = None
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if type(value) not in kinds:
                allowed = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise InputError(f"{name}={value!r} is of type {type(value).__name__}", hint=f"{name} takes {allowed}")
        if self.plan is not None and self.tune:
            raise InputError("tune=True and a plan are given", hint="a plan's tiles are taken as is: leave one out")
        if self.target not in TARGETS:
            raise InputError(f"unknown target {self.target!r}", hint=f"use one of {', '.join(TARGETS)}")
        dot_rule(self.dots)
        if self.memory_budget is not None and self.memory_budget < 0:
            raise InputError(f"memory_budget={self.memory_budget}", hint="give bytes, 0 or more")
        if self.max_specializations < 1:
            raise InputError(f"max_specializations={self.max_specializations}", hint="give 1 or more")


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("strict", "chains", "cuda_graph"), (bool,)),
    "tune": (bool, type(None)),
    "memory_budget": (int, type(None)),
    "max_specializations": (int,),
    **dict.fromkeys(("target", "dots"), (str,)),
    "plan": (str, type(None)),
}


def dot_rule(dots: str, tf32: bool = False, chains: bool = True) -> DotRule:
    """How dots are run, from the options; ``tf32``: fp32 products may round their operands.

    Raises:
        InputError: no such way.
    """
    if dots not in DOTS:
        raise InputError(f"unknown way to run dots: {dots!r}", hint=f"use one of {', '.join(DOTS)}")
    return DotRule(dots == "auto", tf32, chains)


def available(rule: DotRule, backend: str) -> DotRule:
    """``rule`` without generated products where Triton has no tensor descriptors: building takes minutes."""
    if backend != "triton" or not rule.fuse or triton_version() >= DESCRIPTORS_SINCE:
        return rule
    since = ".".join(map(str, DESCRIPTORS_SINCE))
    warn_user(f"dots='auto' needs Triton {since} or newer: the library multiplies", NotFusedWarning)
    return replace(rule, fuse=False)


class Engine:
    """Serves calls of one original callable: finds the binding, runs the step, puts the outputs together.

    ``generations`` counts how often code was generated. ``tuner`` measures tiles where the options ask for that.
    """

    def __init__(self, original: Callable[..., Any], options: Options, tuner: Tuner | None = None) -> None:
        self.original, self.options, self.tuner = original, options, tuner
        self.generations = 0
        self.budget = Budget() if options.cuda_graph else None
        self._structures: dict[Any, _Structure] = {}
        self._recent: _Structure | None = None
        self._lock = threading.RLock()
        self.unfit: list[str] = []

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call like the original's."""
        reason = reason_for_original()
        if reason is not None:
            if reason:
                warn_user(reason, NotFusedWarning)
            return self.original(*args, **kwargs)
        if len(self.unfit) >= MOST_UNFIT:
            return self.original(*args, **kwargs)
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
            if not (found := self._structures.get(call.key)) or found.watch.moved():
                found = self._structures[call.key] = _Structure(self, call)
            self._recent = found
            return found

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """The binding that serves a call."""
        return self.structure(args, kwargs).bound(args, kwargs)

    def note_unfit(self, reason: str) -> None:
        """Remember why calls could not be captured, and say so once."""
        if reason not in self.unfit:
            warn_user(reason, NotFusedWarning)
        self.unfit.append(reason)

    @property
    def bindings(self) -> list[Bound]:
        """The first binding of each program made so far, and of each reason for running the original; oldest first."""
        return [b for s in self._structures.values() for b in s.made]

    def sizes_served(self, bound: Bound) -> list[Mapping[str, int]]:
        """The open sizes for which the program of ``bound`` was bound, oldest first; empty where it has none."""
        kept = [b for s in self._structures.values() for b in s.kept() if b.compiled is bound.compiled and b.sizes]
        return [dict(pairs) for pairs in dict.fromkeys(tuple(b.sizes.items()) for b in kept)]


class _Structure:
    """Calls that differ in their tensors alone."""

    def __init__(self, engine: Engine, call: FlatCall) -> None:
        self.engine, self.flat, self.key = engine, without_tensors(call), call.key
        self.made: list[Bound] = []
        self.watch = ModuleWatch(m for top in call.modules for m in top.modules())
        self.scope = ScopeWatch(call.scope.places)
        self.getter: LeafGetter | None = None
        self.labels: tuple[str, ...] = ()  # of the getter's tensors
        self.sharing = Sharing()
        self.unfit: Bound | None = None  # why the original serves these calls
        self._binder: Binder[Bound] = Binder(self._compile)
        self.over_limit = False
        self._pending = threading.local()  # the capture of the call that this thread binds

    def still_fits(self) -> bool:
        """No module changed its mode, attributes, submodules or hooks, and no closure or global changed, since then."""
        same = self.watch.unchanged() and self.scope.unchanged()
        return same and torch.get_default_dtype() is self.key[-1]

    def kept(self) -> list[Bound]:
        return self._binder.kept()

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        return self._find(args, kwargs)[0]

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Bound, list[Tensor]]:
        if self.getter is None and self.unfit is None:
            self._capture_first(args, kwargs)
        if self.getter is None or self.unfit is not None:
            assert self.unfit is not None
            return self.unfit, []
        tensors = self.getter(args, kwargs)
        try:
            return self._binder.find(tensors, (), args, kwargs), tensors
        except LaunchError as error:
            if any(t is None for t in tensors):  # a parameter that was a tensor at capture
                raise InputError("a parameter or buffer is None now", hint="fuse again") from error
            check_tensors([*zip(self.labels, tensors, strict=True)])  # names the one that does not fit
            raise

    def _capture_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Learn where the tensors of these calls are, or that the original has to serve them."""
        with TRACING:
            if self.getter is not None or self.unfit is not None:
                return
            try:
                captured = self.capture(args, kwargs)
            except NotFusableError as error:
                self.unfit = self._original_for(error)
                self.made.append(self.unfit)
                return
            self.engine.unfit.clear()
            self._pending.captured = captured
            self.labels = tuple(leaf.label for leaf in captured.leaves)
            self.getter = LeafGetter(self.engine.original, self.flat, captured.leaves, captured.constants)

    def _original_for(self, error: NotFusableError) -> Bound:
        if self.engine.options.strict:
            raise error
        reason = f"{error.what}{f' at {error.where}' if error.where else ''}; the original ops run"
        self.engine.note_unfit(reason)
        return Bound(None, None, reason)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound, tensors = self._find(args, kwargs)
        if bound.spec is None or bound.out is None:
            return self.engine.original(*args, **kwargs)
        if bound.spec.mutations and share_memory(bound.spec.mutations, tensors):
            return self.engine.original(*args, **kwargs)  # what it changes is seen through another input
        inputs = bound.inputs(tensors) if bound.own else tensors
        return bound.out.build(bound.run(bound.spec, *inputs))

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None = None) -> Captured:
        """Capture a call of this structure; with stand-ins among the arguments, ``device`` is that of the real ones."""
        inference = torch.is_inference_mode_enabled()
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False) if inference else contextlib.nullcontext(), torch.set_grad_enabled(grad):
            return capture(self.engine.original, args, kwargs, strict=self.engine.options.strict, device=device)

    def take_captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """The capture of this call: the structure's first one, once, then a new one."""
        captured, self._pending.captured = getattr(self._pending, "captured", None), None
        return captured or self.capture(args, kwargs)

    def shared(
        self,
        key: BindingKey,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        spec: DeviceSpec,
        make: Callable[[Captured, Sequence[Scalar]], Program],
    ) -> tuple[Program, Mapping[str, int]] | None:
        """The program, and the sizes at which it serves this call, if sizes share one."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        places = self.flat.tensors

        def capture_with(layouts: Sequence[Layout]) -> Captured:
            new = list(leaves)
            given = [leaves[at] for at in places]
            for at, tensor in zip(places, stand_ins(given, layouts[: len(places)]), strict=True):
                new[at] = tensor
            new_args, new_kwargs = pytree.tree_unflatten(new, tree)
            return self.capture(new_args, new_kwargs, key.device)

        return self.sharing.find(key, len(places), spec, capture_with, make)

    def run_original(self, *tensors: Tensor) -> list[Tensor]:
        """The user's output tensors from other input tensors, through the original ops."""
        assert self.getter is not None
        args, kwargs, swaps = self.getter.put_back(tensors)
        with swapped_state(self.flat.modules, swaps), Substituted(swaps):
            out = self.engine.original(*args, **kwargs)
        return [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]

    def _compile(
        self, key: BindingKey, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Bound:
        try:
            with TRACING:
                bound = _bind(self, key, args, kwargs, tensors)
        except NotFusableError as error:
            bound = self._original_for(error)
        finally:
            self._pending.captured = None  # it belongs to the first call alone
        if all((b.compiled, b.reason) != (bound.compiled, bound.reason) for b in self.made):
            self.made.append(bound)
        return bound


def _bind(
    structure: _Structure, key: BindingKey, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
) -> Bound:
    options, getter = structure.engine.options, structure.getter
    assert getter is not None
    target = resolve_target(options.target, key.device)
    if target == "original":
        reason = "the tensors are on the CPU; the original ops run (target='interpret' executes the generated code)"
        warn_user(reason, NotFusedWarning)
        return Bound(None, None, reason)
    if any(0 in t.shape for t in tensors):
        return Bound(None, None, "a tensor of the call is empty; the original ops run")
    spec = live_device_spec(key.device) if target == "cuda" else device_spec(DEFAULT_ARCH)
    backend = options.backend or ("triton" if target == "cuda" else "numpy")
    is_aligned = all(t.aligned for t in key.tensors)
    place = Place(target, key.device, options.poison, structure.engine.budget, is_aligned, key.flags.grad)

    def make(captured: Captured, scalars: Sequence[Scalar] = ()) -> Program:
        getter.check_same_places(captured.leaves)
        known = find_known(spec, target, tune=options.tune, plan=options.plan)
        rule = available(dot_rule(options.dots, key.flags.tf32, options.chains), backend)

        def compile_(spec: DeviceSpec, rule: DotRule) -> Compiled:
            return compile_captured(captured, spec, known=known, dots=rule, memory_budget=options.memory_budget)

        compiled = first_sound(compile_, spec, rule, key.device) if target == "cuda" else compile_(spec, rule)
        compiled = complete(compiled, known, structure.engine.tuner, key.device)
        program = Program(compiled, compiled.artifact(backend, interpreted=target == "interpret"), scalars)
        structure.engine.generations += 1
        return program

    shared = structure.shared(key, args, kwargs, tensors, spec, make)
    if shared is not None:
        return bind(*shared, place, structure.run_original)
    over = structure.sharing.over_limit(key, options.max_specializations, structure.labels)
    if over is not None:
        if options.strict:
            raise UnsupportedError(over)
        if not structure.over_limit:  # once: each size would say it in other words
            warn_user(over, NotFusedWarning)
        structure.over_limit = True
        return Bound(None, None, over)
    captured = structure.take_captured(args, kwargs)
    if captured.empty:
        return _without_kernels(options, f"{captured.empty} is empty; the original ops run")
    bound = bind(make(captured), {}, place, structure.run_original)
    structure.sharing.specialise(key)
    return bound


def _without_kernels(options: Options, reason: str) -> Bound:
    """The original serves the call, and says why.

    Raises:
        UnsupportedError: ``strict``.
    """
    if options.strict:
        raise UnsupportedError(reason)
    warn_user(reason, NotFusedWarning)
    return Bound(None, None, reason)


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
