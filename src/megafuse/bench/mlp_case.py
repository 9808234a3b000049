"""Cases that are MLPs: plain ``nn.Sequential`` of any widths, with or without weight norm, forward or training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megafuse.bench.step import Case
from megafuse.core.errors import InputError
from megafuse.nn.layers import mlp_layers

MODES = ("forward", "training")
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def mlp_case(source: Mapping[str, Any], device: str = "cuda") -> Case:
    """The case of ``source``: rows, widths, activation, bias, weight_norm, dtype, mode and seed.

    ``forward``: nothing requires gradients. ``training``: parameters and input do; the upstream gradient is normal.

    Raises:
        InputError: the widths, the activation or the mode are not usable.
    """
    if source["mode"] not in MODES:
        raise InputError(f"unknown mode {source['mode']!r}", hint=f"use one of {', '.join(MODES)}")
    widths, rows, seed = list(source["widths"]), source["rows"], source["seed"]
    module = _module(source, device)
    training = source["mode"] == "training"
    x = _normal((rows, widths[0]), source["dtype"], device, seed + 1).requires_grad_(training)
    module.requires_grad_(training)
    cotangents = (_normal((rows, widths[-1]), source["dtype"], device, seed + 2),) if training else ()
    return Case(case_name(source), module, (x,), {}, cotangents, rows, dict(source), {"kind": "mlp", **source})


def _module(source: Mapping[str, Any], device: str) -> nn.Module:
    bias, norm = source["bias"], source["weight_norm"]
    with torch.random.fork_rng():
        torch.manual_seed(source["seed"])
        layers = mlp_layers(source["widths"], source["activation"], bias=bias, weight_norm=norm, device=device)
    return nn.Sequential(*layers).to(TYPES[source["dtype"]])


def _normal(shape: tuple[int, ...], dtype: str, device: str, seed: int) -> torch.Tensor:
    if device == "meta":
        return torch.empty(shape, dtype=TYPES[dtype], device=device)
    rng = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=rng, device=device).to(TYPES[dtype])


def case_name(source: Mapping[str, Any]) -> str:
    """Rows, then what all rows of a table share."""
    return f"{source['rows']} rows, {series_name(source)}"


def series_name(source: Mapping[str, Any]) -> str:
    """Mode, depth, widths, activation, type: what cases of one table have in common."""
    extra = ["bias"] * bool(source["bias"]) + ["weight norm"] * bool(source["weight_norm"])
    widths = "-".join(map(str, source["widths"]))
    parts = (source["mode"], f"{len(source['widths']) - 1} layers {widths}", source["activation"], *extra)
    return ", ".join((*parts, source["dtype"]))
