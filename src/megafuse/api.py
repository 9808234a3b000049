"""The public calls: ``fuse`` and ``check`` (and what ``fuse`` returns)."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megafuse.compiler import Engine, NotFusedWarning, Options
from megafuse.core.errors import InputError, stage_of, trimmed
from megafuse.core.keywords import options_of, require_arguments, require_known
from megafuse.tune import tuner
from megafuse.validate import CHECK_OPTIONS, CheckReport
from megafuse.validate import check as _check

__all__ = ["FUSE_OPTIONS", "FusedFunction", "NotFusedWarning", "check", "engine_of", "fuse"]


class FusedFunction:
    """A function served by generated kernels; call it like the original."""

    def __init__(self, engine: Engine) -> None:
        self.__megafuse__ = engine
        functools.update_wrapper(self, engine.original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the fused step; other structures and shapes compile on their first call."""
        return served(self.__megafuse__, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the original function with the options; a copy captures at its first call."""
        return _remake_function, (self.__megafuse__.original, self.__megafuse__.options)


def served(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of the engine. Errors that the user's own code raises have that code's traceback."""
    try:
        return engine(args, kwargs)
    except Exception as error:
        if stage_of(error) is None:
            raise
        raise trimmed(error)  # noqa: B904 (the same error)


def plain(module: nn.Module) -> nn.Module:
    """What runs the original ops: the module, or for a fused one an object of the original class with all its state."""
    kind = getattr(type(module), "__plain__", None)
    return module if kind is None else _viewed(module, kind)


def _viewed(module: nn.Module, kind: Any) -> nn.Module:
    """An object of class ``kind`` that shares the module's state."""
    view: nn.Module = kind.__new__(kind)
    view.__dict__ = module.__dict__
    return view


def _fused_module(module: nn.Module, engine: Engine) -> nn.Module:
    """An object of a subclass of the module's class that shares all its state and runs the engine in ``forward``."""
    made_here = isinstance(vars(type(module)).get("__megafuse__"), Engine)
    base: Any = type(module).__mro__[1] if made_here else type(module)
    others: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__ is module.__dict__:
            return served(engine, args, kwargs)
        if self not in others:  # made by the class, not by fuse: it has parameters of its own
            others[self] = make_engine(plain(self).forward, engine.options)
        return served(others[self], args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles are of the original, with the options; the copy captures at its first call."""
        reduced: Any = _viewed(self, base).__reduce_ex__(protocol)
        return _remake_module, (*reduced[:2], engine.options), *reduced[2:]

    members = {"forward": forward, "__reduce_ex__": reduce, "__megafuse__": engine, "__doc__": base.__doc__}
    members["__plain__"] = getattr(base, "__plain__", base)
    fused: nn.Module = object.__new__(type(f"Fused{base.__name__}", (base,), members))
    fused.__dict__ = module.__dict__
    return fused


def _remake_module(make: Callable[..., nn.Module], args: tuple[Any, ...], options: Options) -> nn.Module:
    """What unpickling and copying call: a fused module without captures around a new original."""
    module = make(*args)
    return _fused_module(module, make_engine(plain(module).forward, options))


def _remake_function(original: Callable[..., Any], options: Options) -> FusedFunction:
    return FusedFunction(make_engine(original, options))


def make_engine(callee: Callable[..., Any], options: Options) -> Engine:
    """An engine that measures tiles where the options ask for that."""
    return Engine(callee, options, tuner() if options.tune else None)


def fuse(
    fn: Callable[..., Any],
    *args: Any,
    target: str = "auto",
    strict: bool = False,
    max_specializations: int = 8,
    dots: str = "library",
    chains: bool = True,
    memory_budget: int | None = None,
    tune: bool | None = None,
    plan: str | os.PathLike[str] | None = None,
    cuda_graph: bool = False,
    **kwargs: Any,
) -> Any:
    """Fuse a module or function for calls like ``fn(*args, **kwargs)``.

    Args:
        fn: an ``nn.Module`` or a function; functions may take modules and plain values among their arguments.
        *args: example arguments of the call. Other shapes, dtypes or plain values compile on their first call.
        target: ``auto`` (CUDA tensors: generated kernels; CPU tensors: the original ops, with a warning), ``cuda``, or
            ``interpret`` (the generated tile programs run on CPU tensors through NumPy: right, not fast).
        strict: an error instead of running unconverted ATen ops as they are inside the plan.
        max_specializations: how many programs may be made for calls that differ in their sizes alone, where sizes
            cannot share one; further sizes run the original ops, with a warning.
        chains: several products of the same rows run in one kernel where that is predicted to be faster.
        dots: ``library``, or ``auto``: generated products that compute what follows, where predicted to be faster.
        memory_budget: bytes that a step may have allocated at a time beside its inputs (of open sizes, at a typical
            one): saved values are computed again to keep to it; ``explain`` says what that is predicted to cost.
        tune: measure the tiles of kernels that were not measured before, on the GPU at hand, for about 90 s, and keep
            them in the cache; None: take those in the cache, measure nothing; False: the heuristic's tiles.
            ``MEGAFUSE_FAST_AUTOTUNE=1`` (or ``MLP_FAST_AUTOTUNE=1``) has the effect of False everywhere.
        plan: a file that ``megafuse tune --export`` wrote: its tiles alone count. ``MEGAFUSE_PLAN`` names one for all
            calls; under ``MEGAFUSE_REQUIRE_PLAN=1`` a kernel without an entry is an error.
        cuda_graph: replay forward and backward as a CUDA graph each; what that cannot serve runs without, and says so.
        **kwargs: example keyword arguments of the call; one that has an option's name is taken as the option.

    Returns:
        A drop-in replacement: for a module, an object of a subclass of its class that shares all its state.

    Raises:
        InputError: an argument is not usable (it is named) or missing, or a plan is not usable: unreadable, for another
            GPU, incomplete; a keyword is neither an option nor an argument of ``fn``.
        CaptureError: it cannot be traced. UnsupportedError: ``strict``, and no converter. TargetError: no such target.
    """
    callee = _callee(fn)  # a module's hooks run around its forward
    require_known("fuse", FUSE_OPTIONS, callee, kwargs)
    require_arguments("fuse", callee, args, kwargs)
    options = Options(
        target, strict=strict, max_specializations=max_specializations, dots=dots, chains=chains, tune=tune,
        plan=os.fspath(plan) if isinstance(plan, os.PathLike) else plan,
        memory_budget=memory_budget, cuda_graph=cuda_graph,
    )  # fmt: skip
    engine = make_engine(callee, options)
    try:
        engine.bound(args, kwargs)
    except Exception as error:
        if stage_of(error) is None:
            raise
        raise trimmed(error)  # noqa: B904 (the same error)
    return _fused_module(fn, engine) if isinstance(fn, nn.Module) else FusedFunction(engine)


FUSE_OPTIONS = options_of(fuse)
_CHECK_OPTIONS = tuple(name for name in CHECK_OPTIONS if name != "fuse")


def _callee(fn: Any) -> Callable[..., Any]:
    """What is fused: a function, or a module's forward."""
    if not callable(fn):
        raise InputError(
            f"fuse() takes a module or a function, not {type(fn).__name__}",
            hint="call it as fuse(module, *example_arguments)",
        )
    if isinstance(fn, type) and issubclass(fn, nn.Module):
        raise InputError(f"fuse() got the class {fn.__name__}", hint=f"make a module of it first: {fn.__name__}(...)")
    original = getattr(fn, "__megafuse__", None)
    return original.original if original is not None else fn.forward if isinstance(fn, nn.Module) else fn


def engine_of(fused: Any) -> Engine:
    """The engine behind what ``fuse`` returned.

    Raises:
        InputError: ``fused`` did not come from ``fuse``.
    """
    engine = getattr(fused, "__megafuse__", None)
    if not isinstance(engine, Engine):
        raise InputError(f"{type(fused).__name__} did not come from megafuse.fuse()", hint="fuse it first")
    return engine


def check(fn: Callable[..., Any], *args: Any, fused: Any = None, **kwargs: Any) -> CheckReport:
    """Compare a fused callable with the original by the acceptance rule; see :func:`megafuse.validate.check`.

    ``kwargs``: the options of that function, of :func:`fuse` where it is called here, and keyword arguments of ``fn``.
    Where it is called here for CPU tensors alone, ``target`` is ``interpret``, so that generated code is compared.
    ``fn`` may itself be fused, as the modules of ``megafuse.nn`` are: it is then compared with what it stands for.
    The report's ``notes`` say where the original itself was checked, since calls of this kind are not fused.

    Raises:
        InputError: an argument is not usable; a keyword is neither an option nor an argument of ``fn``.
    """
    engine = getattr(fn, "__megafuse__", None)
    if engine is not None:
        fused = fn if fused is None else fused
        fn = plain(fn) if isinstance(fn, nn.Module) else engine.original
    if fused is None:
        options = {name: kwargs.pop(name) for name in FUSE_OPTIONS if name in kwargs}
        passed = {name: value for name, value in kwargs.items() if name not in _CHECK_OPTIONS}
        require_known("check", (*_CHECK_OPTIONS, *FUSE_OPTIONS), _callee(fn), passed)
        tensors = [t for t in pytree.tree_leaves((args, passed, _state(fn))) if isinstance(t, Tensor)]
        if all(t.device.type == "cpu" for t in tensors):
            options.setdefault("target", "interpret")
        fused = fuse(fn, *args, **options, **passed)
    report = _check(fn, *args, fused=fused, **kwargs)
    engine = getattr(fused, "__megafuse__", None)
    if not isinstance(engine, Engine):
        return replace(report, notes=(f"this {type(fused).__name__} did not come from megafuse.fuse()",))
    bound = engine.bound(args, {name: value for name, value in kwargs.items() if name not in _CHECK_OPTIONS})
    if bound.compiled is not None:
        return report
    return replace(report, notes=(f"the original was compared with itself: {bound.reason}",), nothing_fused=True)


def _state(fn: Any) -> list[Tensor]:
    """The parameters and buffers of a module."""
    return [*fn.parameters(), *fn.buffers()] if isinstance(fn, nn.Module) else []
