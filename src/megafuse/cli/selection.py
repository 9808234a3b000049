"""Which module a command works on, at which sizes: the options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

DEVICES = ("auto", "cpu", "cuda")

_OPTIONS: dict[str, Any] = {
    "package": Annotated[Path | None, typer.Option(help="folder that holds rank_mixer_src (default: the checkout's)")],
    "subgraph": Annotated[str | None, typer.Option(help="a part of the block: dense_ffn_v2")],
    "module": Annotated[
        str | None, typer.Option(help="your own: pkg.mod:factory, where factory() makes a module or a function")
    ],
    "inputs": Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="input of --module, once for each: shape, type (8,5:int64), and no_grad where it needs no gradient "
            "(2,4,16:bfloat16:no_grad)",
        ),
    ],
    "workload": Annotated[str | None, typer.Option(help="a module of megafuse.workloads, by name")],
    "batch_size": Annotated[int | None, typer.Option(help="batch size B of the block or a workload")],
    "tokens": Annotated[int | None, typer.Option(help="tokens T of the block or a workload")],
    "dim": Annotated[int | None, typer.Option(help="width D of the block (a multiple of T) or a workload")],
    "k": Annotated[int | None, typer.Option(help="hidden factor k of the block or a workload, H = k * D")],
    "dtype": Annotated[
        str | None,
        typer.Option(
            help="bfloat16 (or bf16), float16 (fp16), float32 (fp32): of parameters, and of inputs that name no type"
        ),
    ],
    "seed": Annotated[int, typer.Option(help="seed of parameters and inputs")],
    "device": Annotated[str, typer.Option(help="where it runs: auto (a GPU if there is one), cpu or cuda")],
    "dots": Annotated[str, typer.Option(help="library, or auto: generated products where predicted to be faster")],
}


@dataclass(frozen=True)
class Selection:
    """The shared options as given on the command line; None: not given."""

    package: Path | None = None
    subgraph: str | None = None
    module: str | None = None
    inputs: tuple[str, ...] = ()
    workload: str | None = None
    batch_size: int | None = None
    tokens: int | None = None
    dim: int | None = None
    k: int | None = None
    dtype: str | None = None
    seed: int = 1234
    device: str = "auto"
    dots: str = "library"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that were given, under the names that workloads use."""
        given = {"batch": self.batch_size, "tokens": self.tokens, "dim": self.dim, "k": self.k}
        return {name: size for name, size in given.items() if size is not None}


def takes_selection(command: Callable[..., None], *, device: bool = True) -> Callable[..., None]:
    """Give a command the shared options in place of its first parameter, a :class:`Selection`.

    ``device``: whether it can be told where to run.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    names = [f.name for f in fields(Selection) if device or f.name != "device"]

    @functools.wraps(command)
    def run(**options: Any) -> None:
        given = {name: options.pop(name) for name in names}
        command(Selection(**given | {"inputs": tuple(given["inputs"] or ())}), **options)

    defaults = {f.name: None if f.name == "inputs" else f.default for f in fields(Selection)}
    shared = [_parameter(name, defaults[name]) for name in names]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shared
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


plans_selection = functools.partial(takes_selection, device=False)  # for commands that run nothing, or on a GPU alone


def _parameter(name: str, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_OPTIONS[name])
