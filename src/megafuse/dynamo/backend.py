"""The backend: one engine for each graph that Dynamo records. Shapes compile when they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megafuse.api import make_engine
from megafuse.capture.recorded import RecordedFunction
from megafuse.compiler import NotFusedWarning, Options, resolve_target
from megafuse.core.errors import CaptureError, InputError, UnsupportedError
from megafuse.core.warn import warn_user
from megafuse.dynamo.options import parse_options
from megafuse.dynamo.region import Region, cut

MAX_SCALARS = 16  # values of plain numbers for which one graph is compiled anew
ON_CPU = (
    "the tensors are on the CPU; the original ops run (options={'target': 'interpret'} executes the generated code)"
)


def backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph of ``torch.compile(fn, backend="megafuse", options={...})``.

    Args:
        gm: the graph, as Dynamo records it.
        example_inputs: stand-ins of its inputs.
        options: the keyword options of :func:`megafuse.fuse` by name.
        mode: not supported.

    Returns:
        A callable that takes the graph's inputs and returns its outputs. What cannot be fused runs as it is and is said
        in a ``NotFusedWarning``, or raises with ``strict``.

    Raises:
        InputError: an option or its value is unknown.
        UnsupportedError: ``strict`` and the graph cannot be fused.
    """
    parsed = parse_options(options, mode)
    if parsed.target == "auto" and resolve_target("auto", _device(example_inputs)) == "original":
        warn_user(ON_CPU, NotFusedWarning)
        return gm.forward
    region = cut(gm)
    if isinstance(region, str):
        if parsed.strict:
            raise UnsupportedError(f"a graph cannot be fused: {region}", hint="leave out strict to run it as it is")
        warn_user(_not_fused(region), NotFusedWarning)
        return gm.forward
    return CompiledGraph(gm, region, parsed) if region.computes else gm.forward


def _device(inputs: Sequence[Any]) -> torch.device:
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    return next((t.device for t in tensors if t.dim()), torch.device("cpu"))


def _not_fused(reason: str) -> str:
    return f"one graph of a compiled function runs as it is: {reason}"


class CompiledGraph:
    """Serves the calls of one Dynamo graph."""

    def __init__(self, gm: torch.fx.GraphModule, region: Region, options: Options) -> None:
        self.gm, self.region = gm, region
        self.engine = make_engine(RecordedFunction(region.body, region.names), options)
        self.seen: set[tuple[Any, ...]] = set()  # values of the plain numbers so far
        self.unfused = ""  # why the graph runs as it is

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs. The first call of each shape compiles."""
        if self.unfused:
            return self.gm(*args)
        given = tuple(read(args) for read in self.region.reads)
        if self.region.scalars and not self._known(given):
            return self.gm(*args)
        try:
            results = self.engine(given, {})
        except (CaptureError, InputError) as error:  # nothing has run yet
            if self.engine.options.strict:
                raise
            self._give_up(str(error))
            return self.gm(*args)
        return self.region.finish(*args, *results) if self.region.finish else results

    def _known(self, given: tuple[Any, ...]) -> bool:
        """These values of the plain numbers are, or may be, compiled for."""
        values = tuple(given[i] for i in self.region.scalars)
        if values not in self.seen:
            if len(self.seen) >= MAX_SCALARS:
                self._give_up(f"a number among its inputs took more than {MAX_SCALARS} values; pass it as a tensor")
                return False
            self.seen.add(values)
        return True

    def _give_up(self, reason: str) -> None:
        self.unfused = reason
        warn_user(_not_fused(reason), NotFusedWarning)
