"""Where the tensors of a call are: flattened arguments, the modules among them, and quick collection on later calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megafuse.capture.scope import Place, Scope, content
from megafuse.capture.state import real_table
from megafuse.capture.types import Leaf
from megafuse.core.errors import InputError, NotFusableError

Fn = Callable[..., Any]


@dataclass(frozen=True)
class FlatCall:
    """The flattened arguments of a call.

    ``leaves[i]`` is a leaf of ``(args, kwargs)``; ``tensors`` are the positions of tensors among them, ``labels``
    their names in messages; ``positional`` and ``keywords`` are the arguments' own trees. ``modules`` are the modules
    of the function itself first, then those among the arguments, then those that it reaches in its ``scope``.
    """

    spec: pytree.TreeSpec
    positional: tuple[pytree.TreeSpec, ...]
    keywords: tuple[tuple[str, pytree.TreeSpec], ...]
    leaves: tuple[Any, ...]
    tensors: tuple[int, ...]
    labels: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    module_at: tuple[int | None, ...]
    scope: Scope

    @property
    def key(self) -> tuple[Any, ...]:
        """What the call's structure is, apart from tensors: argument tree, constants, modules and their modes."""
        constants = tuple(
            "tensor" if isinstance(v, torch.Tensor) else ("module", id(v)) if isinstance(v, nn.Module) else constant(v)
            for v in self.leaves
        )
        state = tuple(module_state(m) for top in self.modules for m in top.modules())
        ties = tuple((a, b) for (a, _), (b, _) in tied_places(self))
        modules = tuple(id(m) for m in self.modules)
        return (hashable(self.spec), constants, modules, state, self.scope.state(), ties, torch.get_default_dtype())


def hashable(spec: pytree.TreeSpec) -> Any:
    """The tree's structure as part of a key."""
    try:
        hash(spec)
    except TypeError:
        return _Tree(spec)
    return spec


class _Tree:
    """A tree without a hash: before PyTorch 2.7 those whose nodes hold a list, such as dicts and registered classes."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return hash((self.spec.type, self.spec.num_nodes, self.spec.num_leaves))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tree) and self.spec == other.spec


def module_state(module: nn.Module) -> tuple[Any, ...]:
    """What tracing assumed of one module besides its parameters and buffers, cheap enough to look at on every call.

    Mode, submodules, hooks, names of parameters and buffers and which of them are None, and its own attributes: plain
    values by value, everything else by identity. The values of tensors among them are read at each call, so only which
    tensors they are counts.
    """
    own = module.__dict__
    values = [content(v) for k, v in own.items() if k not in _MODULE_INTERNALS]
    hooks = sum(map(len, (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
                          module._backward_pre_hooks)))  # fmt: skip
    tables = module._parameters, module._buffers
    missing = [name for table in tables for name, tensor in table.items() if tensor is None]
    return (len(own), hooks, *tables[0], *tables[1], *missing, *map(id, module._modules.values()), *values)


_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}


def tensor_places(call: FlatCall) -> Iterator[tuple[Any, Place]]:
    """(label, place) of every parameter and buffer, under each of their names, and of tensors in the scope."""
    for number, module in enumerate(call.modules):
        for _, name, _ in named_state(module):
            yield (number, name), state_place(call.modules, number, name)
    for label_, (table, key) in call.scope.places.items():
        if isinstance(table[key], torch.Tensor):
            yield label_, (table, key)


def tied_places(call: FlatCall) -> list[tuple[tuple[Any, Place], tuple[Any, Place]]]:
    """Pairs of places where one and the same tensor is found, the first one first."""
    first: dict[int, tuple[Any, Place]] = {}
    pairs = ((first.setdefault(id(table[key]), (name, (table, key))), (name, (table, key)))
             for name, (table, key) in tensor_places(call))  # fmt: skip
    return [(one, other) for one, other in pairs if one[0] != other[0]]


def without_tensors(call: FlatCall) -> FlatCall:
    """The same structure holding on to none of the call's tensors (empty ones on the meta device stand for them)."""
    stand_in = torch.empty(0, device="meta")
    return replace(call, leaves=tuple(stand_in if isinstance(v, torch.Tensor) else v for v in call.leaves))


