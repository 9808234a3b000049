"""The driver: every stage in order. The only module that knows more than one of them.

capture -> rewrite -> covers -> select -> step -> tile programs -> text
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megafuse.capture.api import capture
from megafuse.capture.types import Captured
from megafuse.codegen.artifact import Artifact, KernelSource
from megafuse.codegen.chain_lower import lower_schedule
from megafuse.codegen.chain_program import ChainProgram
from megafuse.codegen.dot_program import DotProgram
from megafuse.codegen.host import print_host
from megafuse.codegen.numpy import print_kernel as print_numpy
from megafuse.codegen.program import TileProgram
from megafuse.codegen.triton import print_kernel as print_triton
from megafuse.compiler.budget import Planned, within_budget
from megafuse.core.device import DeviceSpec
from megafuse.core.errors import InputError, MegafuseError, VerifyError
from megafuse.core.sizes import OpenSize
from megafuse.fusion.epilogue import LIBRARY, DotRule
from megafuse.fusion.plan import Cover
from megafuse.fusion.planner import CoverOption, cover_options
from megafuse.ir.analysis import compares_for_equality
from megafuse.ir.copies import with_copies
from megafuse.ir.graph import Graph
from megafuse.ir.rewrite import rewrite
from megafuse.ir.rules import SIMPLIFY
from megafuse.ir.rules_concat import CONCAT_RULES
from megafuse.ir.rules_long import LONG_RULES
from megafuse.ir.verify import verify
from megafuse.schedule.choice import Known, nothing_known
from megafuse.schedule.memory import MemoryUse, memory_use
from megafuse.schedule.step import build_step, wanted_strides
from megafuse.schedule.types import Step
from megafuse.select.choose import Selection, select

RECURSION_LIMIT = 50_000
PRINTERS: dict[str, Callable[..., KernelSource]] = {"triton": print_triton, "numpy": print_numpy}


@dataclass(frozen=True)
class Compiled:
    """Every intermediate value of one compilation; ``seconds`` by stage.

    ``measured``: seconds of one launch of kernels that were timed with the tiles they have, by kernel key.
    """

    captured: Captured
    graph: Graph
    cover: Cover
    step: Step
    programs: tuple[TileProgram | DotProgram | ChainProgram, ...]
    device: DeviceSpec
    selection: Selection
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def memory(self) -> MemoryUse:
        """The memory that a step takes, predicted."""
        return memory_use(self.step)

    def alike(self, source: KernelSource) -> KernelSource:
        """``source`` as all kernels of this step are compiled.

        Where fp32 values are compared for equality (gradients of extremes), what several kernels compute of a value
        must be the same to the bit; a compiler contracts in one kernel what it does not contract in another.
        """
        return source.uncontracted() if compares_for_equality(self.graph) else source

    def artifact(self, backend: str, *, interpreted: bool = False) -> Artifact:
        """Kernel and launch text for ``backend`` ("triton" or "numpy"); ``interpreted``: for Triton's interpreter.

        Raises:
            InputError: no such back end.
        """
        if backend not in PRINTERS:
            raise InputError(f"unknown back end {backend!r}", hint=f"use one of {', '.join(PRINTERS)}")
        options = {"assembly": False} if interpreted and backend == "triton" else {}
        kernels = tuple(self.alike(PRINTERS[backend](p, **options)) for p in self.programs)
        host = print_host(self.step, [k.entry for k in kernels], tangent_base=len(self.captured.leaves))
        return Artifact(kernels, host)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, stage: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one stage and note how long it took."""
        start = time.perf_counter()
        out = fn(*args, **kwargs)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
        return out

    def run(self, stage: str, fn: Callable[..., Any], *args: Any) -> Any:
        """Run a stage behind capture: what it raises that is no error of ours is a bug of ours, and named as such."""
        try:
            with deep_recursion(), without_collector():
                return self.time(stage, fn, *args)
        except (MegafuseError, OpenSize):
            raise
        except Exception as error:
            what = f"the {stage} stage failed: {type(error).__name__}: {error}"
            raise VerifyError(
                what, hint="this is a bug in megafuse: report it; the original callable still runs"
            ) from error


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Room for recursion over long chains of ops (frames of pure Python calls live on the heap)."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, RECURSION_LIMIT))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@contextmanager
def without_collector() -> Iterator[None]:
    """No search for cyclic garbage: planning makes many objects and no cycles, and a search visits all of PyTorch's."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def compile_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: DeviceSpec,
    *,
    strict: bool = False,
    dots: DotRule = LIBRARY,
    known: Known = nothing_known,
    memory_budget: int | None = None,
) -> Compiled:
    """Run all stages up to tile programs for one example call. The options are those of ``compile_captured``.

    Raises:
        CaptureError, InputError, UnsupportedError: see :func:`megafuse.capture.api.capture`.
        VerifyError: a stage broke an invariant (a bug in megafuse).
    """
    clock = _Clock()
    captured: Captured = clock.time("capture", capture, fn, args, kwargs, strict=strict)
    return compile_captured(captured, device, clock, known, dots, memory_budget)


def compile_captured(
    captured: Captured,
    device: DeviceSpec,
    clock: _Clock | None = None,
    known: Known = nothing_known,
    dots: DotRule = LIBRARY,
    memory_budget: int | None = None,
) -> Compiled:
    """Run the stages behind capture.

    ``known(key)``: tiles to take for a kernel in place of the heuristic's. ``memory_budget``: bytes that a step may
    have allocated at a time; saved values are computed again in backward where this is needed to keep within it.
    """
    clock = clock or _Clock()
    verify(captured.graph)
    graph: Graph = clock.run("rewrite", rewrite, captured.graph, (*SIMPLIFY, *CONCAT_RULES), "simplify")
    graph = clock.run("long reductions", rewrite, graph, LONG_RULES, "long reductions")
    verify(graph)
    graph = with_copies(graph, captured.out_alias, captured.out_shared)
    wanted = wanted_strides(graph, captured.out_strides)

    def plan(graph: Graph) -> Planned:
        options: tuple[CoverOption, ...] = clock.run("fusion", cover_options, graph, wanted, device, dots)
        selection = select([o.name for o in options], {o.name: o.seconds for o in options})
        cover = next(o for o in options if o.name == selection.chosen).cover()
        return Planned(graph, selection, cover, clock.run("schedule", build_step, cover, device, known))

    planned = plan(graph)
    if memory_budget is not None:
        planned = within_budget(planned, memory_budget, plan, device)
    programs = clock.run("codegen", _lower, planned.step)
    chosen = (planned.graph, planned.cover, planned.step, programs)
    return Compiled(captured, *chosen, device, planned.selection, clock.seconds)


def reschedule(compiled: Compiled, known: Known, *, finishers_alone: bool = False) -> Compiled:
    """The same cover with other tiles: schedule and code again.

    ``finishers_alone``: kernels that add up the sums of a kernel with a key have launches of their own.
    """
    clock = _Clock()
    build = partial(build_step, finishers_alone=finishers_alone)
    step: Step = clock.run("schedule", build, compiled.cover, compiled.device, known)
    return replace(compiled, step=step, programs=clock.run("codegen", _lower, step), measured={})


def _lower(step: Step) -> tuple[TileProgram | DotProgram | ChainProgram, ...]:
    buffers = {b.name: b for b in step.buffers}
    return tuple(lower_schedule(k, buffers, step.names) for k in step.kernels)
