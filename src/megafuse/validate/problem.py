"""What is being checked: a callable and its example arguments, taken apart into named leaves and modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megafuse.core.errors import InputError


@dataclass(frozen=True)
class Problem:
    """A callable and its arguments, flattened.

    ``leaves[i]`` is named ``names[i]`` (the argument's name and its path inside it); ``modules`` maps a name prefix to
    every module reachable from the callable (itself, bound object, closure, partial) or from the arguments.
    """

    fn: Callable[..., Any]
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    spec: pytree.TreeSpec
    modules: Mapping[str, nn.Module]

    @classmethod
    def of(cls, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Problem:
        """Take the call ``fn(*args, **kwargs)`` apart; raises ``InputError`` if ``fn`` cannot be called."""
        if not callable(fn):
            raise InputError(
                f"argument 'module_or_fn' is a {type(fn).__name__}", hint="give an nn.Module or a function"
            )
        paths, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        arg_names = _argument_names(fn, len(args))
        names = tuple(_leaf_name(path, arg_names) for path, _ in paths)
        leaves = tuple(leaf for _, leaf in paths)
        modules = dict(_owners(fn))
        modules.update((n, leaf) for n, leaf in zip(names, leaves, strict=True) if isinstance(leaf, nn.Module))
        return cls(fn, leaves, names, spec, modules)

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with ``leaves`` in place of the examples."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return args, kwargs

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every distinct parameter of the modules and of the arguments, under its first name."""
        found: dict[str, nn.Parameter] = {}
        for prefix, module in self.modules.items():
            found.update((_join(prefix, n), p) for n, p in module.named_parameters())
        found.update((n, x) for n, x in zip(self.names, self.leaves, strict=True) if isinstance(x, nn.Parameter))
        return _first_of_each(found)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every distinct buffer of the modules, under its first name."""
        found: dict[str, torch.Tensor] = {}
        for prefix, module in self.modules.items():
            found.update((_join(prefix, n), b) for n, b in module.named_buffers())
        return _first_of_each(found)

    def inputs(self, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The tensors among ``leaves`` that are not parameters, by name."""
        return {n: x for n, x in zip(self.names, leaves, strict=True) if is_input(x)}


def is_input(value: Any) -> bool:
    """True for tensors that are redrawn for every seed: all but parameters, which belong to the state."""
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def fresh_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the values, shape, strides (zero strides included), dtype and requires_grad of ``tensor``."""
    return rebuild(tensor.detach(), tensor).requires_grad_(tensor.requires_grad)


def rebuild(values: torch.Tensor, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """New storage holding ``values`` with the shape and strides of ``like``; dtype of ``like`` unless given."""
    target = dtype or like.dtype
    if like.layout != torch.strided:
        return values.to(target).clone()
    core = values[tuple(slice(0, 1) if s == 0 else slice(None) for s in like.stride())]  # one copy of expanded axes
    out = torch.empty_strided(core.shape, like.stride(), dtype=target, device=like.device)
    return out.copy_(core).as_strided(like.shape, like.stride())


def draw_leaves(problem: Problem, seed: int, scale: float = 1.0) -> list[Any]:
    """Fresh random floating-point inputs for ``seed``; integers, parameters, modules and plain values are kept.

    ``scale`` multiplies the inputs whose range allows it: those drawn from a normal distribution.
    """
    drawn = []
    for index, leaf in enumerate(problem.leaves):
        random = is_input(leaf) and leaf.is_floating_point() and leaf.numel() > 0
        drawn.append(_redraw(leaf, generator(leaf.device, seed, index), scale) if random else leaf)
    return drawn


def generator(device: torch.device, seed: int, stream: int) -> torch.Generator:
    """Random generator of its own for each (seed, stream), so that no draw depends on another's size."""
    return torch.Generator(device=device).manual_seed(1_000_003 * (seed + 1) + stream)


def _redraw(example: torch.Tensor, rng: torch.Generator, scale: float) -> torch.Tensor:
    """Random values that stay where the example lives.

    Finite examples of both signs: normal with their mean and deviation. Constants: c * U(1/2, 3/2), or N(0, 1) for
    zero. Anything else (one-signed, or holding NaN or Inf): its own elements, resampled.
    """
    wide = example.detach().to(torch.float32 if example.dtype != torch.float64 else torch.float64)
    noise = torch.empty(example.shape, dtype=wide.dtype, device=wide.device)
    low, high = wide.min().item(), wide.max().item()
    if low == high == 0.0:
        values = noise.normal_(generator=rng) * scale
    elif low == high:
        values = low * noise.uniform_(0.5, 1.5, generator=rng)
    elif low < 0.0 < high and bool(torch.isfinite(wide).all()):
        values = (noise.normal_(generator=rng) * wide.std() + wide.mean()) * scale
    else:
        pick = torch.randint(wide.numel(), (wide.numel(),), generator=rng, device=wide.device)
        values = wide.reshape(-1)[pick].reshape(example.shape)
    return rebuild(values, example).requires_grad_(example.requires_grad)


def _owners(fn: Any) -> Iterator[tuple[str, nn.Module]]:
    """Modules that a callable carries with it: itself, its bound object, its partial arguments, its closure."""
    if isinstance(fn, nn.Module):
        yield "", fn
    elif isinstance(fn, functools.partial):
        yield from _owners(fn.func)
        carried = {**{f"partial{i}": a for i, a in enumerate(fn.args)}, **fn.keywords}
        yield from ((n, m) for n, m in carried.items() if isinstance(m, nn.Module))
    elif isinstance(getattr(fn, "__self__", None), nn.Module):
        yield "", fn.__self__
    elif inspect.isfunction(fn):
        closed = inspect.getclosurevars(fn).nonlocals
        yield from ((n, m) for n, m in closed.items() if isinstance(m, nn.Module))


def callee_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What takes the arguments of a call: a module's ``forward``, unless hooks get its keywords first."""
    hooked = isinstance(fn, nn.Module) and fn._forward_pre_hooks_with_kwargs
    return fn.forward if isinstance(fn, nn.Module) and not hooked else fn


def _argument_names(fn: Any, count: int) -> list[str]:
    """Names of the first ``count`` positional arguments, numbered where the signature does not tell."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except (TypeError, ValueError):
        return [f"arg{i}" for i in range(count)]
    positional = [p.name for p in signature.parameters.values() if p.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return [positional[i] if i < len(positional) else f"arg{i}" for i in range(count)]


def _leaf_name(path: Sequence[Any], arg_names: Sequence[str]) -> str:
    which, key, rest = path[0].idx, path[1], path[2:]
    name = arg_names[key.idx] if which == 0 else str(key.key)
    return name + pytree.keystr(tuple(rest))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _first_of_each(found: Mapping[str, Any]) -> dict[str, Any]:
    seen: set[int] = set()
    return {n: t for n, t in found.items() if not (id(t) in seen or seen.add(id(t)))}  # type: ignore[func-returns-value]
