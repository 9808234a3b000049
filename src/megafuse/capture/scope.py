"""What a callable reads besides its arguments: closure variables, globals, defaults, tensors kept on modules.

The walk follows the user's functions: those that are called by a name that it reads, and the methods of the classes to
which they belong. Each thing found is a *place*, ``table[key]``. A tensor that the function reaches and that lies at a
place is an input, read there at each call; everything else is part of the key, by value where it is plain, else by
identity. Of other objects (settings, say) the attributes that the functions name are places. Not seen: what changes
inside of objects in lists, tuples and dicts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from megafuse.capture.origins import is_library

Place = tuple[Any, Any]
_OURS = str(Path(__file__).absolute().parents[1])
NESTED = 4  # levels of lists, tuples and dicts that are looked into
PLAIN = (bool, int, float, str, type(None))
CACHE = type(functools.lru_cache(lambda: None))
_NO_RECORD = (torch.Tensor, nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, CACHE)


def content(value: Any) -> Any:
    """A value as part of a key: tensors are all alike; lists, tuples and dicts by their items."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    return (type(value), value) if type(value) in PLAIN else _items(value, NESTED)


def _items(value: Any, levels: int) -> Any:
    """Plain values as they are, what lists, tuples and dicts hold down to some level, everything else by identity."""
    if type(value) in PLAIN:
        return value
    if not levels or not isinstance(value, dict | list | tuple):
        return id(value)
    inside = value.values() if isinstance(value, dict) else value
    return (*(value if isinstance(value, dict) else ()), *(_items(v, levels - 1) for v in inside))


@dataclass(frozen=True)
class _Cell:
    """A closure cell as a table; an empty one reads as None."""

    cell: Any

    def __getitem__(self, _: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            return None

    def __setitem__(self, _: Any, value: Any) -> None:
        self.cell.cell_contents = value


@dataclass(frozen=True)
class _Members:
    """A class's own attributes as a table."""

    owner: type

    def __getitem__(self, key: str) -> Any:
        return vars(self.owner)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.owner, key, value)


@dataclass(frozen=True)
class _Defaults:
    """Default values of a function's parameters as a table: by number, or by name of a keyword-only one."""

    fn: FunctionType

    def __getitem__(self, key: int | str) -> Any:
        values: Any = (self.fn.__defaults__ if isinstance(key, int) else self.fn.__kwdefaults__) or ()
        return values[key] if isinstance(key, str) or key < len(values) else None


