"""What a watch of modules notices; that fused calls follow is tested with the life of modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megafuse.compiler import watch as watches
from megafuse.compiler.watch import ModuleWatch


@pytest.fixture(autouse=True, params=["versions", "values"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dictionaries tell that they were not changed, where they can; or all values are looked at."""
    if request.param == "values":
        monkeypatch.setattr(watches, "_version", None)


def _net() -> Any:
    net = nn.Sequential(nn.Linear(3, 3), nn.Softplus(), nn.Linear(3, 3, bias=False))
    net.names = ("a", "b")
    return net


CHANGES: dict[str, Callable[[Any], Any]] = {
    "mode": lambda m: m.eval(),
    "mode of another type": lambda m: setattr(m[0], "training", 1),
    "attribute": lambda m: setattr(m[1], "beta", 2.0),
    "attribute of another type": lambda m: setattr(m[0], "in_features", 3.0),
    "new attribute": lambda m: setattr(m[1], "other", 1),
    "deleted attribute": lambda m: delattr(m, "names"),
    "attribute under another name": lambda m: (delattr(m[1], "beta"), setattr(m[1], "gamma", 1)),
    "hook": lambda m: m[1].register_forward_hook(lambda *_: None),
    "hook in a new table": lambda m: setattr(m[1], "_forward_hooks", OrderedDict({0: print})),
    "submodule": lambda m: setattr(m, "1", nn.Softplus()),
    "submodules in a new table": lambda m: setattr(m, "_modules", {"0": m[0]}),
    "bias added": lambda m: setattr(m[2], "bias", nn.Parameter(torch.ones(3))),
    "parameters in a new table": lambda m: m[0].__dict__.update(_parameters={"weight": m[0].weight}),
    "parameters in a new table of the same names": lambda m: setattr(m[0], "_parameters", dict(m[0]._parameters)),
    "buffers in a new table": lambda m: setattr(m[0], "_buffers", {}),
    "state of another module": lambda m: m[0].__setstate__(nn.Linear(3, 3).__dict__),
    "order of submodules": lambda m: m._modules.update({"0": m._modules.pop("0")}),
    "order of parameters": lambda m: m[0]._parameters.update({"weight": m[0]._parameters.pop("weight")}),
    "buffer": lambda m: m.register_buffer("scale", torch.ones(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    net = _net()
    watch = ModuleWatch(net.modules())
    assert watch.unchanged()
    CHANGES[change](net)
    assert not watch.unchanged()


SAME: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "other values": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(3, 3))),
    "mode there and back": lambda m: m.eval().train(),
    "an equal attribute": lambda m: setattr(m[1], "beta", float("1.0")),
    "a hook that went": lambda m: m[1].register_forward_hook(lambda *_: None).remove(),
    "an empty table of hooks": lambda m: setattr(m[1], "_forward_hooks", OrderedDict()),
}


@pytest.mark.parametrize("change", SAME)
def test_what_is_the_same(change: str) -> None:
    net = _net()
    net[1].beta = 1.0
    watch = ModuleWatch(net.modules())
    SAME[change](net)
    assert watch.unchanged()
    assert watch.unchanged()
    net[1].register_forward_hook(lambda *_: None)
    assert not watch.unchanged()


def test_values_are_looked_at_only_where_a_version_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    if watches._version is None:
        pytest.skip("dictionaries have no versions, or are not asked for them")
    net = _net()
    watch = ModuleWatch(net.modules())
    assert watch.unchanged()
    looked = []
    look = watch._looks_the_same
    monkeypatch.setattr(watch, "_looks_the_same", lambda: looked.append(1) or look())
    assert watch.unchanged()
    assert looked == []
    net.eval().train()
    for _ in range(3):
        assert watch.unchanged()
    assert looked == [1]
    net[1].register_forward_hook(lambda *_: None)
    assert not watch.unchanged()
