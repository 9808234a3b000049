"""From options to a callable with example arguments: the RankMixer block, its FFN, a workload or the user's module."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megafuse import workloads
from megafuse.cli.inputs import parse_dtype, parse_input
from megafuse.cli.selection import DEVICES, Selection
from megafuse.core.errors import InputError, TargetError, users_error

BLOCK_SIZES = {
    "small": {"batch": 2, "tokens": 4, "dim": 16, "k": 2},
    "odd": {"batch": 3, "tokens": 5, "dim": 35, "k": 3},
    "full": {"batch": 1024, "tokens": 64, "dim": 1280, "k": 2},
}
SUBGRAPHS = ("dense_ffn_v2",)
META = torch.device("meta")


@dataclass(frozen=True)
class Example:
    """A callable and the arguments of an example call.

    ``samples``: rows of the batch, for rates. ``source``: what ``bench.cases.make_case`` takes to make the same case in
    another process; empty where it cannot.
    """

    title: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    samples: int = 0
    source: dict[str, Any] = field(default_factory=dict)


def pick_device(selection: Selection) -> str:
    """``cuda`` or ``cpu``.

    Raises:
        InputError: an unknown device.
        TargetError: a GPU is asked for and there is none.
    """
    if selection.device not in DEVICES:
        raise InputError(
            f"argument --device: unknown device {selection.device!r}", hint=f"use one of {', '.join(DEVICES)}"
        )
    has_gpu = torch.cuda.is_available()
    if selection.device == "cuda" and not has_gpu:
        raise TargetError("argument --device: cuda asked for, but this PyTorch sees no GPU", hint="use --device cpu")
    return "cuda" if has_gpu and selection.device != "cpu" else "cpu"


def make_example(selection: Selection, size: str, device: str, dtype: str | None = None) -> Example:
    """Build what ``selection`` names at ``size`` (small, odd, full; given sizes win) on ``device`` (meta: no data).

    ``dtype`` stands in where the selection names none.

    Raises:
        InputError: an option does not fit; the message names it.
    """
    named = [n for n in ("module", "workload", "subgraph") if getattr(selection, n)]
    if len(named) > 1:
        raise InputError(f"arguments --{named[0]} and --{named[1]} exclude each other", hint="give one of them")
    if selection.inputs and not selection.module:
        raise InputError("argument --input is given without --module", hint="name the module's factory by --module")
    place = torch.device(device)
    if selection.package and (selection.module or selection.workload):
        raise InputError("argument --package goes with the block alone", hint="leave it out")
    if selection.module:
        return _user_module(selection, place)
    chosen = _floating(selection.dtype or dtype or "bfloat16")
    if selection.workload:
        return _workload(selection, size, place, chosen)
    return _block(selection, size, place, chosen)


def _floating(name: str) -> torch.dtype:
    """The floating-point type that ``--dtype`` names."""
    found = parse_dtype(name, "--dtype")
    if not found.is_floating_point:
        raise InputError(f"argument --dtype: {name} is an integer type", hint="use bfloat16, float16 or float32")
    return found


def _sizes(selection: Selection, defaults: dict[str, int]) -> dict[str, int]:
    unknown = [n for n in selection.sizes if n not in defaults]
    if unknown:
        option = {"batch": "--batch-size"}.get(unknown[0], f"--{unknown[0]}")
        raise InputError(f"argument {option}: this module has no such size", hint=f"it has {', '.join(defaults)}")
    return {**defaults, **selection.sizes}


def find_package(folder: Path | None) -> Any:
    """The module ``rank_mixer_src``, from ``folder`` or the checkout.

    Raises:
        InputError: it is not there.
    """
    checkout = Path(__file__).resolve().parents[3]
    places = (
        [folder]
        if folder
        else [*(p / "rank_mixer" for p in (Path.cwd(), *Path.cwd().parents)), checkout / "rank_mixer"]
    )
    home = next((p for p in places if (p / "rank_mixer_src" / "__init__.py").is_file()), None)
    if home is None:
        where = (
            f"argument --package: {folder} has no rank_mixer_src in it" if folder else "rank_mixer_src was not found"
        )
        hint = "give the folder that holds it (--package DIR), or your own: --module pkg.mod:factory --input 2,4,16"
        raise InputError(where, hint=hint)
    if str(home) not in sys.path:
        sys.path.insert(0, str(home.resolve()))
    return importlib.import_module("rank_mixer_src")


def _block(selection: Selection, size: str, device: torch.device, dtype: torch.dtype) -> Example:
    if selection.subgraph and selection.subgraph not in SUBGRAPHS:
        raise InputError(
            f"argument --subgraph: unknown part {selection.subgraph!r}", hint=f"use {', '.join(SUBGRAPHS)}"
        )
    package = find_package(selection.package)
    sizes = _sizes(selection, BLOCK_SIZES[size])
    if sizes["batch"] < 1:
        raise InputError(f"argument --batch-size: must be at least 1, got {sizes['batch']}")
    torch.manual_seed(selection.seed)
    try:
        block = package.RankMixerBlock(sizes["tokens"], sizes["dim"], sizes["k"], device=device, dtype=dtype)
    except package.ConfigError as error:
        raise InputError(f"argument --{error.argument.replace('_', '-')}: {error.problem}") from error
    x = torch.randn(sizes["batch"], sizes["tokens"], sizes["dim"], device=device, dtype=dtype, requires_grad=True)
    shape = (
        f"B={sizes['batch']} T={sizes['tokens']} D={sizes['dim']} k={sizes['k']} {str(dtype).removeprefix('torch.')}"
    )
    if not selection.subgraph:
        word = str(dtype).removeprefix("torch.")
        source = {"kind": "rank_mixer", "shape": list(sizes.values()), "dtype": word, "seed": selection.seed}
        return Example(f"RankMixer block {shape}", block, (x,), samples=sizes["batch"], source=source)
    ffn = block.ffn
    args = (x, ffn.w1, ffn.b1, ffn.wout, ffn.bout, ffn.norm_x, ffn.norm_gate)
    return Example(f"dense_ffn_v2 {shape}", package.dense_ffn_v2_compute, args, samples=sizes["batch"])


def _workload(selection: Selection, size: str, device: torch.device, dtype: torch.dtype) -> Example:
    if selection.workload not in workloads.names():
        known = ", ".join(workloads.names())
        raise InputError(f"argument --workload: no workload {selection.workload!r}", hint=f"there are: {known}")
    workload = workloads.get(selection.workload)
    sizes = _sizes(selection, dict(workload.sizes("gpu" if size == "full" else size)))
    shape = " ".join(f"{n}={v}" for n, v in sizes.items())
    title = f"{workload.name} {shape} {str(dtype).removeprefix('torch.')}"
    try:
        if device == META:
            module, inputs = _without_data(workload, sizes, dtype)
        else:
            module, inputs = workload.make(sizes, dtype=dtype, device=device, seed=selection.seed)
    except ValueError as error:
        raise InputError(
            f"the sizes {shape} do not fit {workload.name}: {error}", hint="change --dim or --tokens"
        ) from error
    return Example(title, module, inputs, samples=sizes["batch"])


def _without_data(
    workload: workloads.Workload, sizes: dict[str, int], dtype: torch.dtype
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Module and inputs of a workload as meta tensors: nothing of that size is allocated."""
    keywords = {n: v for n, v in sizes.items() if n not in workload.input_sizes}
    with META:
        module = workload.build(**keywords).to(dtype)
    with torch._subclasses.FakeTensorMode():
        fakes = workload.inputs(sizes, dtype=dtype, device=torch.device("cpu"), seed=0, requires_grad=False)
    made = (torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device=META) for f in fakes)
    return module, tuple(t.requires_grad_(t.is_floating_point()) for t in made)


