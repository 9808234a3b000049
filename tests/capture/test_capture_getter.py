"""Tensors of later calls are collected without flattening, while all other arguments are the captured objects."""

from __future__ import annotations

import pytest
import torch

from megafuse.capture.api import capture
from megafuse.capture.leaves import LeafGetter, flatten_call


def scaled(x, mode="add", y=None, z=None):
    return x + 1 if mode == "add" else x * 2


def getter_of(fn, *args, **kwargs):
    captured = capture(fn, args, kwargs)
    return LeafGetter(fn, flatten_call(fn, args, kwargs), captured.leaves, captured.constants)


@pytest.mark.parametrize(
    ("args", "kwargs", "flattened"),
    [
        ((), {"mode": "add", "y": None}, False),
        ((), {"y": None, "mode": "add"}, False),
        ((), {"mode": str(b"add", "ascii"), "y": None}, True),  # equal, another object
        ((), {"mode": "mul", "y": None}, True),
        ((), {"mode": "add", "z": None}, True),
        ((), {"mode": "add"}, True),
        (("add",), {"y": None}, True),
        ((), {"mode": "add", "y": torch.ones(3)}, True),
    ],
)
def test_plain_keywords(monkeypatch, args, kwargs, flattened):
    x = torch.randn(3)
    getter = getter_of(scaled, x, mode="add", y=None)
    monkeypatch.setattr(LeafGetter, "_general", lambda self, *_: ["flattened"])
    (found,) = getter((x, *args), kwargs)
    assert found == "flattened" if flattened else found is x


def test_arguments_with_parts_are_flattened(monkeypatch):
    x, y = torch.randn(3), torch.randn(3)
    getter = getter_of(lambda pair: pair[0] + pair[1], (x, y))
    assert [t is s for t, s in zip(getter(((x, y),), {}), (x, y), strict=True)] == [True, True]
    monkeypatch.setattr(LeafGetter, "_general", lambda self, *_: "flattened")
    assert getter(((x, y),), {}) == "flattened"


def test_positional_plain_values_and_tensors_stand_where_they_stood(monkeypatch):
    x, y = torch.randn(3), torch.randn(3)
    getter = getter_of(lambda a, n, b: a * n + b, x, 2, y)
    monkeypatch.setattr(LeafGetter, "_general", lambda self, *_: "flattened")
    assert [t is s for t, s in zip(getter((x, 2, y), {}), (x, y), strict=True)] == [True, True]
    assert getter((x, 3, y), {}) == "flattened"
    assert getter((x, y, 2), {}) == "flattened"