def constant(value: Any) -> tuple[type, Any]:
    """A plain value as part of a key; what cannot be hashed is told apart by identity."""
    try:
        hash(value)
    except TypeError:
        return (type(value), id(value))
    return (type(value), value)


def flatten_call(fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
    """Flatten the arguments of a call to ``fn``."""
    with_path, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    names = parameter_names(fn, len(args))
    leaves = tuple(leaf for _, leaf in with_path)
    tensors = tuple(i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor))
    labels = tuple(label(path, names) for path, _ in with_path)
    modules: list[nn.Module] = []
    place: list[int | None] = []
    for module in own_modules(fn):
        _add(modules, place, module, None)
    for i, v in enumerate(leaves):
        if isinstance(v, nn.Module):
            _add(modules, place, v, i)
    scope = Scope(fn, modules, [(f"argument {name}", v) for name, v in zip(labels, leaves, strict=True)])
    for module in scope.modules:
        _add(modules, place, module, None)
    positional = tuple(pytree.tree_structure(a) for a in args)
    keywords = tuple((k, pytree.tree_structure(v)) for k, v in kwargs.items())
    return FlatCall(spec, positional, keywords, leaves, tensors, labels, tuple(modules), tuple(place), scope)


def _add(modules: list[nn.Module], place: list[int | None], module: nn.Module, at: int | None) -> None:
    if not any(m is module for m in modules):
        modules.append(module)
        place.append(at)


def own_modules(fn: Fn) -> Iterator[nn.Module]:
    """Modules that belong to the callable: itself, its bound object, its closure, its globals, partial arguments."""
    if isinstance(fn, nn.Module):
        yield fn
        return
    if isinstance(fn, functools.partial):
        yield from own_modules(fn.func)
        values = [*fn.args, *fn.keywords.values()]
        yield from (v for v in pytree.tree_leaves(values) if isinstance(v, nn.Module))
        return
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        yield owner
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    for cell in getattr(fn, "__closure__", None) or ():
        yield from _modules_in(cell)
    scope = getattr(fn, "__globals__", {})
    yield from (scope[name] for name in code.co_names if isinstance(scope.get(name), nn.Module))


def _modules_in(cell: Any) -> Iterator[nn.Module]:
    try:
        value = cell.cell_contents
    except ValueError:  # an empty cell: the variable is not assigned yet
        return
    if isinstance(value, dict | list | tuple):
        yield from (v for v in pytree.tree_leaves(value) if isinstance(v, nn.Module))
    elif isinstance(value, nn.Module):
        yield value


def parameter_names(fn: Fn, count: int) -> tuple[str, ...]:
    """Names of the positional parameters of ``fn``; ``args[i]`` where the signature does not tell."""
    try:
        target = fn.forward if isinstance(fn, nn.Module) else fn
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(names[i] if i < len(names) else f"args[{i}]" for i in range(count))


def label(path: Any, names: tuple[str, ...]) -> str:
    """A leaf's name in messages: ``x``, ``state['h'][0]``."""
    top, which, *rest = path
    head = names[which.idx] if isinstance(top, pytree.SequenceKey) and top.idx == 0 else str(which.key)
    return head + pytree.keystr(tuple(rest))