def _user_module(selection: Selection, device: torch.device) -> Example:
    """The user's module. It is built where it will run; plans need no data, but its constructor may."""
    place = torch.device("cpu") if device == META else device
    if not selection.inputs:
        raise InputError(
            "argument --input is missing: --module needs one for each input", hint='such as --input "2,4,16"'
        )
    if selection.sizes:
        option = {"batch": "--batch-size"}.get(next(iter(selection.sizes)), f"--{next(iter(selection.sizes))}")
        raise InputError(f"argument {option} does not go with --module", hint="give the sizes in --input")
    dtype = _floating(selection.dtype) if selection.dtype else None
    factory = _import_factory(str(selection.module))
    torch.manual_seed(selection.seed)
    made = _call_factory(str(selection.module), factory)
    if isinstance(made, nn.Module):
        made = made.to(place, dtype)
    inputs = tuple(parse_input(text, place, selection.dtype or "float32") for text in selection.inputs)
    _check_count(made, inputs)
    return Example(f"{selection.module}({', '.join(selection.inputs)})", made, inputs, samples=_batch(inputs))


def _check_count(made: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    """The callable takes so many inputs, where it tells."""
    try:
        signature = inspect.signature(made.forward if isinstance(made, nn.Module) else made)
    except ValueError:
        return
    try:
        signature.bind(*inputs)
    except TypeError as error:
        name = f"{type(made).__name__}.forward" if isinstance(made, nn.Module) else getattr(made, "__name__", "it")
        raise InputError(
            f"argument --input: {len(inputs)} given, but the call is {name}{signature}: {error}",
            hint="give --input once for each of them, in this order",
        ) from error


def _batch(inputs: tuple[Tensor, ...]) -> int:
    return next((t.shape[0] for t in inputs if t.dim()), 0)


def _import_factory(name: str) -> Any:
    home, _, attribute = name.partition(":")
    if not home or not attribute:
        raise InputError(f"argument --module: {name!r} is not of the form pkg.mod:factory",
                         hint="name a Python module and what in it makes yours: --module models:make_mlp")  # fmt: skip
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(home)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{home}.".startswith(f"{error.name}."):
            raise InputError(
                f"argument --module: cannot import {home!r}: {error}", hint="run from its folder, or set PYTHONPATH"
            ) from error
        raise users_error(error, f"while megafuse imported {home}")  # noqa: B904 (the same error)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"argument --module: {home} has no {attribute!r}",
                             hint=f"it is read from {getattr(found, '__file__', None) or home}")  # fmt: skip
        found = getattr(found, part)
    return found


def _call_factory(name: str, factory: Any) -> Callable[..., Any]:
    """What the factory returns; a module object is taken as it is.

    Raises:
        InputError: it needs arguments, or returns something else. What the factory itself raises passes.
    """
    if isinstance(factory, nn.Module):
        return factory
    hint = "name a function or class that needs no arguments and makes a module or a function"
    if not callable(factory):
        raise InputError(f"argument --module: {name} is of type {type(factory).__name__}, no factory", hint=hint)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise InputError(f"argument --module: {name} cannot be called without arguments: {error}", hint=hint) from error
    except ValueError:
        pass  # it tells no signature
    try:
        made = factory()
    except Exception as error:
        raise users_error(error, f"while megafuse called {name}()")  # noqa: B904 (the same error)
    if not callable(made):
        raise InputError(f"argument --module: {name} returned {type(made).__name__}, not a module or function",
                         hint=hint)  # fmt: skip
    return made  # type: ignore[no-any-return]
