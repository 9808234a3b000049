"""Cases: the RankMixer block as its users have it, and the workloads of ``megafuse.workloads``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megafuse.bench.mlp_case import mlp_case
from megafuse.bench.step import Case, draw_cotangents
from megafuse.core.errors import InputError
from megafuse.workloads import get

ROOT = Path(__file__).resolve().parents[3]
RANK_MIXER_FOLDER = ROOT / "rank_mixer"
RANK_MIXER_PACKAGE = "rank_mixer_src"
TF32 = "tfloat32"  # fp32 tensors whose products may round their operands
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, TF32: torch.float32}
SEED = 1234


def make_case(source: Mapping[str, Any], device: str = "cuda") -> Case:
    """The case that ``source`` describes; by its ``kind``; ``dots`` as ``fuse`` takes it.

    PyTorch's flag for TF32 products is set as its ``dtype`` says.

    Raises:
        InputError: unknown kind.
    """
    torch.backends.cuda.matmul.allow_tf32 = source.get("dtype") == TF32
    if source.get("kind") == "rank_mixer":
        case = rank_mixer_case(source["shape"], source["dtype"], device=device, seed=source.get("seed", SEED))
    elif source.get("kind") == "workload":
        case = workload_case(source["name"], source["dtype"], device=device, size=source.get("size", "gpu"))
    elif source.get("kind") == "mlp":
        case = mlp_case({k: v for k, v in source.items() if k not in ("kind", "dots")}, device)
    else:
        raise InputError(f"unknown kind of case {source.get('kind')!r}", hint="use rank_mixer, workload or mlp")
    return with_dots(case, source.get("dots", case.dots))


def with_dots(case: Case, dots: str) -> Case:
    """The case with another way to run products, which its facts and source then name."""
    if dots == case.dots:
        return case
    given = {"dots": dots}
    source = {**case.source, **given} if case.source else {}
    return replace(case, dots=dots, name=f"{case.name} dots={dots}", facts={**case.facts, **given}, source=source)


def rank_mixer_package(folder: Path = RANK_MIXER_FOLDER) -> Any:
    """The package ``rank_mixer_src``, from ``folder`` where it is not importable already."""
    try:
        return importlib.import_module(RANK_MIXER_PACKAGE)
    except ModuleNotFoundError:
        sys.path.insert(0, str(folder))
        return importlib.import_module(RANK_MIXER_PACKAGE)


def rank_mixer_case(shape: tuple[int, int, int, int], dtype: str, *, device: str = "cuda", seed: int = SEED) -> Case:
    """Block, input ``[B, T, D]`` and upstream gradient of one shape ``(B, T, D, k)``, with the runner's seeds."""
    package = rank_mixer_package()
    batch, tokens, dim, k = shape
    kind = str(DTYPES[dtype]).removeprefix("torch.")
    config = package.WorkloadConfig(batch_size=batch, tokens=tokens, dim=dim, k=k, dtype=kind, seed=seed)
    made = package.build_workload(config, device=device)
    source = {"kind": "rank_mixer", "shape": list(shape), "dtype": dtype, "seed": seed}
    facts = {"B": batch, "T": tokens, "D": dim, "k": k, "dtype": dtype, "seed": seed}
    name = f"rank_mixer {batch},{tokens},{dim},{k} {dtype}"
    return Case(name, made.block, (made.inputs,), {"overlap": "none"}, (made.grad_output,), batch, facts, source)


def workload_case(
    name: str, dtype: str, *, device: str = "cuda", size: str | Mapping[str, int] = "gpu", seed: int = 0
) -> Case:
    """A workload at one of its named sizes, or at given ones; upstream gradients are normal, from their own seed."""
    workload = get(name)
    module, inputs = workload.make(size, dtype=DTYPES[dtype], device=device, seed=seed)
    sizes = workload.sizes(size)
    cotangents = draw_cotangents(module, inputs, {}, seed + 1000)
    facts = {**sizes, "family": workload.family, "size": size, "dtype": dtype, "seed": seed}
    source = {"kind": "workload", "name": name, "dtype": dtype, "size": size}
    return Case(f"{name} {dtype}", module, inputs, {}, cotangents, sizes["batch"], facts, source)


def parse_shapes(text: str) -> list[tuple[int, int, int, int]]:
    """``"1024,64,1280,2;256,32,512,2"`` as (B, T, D, k) tuples.

    Raises:
        InputError: an entry is not four whole numbers.
    """
    found = []
    for entry in filter(None, (e.strip() for e in text.split(";"))):
        parts = entry.split(",")
        if len(parts) != 4 or not all(p.strip().isdigit() for p in parts):
            raise InputError(f"shape {entry!r} is not B,T,D,k", hint="four whole numbers, shapes separated by ';'")
        batch, tokens, dim, k = (int(p) for p in parts)
        found.append((batch, tokens, dim, k))
    return found