def named_state(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(kind, qualified name, tensor) of every parameter and buffer, shared ones under each of their names."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield "param", name, parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield "buffer", name, buffer


def state_place(modules: Sequence[nn.Module], number: int, name: str) -> Place:
    """The table that holds a parameter or buffer, and its name there."""
    head, _, last = name.rpartition(".")
    owner = modules[number].get_submodule(head)
    return real_table(owner._parameters if last in owner._parameters else owner._buffers), last


class LeafGetter:
    """Collects the tensors of a captured callable's leaves from a new call's arguments."""

    def __init__(self, fn: Fn, call: FlatCall, leaves: tuple[Leaf, ...], constants: tuple[torch.Tensor, ...]) -> None:
        self._names = parameter_names(fn, len(call.positional))
        self._call, self._leaves = call, leaves
        self._constants = list(constants)
        self._expected, self._keywords = self._single_leaves()
        self._args = [leaf.path[0] for leaf in leaves if leaf.kind == "arg"]
        self._in_order = self._args == [*range(len(call.tensors))]
        rest = [leaf for leaf in leaves if leaf.kind != "arg"]
        self._state = [self._source(leaf, call.modules) for leaf in rest]
        self._ties = [(a, b) for (_, a), (_, b) in tied_places(call)]

    def _single_leaves(self) -> tuple[list[Any] | None, list[str]]:
        """Captured values of the arguments in order, ``Tensor`` for tensors, and the names of the keywords behind.

        None where an argument has parts: such calls are flattened.
        """
        args, kwargs = pytree.tree_unflatten(range(len(self._call.leaves)), self._call.spec)
        keywords = list(kwargs)
        if [*args, *(kwargs[k] for k in keywords)] != list(range(len(self._call.leaves))):
            return None, []
        return [torch.Tensor if isinstance(v, torch.Tensor) else v for v in self._call.leaves], keywords

    def _source(self, leaf: Leaf, modules: tuple[nn.Module, ...]) -> Place:
        """The table and key under which a non-argument leaf is found at every call."""
        if leaf.kind == "const":
            return self._constants, leaf.path[0]
        if leaf.kind == "outer":
            return self._call.scope.places[str(leaf.path[0])]
        number, name = leaf.path
        return state_place(modules, int(number), str(name))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of the leaves, in order.

        Raises:
            InputError: the arguments do not have the captured call's structure; the message names the argument.
        """
        if self._ties and any(a[m] is not b[n] for (a, m), (b, n) in self._ties):
            raise InputError("parameters that were one tensor at capture are no longer", hint="fuse again")
        tensors = self._given(args, kwargs)
        if tensors is None:
            return self._general(args, kwargs)
        if not self._in_order:
            tensors = [tensors[i] for i in self._args]  # type: ignore[index]
        return _read(self._state, tensors)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """The tensors among arguments that are single leaves and, tensors aside, the captured objects; else None."""
        expected, values = self._expected, args
        if kwargs or self._keywords:
            values = (*args, *(kwargs.get(k, kwargs) for k in self._keywords))
        if expected is None or len(values) != len(expected) or len(kwargs) != len(self._keywords):
            return None
        tensors: list[torch.Tensor] = []
        for value, old in zip(values, expected):  # noqa: B905 (as long as each other)
            if old is torch.Tensor:
                if not isinstance(value, torch.Tensor):
                    return None
                tensors.append(value)
            elif value is not old:
                return None
        return tensors

    def check_same_places(self, leaves: Sequence[Leaf]) -> None:
        """Another capture of the same structure takes its tensors from the same places.

        Raises:
            NotFusableError: it does not.
        """
        here, there = ([leaf.path for leaf in some if leaf.kind != "const"] for some in (self._leaves, leaves))
        if here != there:
            odd = [str(p[0]) for p in (*here, *there) if p not in here or p not in there] or ["outer tensors"]
            raise NotFusableError(f"calls of different sizes or types differ in whether they read {odd[0]}")

    def put_back(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, torch.Tensor]]:
        """The reverse of a call: ``(args, kwargs)`` with other tensors in their places, and the module state to swap.

        The last maps ids of the modules' parameters and buffers of now to those among ``tensors``.
        """
        given = list(self._call.leaves)
        for at, tensor in zip((self._call.tensors[int(i)] for i in self._args), tensors, strict=False):
            given[at] = tensor
        args, kwargs = pytree.tree_unflatten(given, self._call.spec)
        state = [table[key] for table, key in self._state]
        swaps = {id(old): new for old, new in zip(state, tensors[len(self._args) :], strict=False)}  # but for constants
        return args, kwargs, swaps

    def _general(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self._call.spec:
            raise InputError(self._structure_message(args, kwargs), hint="fuse again for the new arguments")
        for new, old, name in zip(flat, self._call.leaves, self._call.labels, strict=True):
            self._check(new, old, name)
        tensors = [v for v in flat if isinstance(v, torch.Tensor)]
        state = self._state if self._same_modules(flat) else self._resolve(flat)
        return _read(state, [tensors[i] for i in self._args])  # type: ignore[index]

    def _same_modules(self, flat: list[Any]) -> bool:
        return all(at is None or flat[at] is m for m, at in zip(self._call.modules, self._call.module_at, strict=True))

    def _resolve(self, flat: list[Any]) -> list[tuple[Any, Any]]:
        """Sources of the state when other modules of the same structure are given."""
        modules = tuple(
            m if at is None else flat[at] for m, at in zip(self._call.modules, self._call.module_at, strict=True)
        )
        if not all(map(_alike, self._call.modules, modules)):
            raise InputError("a module argument is in another state than at capture", hint="fuse again for it")
        try:
            return [self._source(leaf, modules) for leaf in self._leaves if leaf.kind != "arg"]
        except AttributeError as error:
            raise InputError(f"a module argument lacks a part it had at capture: {error}") from error

    def _check(self, new: Any, old: Any, name: str) -> None:
        if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
            if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
                raise InputError(f"argument {name}: expected {_kind(old)}, got {_kind(new)}")
        elif isinstance(old, nn.Module):
            if type(new) is not type(old):
                raise InputError(f"argument {name}: expected a module {_kind(old)}, got {_kind(new)}")
        elif new is not old and constant(new) != constant(old):
            raise InputError(f"argument {name}: the captured value is {old!r}, got {new!r}", hint="fuse again for it")

    def _structure_message(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        count, names = len(self._call.positional), {k for k, _ in self._call.keywords}
        if len(args) < count:
            return f"argument {self._names[len(args)]} is missing: {count} positional arguments were captured"
        if len(args) > count:
            return f"{len(args)} positional arguments, but {count} were captured ({', '.join(self._names)})"
        if set(kwargs) != names:
            odd = sorted(set(kwargs) ^ names)
            return f"keyword argument {odd[0]} is {'missing' if odd[0] in names else 'not among the captured ones'}"
        return self._first_difference(args, kwargs)

    def _first_difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        olds = [*zip(self._names, args, self._call.positional, strict=True)]
        olds += [(k, kwargs[k], s) for k, s in self._call.keywords]
        for name, value, spec in olds:
            if pytree.tree_structure(value) != spec:
                return f"argument {name} has another structure than at capture: got {_kind(value)}"
        return "the arguments have another structure than at capture"


def _read(state: Sequence[Place], tensors: list[Any]) -> list[Any]:
    """``tensors``, with those at the places of ``state`` behind them."""
    try:
        for table, key in state:
            tensors.append(table[key])
        return tensors
    except KeyError as error:
        raise InputError(f"{error} is no longer there", hint="fuse again") from error


def _alike(old: nn.Module, new: nn.Module) -> bool:
    """Both have parts of the same kinds in the same state, and no tensors but parameters and buffers."""
    if old is new:
        return True
    pairs = [*zip(old.modules(), new.modules(), strict=False)]
    return len(pairs) == len([*new.modules()]) and all(
        type(a) is type(b) and _own_state(a) == _own_state(b) and torch.Tensor not in _own_state(b) for a, b in pairs
    )


def _own_state(module: nn.Module) -> tuple[Any, ...]:
    """The module's state without its submodules and what is told apart by identity only."""
    ids = {id(v) for v in (*module._modules.values(), *module.__dict__.values())}
    return tuple(v for v in module_state(module) if type(v) is not int or v not in ids)


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else type(value).__name__
