"""What functions read and leave behind outside of modules: settings, counters, lists, caches."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import megafuse
from life_modules import batch, close
from megafuse.api import engine_of

# --- what lies inside of objects ------------------------------------------------------------------------------------


class Settings:
    """Read through attributes, a method and a property."""

    def __init__(self, scale: float = 2.0) -> None:
        self.scale, self.shift, self.act, self.unread = scale, torch.ones(6), torch.tanh, 0
        self.inner = SimpleNamespace(power=2)

    def applied(self, x: Tensor) -> Tensor:
        return self.act(x * self.scale) + self.shift

    @property
    def exponent(self) -> int:
        return self.inner.power


@dataclasses.dataclass
class Plain:
    scale: float = 2.0


class Holds(nn.Module):
    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        return self.settings.applied(x) ** self.settings.exponent


GLOBAL = Settings()


def with_global(x: Tensor) -> Tensor:
    return GLOBAL.applied(x) ** GLOBAL.exponent


CHANGES: dict[str, Callable[[Any], None]] = {
    "a number": lambda s: setattr(s, "scale", 3.0),
    "a function": lambda s: setattr(s, "act", torch.sin),
    "a number further in": lambda s: setattr(s.inner, "power", 3),
    "an object": lambda s: setattr(s, "inner", SimpleNamespace(power=4)),
    "a tensor": lambda s: setattr(s, "shift", torch.full((6,), 5.0)),
    "a tensor in place": lambda s: s.shift.mul_(2),
}


CASES = [
    (w, c)
    for w in ("module", "closure", "global", "argument")
    for c in CHANGES
    if (w, c[:8]) != ("argument", "a tensor")
]


@pytest.mark.parametrize(("where", "change"), CASES)
def test_attributes_of_objects_that_change_are_seen(where: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings()
    monkeypatch.setitem(globals(), "GLOBAL", settings)

    def enclosing(x: Tensor) -> Tensor:
        return settings.applied(x) ** settings.exponent

    fn: Any = {"module": Holds(settings), "closure": enclosing, "global": with_global, "argument": given}[where]
    if where == "argument":  # tensors inside of objects are refused there
        settings.shift = 1.0  # type: ignore[assignment]
    more = (settings,) if where == "argument" else ()
    fused = megafuse.fuse(fn, batch(), *more, target="interpret")
    close(fused(batch(), *more), fn(batch(), *more))
    CHANGES[change](settings)
    close(fused(batch(), *more), fn(batch(), *more))
    close(fused(batch(3), *more), fn(batch(3), *more))


def given(x: Tensor, settings: Any) -> Tensor:
    return settings.applied(x) ** settings.exponent


def test_a_data_class_as_an_argument() -> None:
    def fn(x: Tensor, settings: Plain) -> Tensor:
        return x * settings.scale

    settings = Plain()
    fused = megafuse.fuse(fn, batch(), settings, target="interpret")
    settings.scale = 3.0
    close(fused(batch(), settings), batch() * 3)
    close(fused(batch(), Plain(4.0)), batch() * 4)


class Nested(nn.Module):
    """Reads lists in lists and dicts in dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.table = [[1.0, 2.0], [3.0]], {"a": {"b": [2.0]}}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.rows[0][1] * self.table["a"]["b"][0]


def test_lists_in_lists_that_change_are_seen() -> None:
    module = Nested()
    fused = megafuse.fuse(module, batch(), target="interpret")
    close(fused(batch()), module(batch()))
    module.rows[0][1] = 9.0
    close(fused(batch()), module(batch()))
    module.table["a"]["b"][0] = 4.0
    close(fused(batch()), module(batch()))
    for _ in range(2):
        close(fused(batch()), module(batch()))
    assert engine_of(fused).generations == 3


def test_the_default_type_is_seen() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x) * torch.ones(6)

    fused = megafuse.fuse(fn, batch(), target="interpret")
    torch.set_default_dtype(torch.float64)
    try:
        assert fused(batch()).dtype is fn(batch()).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert fused(batch()).dtype is torch.float32
    assert engine_of(fused).generations == 2


def test_arrays_as_arguments() -> None:
    """Told apart by identity; what changes inside of one is read at each call."""

    def fn(x: Tensor, table: np.ndarray) -> Tensor:
        return torch.tanh(x) * torch.as_tensor(table)

    first, second = np.full(6, 2.0, np.float32), np.full(6, 3.0, np.float32)
    fused = megafuse.fuse(fn, batch(), first, target="interpret")
    for table in (first, second, first):
        close(fused(batch(), table), fn(batch(), table))
    first[:3] = 5.0
    close(fused(batch(), first), fn(batch(), first))


def test_what_is_not_read_takes_no_new_program() -> None:
    settings = Settings()
    module = Holds(settings)
    fused = megafuse.fuse(module, batch(), target="interpret")
    for step in range(4):
        settings.unread = step
        close(fused(batch()), module(batch()))
    assert engine_of(fused).generations == 1