class Scope:
    """The places that a callable reads, by label, and the modules found at them.

    ``caches`` are the places of functions that keep what they returned (``functools.lru_cache``). ``given`` are the
    arguments of a call by label.
    """

    def __init__(
        self, fn: Callable[..., Any], modules: Iterable[nn.Module], given: Iterable[tuple[str, Any]] = ()
    ) -> None:
        self.places: dict[str, Place] = {}
        self.caches: list[Place] = []
        self.modules: list[nn.Module] = []
        self._seen: set[Any] = set()
        self._names: set[str] = set()  # that the functions read
        self._records: list[tuple[str, Any]] = []
        self._follow(fn)
        for number, top in enumerate(modules):
            self._modules_of(str(number), top)
        for label, value in given:
            self._record(label, value)
        self._look_inside()

    def state(self) -> tuple[Any, ...]:
        """What lies at the places now, as part of a key."""
        return tuple((label, content(table[key])) for label, (table, key) in self.places.items())

    def _modules_of(self, label: str, top: nn.Module) -> None:
        for name, module in top.named_modules():
            self._module(f"{label}.{name}".rstrip("."), module)

    def _module(self, name: str, module: nn.Module) -> None:
        for attribute, value in list(module.__dict__.items()):
            label = f"attribute {attribute} of module {name}"
            if isinstance(value, torch.Tensor):
                self.places[label] = (module.__dict__, attribute)
            self._record(label, value)
        if type(module) not in self._seen:
            self._seen.add(type(module))
            for owner in type(module).__mro__:
                self._follow(vars(owner).get("forward"), type(module))

    def _follow(self, fn: Any, owner: type | None = None) -> None:
        """Add what ``fn`` reads; ``owner``: the class of which it is a method."""
        if isinstance(fn, functools.partial):
            return self._follow(fn.func)
        if isinstance(fn, MethodType):
            return self._follow(fn.__func__, type(fn.__self__))
        if isinstance(fn, staticmethod | classmethod):
            return self._follow(fn.__func__, owner)
        if isinstance(fn, property):
            return self._follow(fn.fget, owner)
        if hasattr(fn, "__wrapped__"):
            self._follow(fn.__wrapped__, owner)
        if not isinstance(fn, FunctionType) or (fn, owner) in self._seen or _is_foreign(fn.__code__.co_filename):
            return None
        self._seen.add((fn, owner))
        self._names.update(_names(fn.__code__))
        for label, table, key in _read_by(fn):
            self._place(label, table, key)
        if owner is not None:
            self._follow_members(owner, _names(fn.__code__))
        return None

    def _follow_members(self, owner: type, names: Iterable[str]) -> None:
        for name in names:
            found = inspect.getattr_static(owner, name, None)
            if isinstance(found, CACHE):
                self.caches += [(_Members(c), name) for c in owner.__mro__ if vars(c).get(name) is found]
            self._follow(found, owner)

    def _record(self, label: str, value: Any) -> None:
        """Remember an object whose attributes the functions may read."""
        inside = None if isinstance(value, _NO_RECORD) else getattr(value, "__dict__", None)
        if isinstance(inside, dict) and all(value is not known for _, known in self._records):
            self._records.append((label, value))

    def _look_inside(self) -> None:
        """Attributes of objects that the functions name are places, methods that they name are followed.

        These may name more attributes, and hold further objects.
        """
        known = None
        while known != (known := (len(self._records), len(self._names))):
            for label, value in list(self._records):
                for name in [n for n in value.__dict__ if n in self._names]:
                    self._place(f"attribute {name} of {label}", value.__dict__, name)
                members = {n for owner in type(value).__mro__ for n in vars(owner)}
                self._follow_members(type(value), members & self._names)

    def _place(self, label: str, table: Any, key: Any) -> None:
        value = table[key]
        while label in self.places and not _same_place(self.places[label], table, key):
            label += "'"  # another function of the same name
        if isinstance(value, type | ModuleType) or label in self.places:
            return None
        if isinstance(value, FunctionType | MethodType) and _is_foreign(value.__code__.co_filename):
            return self._follow(value)
        if isinstance(value, CACHE):
            self.caches.append((table, key))
        self._record(label, value)
        self.places[label] = (table, key)
        if isinstance(value, nn.Module):
            self.modules.append(value)
            return self._modules_of(label, value)
        return self._follow(value)


def _same_place(place: Place, table: Any, key: Any) -> bool:
    other, name = place
    if isinstance(table, _Cell):
        return isinstance(other, _Cell) and other.cell is table.cell
    if isinstance(table, _Defaults):
        return isinstance(other, _Defaults) and other.fn is table.fn and name == key
    return other is table and name == key


def _is_foreign(filename: str) -> bool:
    return is_library(filename) or filename.startswith(_OURS)


def _names(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in a function's code and in that of functions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _read_by(fn: FunctionType) -> Iterator[tuple[str, Any, Any]]:
    """(label, table, key) of closure variables, defaults, globals, and attributes of the user's Python modules."""
    home = fn.__qualname__
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        yield f"closure variable {name} of {home}", _Cell(cell), id(cell)
    for key in (*range(len(fn.__defaults__ or ())), *(fn.__kwdefaults__ or ())):
        yield f"default {key} of {home}", _Defaults(fn), key
    names = dict.fromkeys(_names(fn.__code__))
    for name in names:
        if name in fn.__globals__:
            value = fn.__globals__[name]
            yield f"global {name} of {fn.__module__}", fn.__globals__, name
            if isinstance(value, ModuleType) and not _is_foreign(str(getattr(value, "__file__", None) or "<frozen")):
                yield from ((f"global {name}.{n}", vars(value), n) for n in names if n in vars(value))


class ScopeWatch:
    """Whether what lies at a scope's places is still what it was, quickly enough to ask on every call."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = tuple(places.values())
        self._values = [table[key] for table, key in self._places]
        self._contents = [*map(content, self._values)]
        self._open = [n for n, v in enumerate(self._values) if isinstance(v, list | dict)]

    def unchanged(self) -> bool:
        """True when the values are the same, or equal plain ones, or other tensors."""
        if not self._places:
            return True
        try:
            now = [table[key] for table, key in self._places]
        except KeyError:  # a global that was deleted
            return False
        if all(map(is_, now, self._values)) and all(content(now[n]) == self._contents[n] for n in self._open):
            return True
        if [*map(content, now)] != self._contents:
            return False
        self._values = now
        return True