def test_gradients_reach_tensors_inside_of_objects() -> None:
    module = Holds(Settings())
    module.settings.shift.requires_grad_()
    fused = megafuse.fuse(module, batch(), target="interpret")
    for _ in range(2):
        wanted = torch.autograd.grad(module(batch()).sin().sum(), module.settings.shift)
        close(torch.autograd.grad(fused(batch()).sin().sum(), module.settings.shift), wanted)
        module.settings.shift = torch.randn(6, requires_grad=True)


# --- what a captured step would not do again ------------------------------------------------------------------------

COUNT, LOG, SEEN, BOX = 0, [], set(), SimpleNamespace(count=0)


def counts(x: Tensor) -> Tensor:
    global COUNT  # noqa: PLW0603
    COUNT += 1
    return torch.tanh(x)


def logs(x: Tensor) -> Tensor:
    LOG.append(x.detach().sum())
    return torch.tanh(x)


def notes(x: Tensor) -> Tensor:
    SEEN.add(len(SEEN))
    return torch.tanh(x)


def counts_inside(x: Tensor) -> Tensor:
    BOX.count += 1
    return torch.tanh(x)


LEFT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], int]]] = {
    "a global": (counts, lambda: COUNT),
    "a list": (logs, lambda: len(LOG)),
    "a set": (notes, lambda: len(SEEN)),
    "an attribute": (counts_inside, lambda: BOX.count),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_behind_is_left_once_per_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing by tracing; the original runs, and after some calls nothing is traced any more."""
    fn, count = LEFT[kind]
    for name, value in {"COUNT": 0, "LOG": [], "SEEN": set(), "BOX": SimpleNamespace(count=0)}.items():
        monkeypatch.setitem(globals(), name, value)
    with pytest.warns(megafuse.NotFusedWarning, match=r"changes .*(COUNT|LOG|SEEN|count of global BOX)"):
        fused = megafuse.fuse(fn, batch(), target="interpret")
    assert count() == 0
    for call in range(12):
        close(fused(batch()), torch.tanh(batch()))
        assert count() == call + 1
    assert all(t.device.type == "cpu" for t in LOG)
    assert len(engine_of(fused).bindings) < 8


def test_a_closure_variable_that_is_rebound() -> None:
    count = 0

    def fn(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return torch.tanh(x)

    with pytest.warns(megafuse.NotFusedWarning, match="changes closure variable count"):
        fused = megafuse.fuse(fn, batch(), target="interpret")
    assert count == 0
    fused(batch())
    assert count == 1


def test_what_is_put_into_arguments() -> None:
    def fn(x: Tensor, store: dict[str, Tensor], log: list[Tensor]) -> Tensor:
        store["h"] = torch.tanh(x)
        log.append(x)
        return store["h"] * 2

    with pytest.warns(megafuse.NotFusedWarning, match="changes a list or dict among its arguments"):
        fused = megafuse.fuse(fn, batch(), {}, [], target="interpret")
    store: dict[str, Tensor] = {}
    log: list[Tensor] = []
    close(fused(batch(), store, log), torch.tanh(batch()) * 2)
    close(store["h"], torch.tanh(batch()))
    assert len(log) == 1


# --- caches ---------------------------------------------------------------------------------------------------------


@functools.lru_cache
def positions(count: int) -> Tensor:
    return torch.arange(count).float()


def cached(x: Tensor) -> Tensor:
    return torch.tanh(x) * positions(x.shape[-1])


class Cached(nn.Module):
    """A method that keeps its results."""

    @functools.cache  # noqa: B019
    def positions(self, count: int) -> Tensor:
        return torch.arange(count).float()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.positions(x.shape[-1])


class Property(nn.Module):
    """A property that is computed once."""

    @functools.cached_property
    def positions(self) -> Tensor:
        return torch.arange(6).float()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.positions


TABLES: dict[int, Tensor] = {}


def looked_up(x: Tensor) -> Tensor:
    if x.shape[-1] not in TABLES:
        TABLES[x.shape[-1]] = torch.arange(x.shape[-1]).float()
    return torch.tanh(x) * TABLES[x.shape[-1]]


@pytest.mark.parametrize("original", [cached, Cached(), Property(), looked_up], ids=lambda f: f"{f}"[:20])
def test_caches_hold_real_tensors_and_serve_fused_calls(original: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", megafuse.NotFusedWarning)  # of the call that fills a cache of its own
        fused = megafuse.fuse(original, batch(), target="interpret")
        fused(batch())
    for rows in (5, 3, 7):
        close(fused(batch(rows)), original(batch(rows)))
    assert any(b.spec is not None for b in engine_of(fused).bindings)
    assert positions(6).device.type == Cached().positions(6).device.type == "cpu"
