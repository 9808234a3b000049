"""A step as two CUDA graphs, forward and backward: recorded once, then replayed by one call of the host each.

* **Inputs** that are found at the same addresses at every call (parameters, as a rule) are read where they are; others
  are copied into buffers of the graph, unless they are those buffers.
* **Outputs and gradients** are copied out, so that no later replay writes over what the caller holds.
* **Saved tensors** are the graph's own. While a backward that needs them may still come, further forwards run without
  the graph: a *ticket*, held by the autograd node, stands for that backward.
* A step that cannot be recorded runs without a graph and says so, once.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megafuse.runtime.direct import stream_reader
from megafuse.runtime.step import Layout, LoadedStep, Tensors
from megafuse.runtime.tensors import Empty, allocator, same_layout, short_cuts

WARM_UP = 2  # calls before a graph is recorded: kernels are compiled in them, and addresses compared
MOST_RECORDINGS = 3  # of one step with inputs read in place; then all inputs are copied
MOST_GRAPHS = 16  # steps of one fused callable (shapes, flags) that get graphs
WITHOUT = "cuda_graph=True: {}; these calls run without a graph"
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


class Recorder(Protocol):
    """Makes graphs of work."""

    def stream(self) -> int:
        """The current stream."""

    def busy(self) -> bool:
        """The current stream is being recorded already, by somebody else."""

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Run ``work`` without effect; returns what replays it, and its result, which each replay writes again."""


class CudaRecorder:
    """Graphs of PyTorch's CUDA streams; those that live at the same time share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._newest: Callable[[], torch.cuda.CUDAGraph | None] = lambda: None
        self._stream = stream_reader(device)

    def stream(self) -> int:
        """The raw handle of the current stream."""
        return self._stream()

    def busy(self) -> bool:
        """The current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture ``work`` on a side stream; other threads may go on."""
        newest = self._newest()  # the pool of a graph that is gone cannot be used again
        try:
            graph, result = self._captured(work, None if newest is None else newest.pool())
        except Exception:
            self._recover()
            raise
        self._newest = weakref.ref(graph)
        return graph.replay, result

    def _captured(self, work: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            return graph, work()

    def _recover(self) -> None:
        """A capture that fails leaves PyTorch's generators set to *being captured*; one that succeeds resets them."""
        with contextlib.suppress(RuntimeError):
            self._captured(lambda: torch.zeros(1, device=self.device), None)


@dataclass
class Budget:
    """How many more steps of one fused callable may get graphs."""

    left: int = MOST_GRAPHS
    said: bool = False

    def take(self) -> bool:
        """One less; False, and a warning the first time, where none is left."""
        if self.left:
            self.left -= 1
            return True
        if not self.said:
            self.said = True
            what = f"{MOST_GRAPHS} graphs were recorded for calls of other shapes or settings"
            warnings.warn(WITHOUT.format(what), UserWarning, stacklevel=2)
        return False


class Ticket:
    """Stands for a backward that needs what a graph's forward saved; gone once that can no longer come."""


class Saved(list[Tensor | None]):
    """Saved tensors, with the ticket of the replay that wrote them; None: they belong to nobody else."""

    ticket: Ticket | None = None


class Copier:
    """Copies of a graph's tensors, made anew at each call; what is one tensor among them stays one."""

    def __init__(self, tensors: Sequence[Tensor | None] = ()) -> None:
        kinds = {id(t): t for t in tensors if t is not None}
        order = {key: n for n, key in enumerate(kinds)}
        self.places = [None if t is None else order[id(t)] for t in tensors]
        alike = [torch.empty_like(t) for t in kinds.values()]
        self.layouts: list[Layout] = [(tuple(t.shape), t.stride(), t.dtype) for t in alike]
        self.groups: list[tuple[list[Tensor], list[int]]] = []  # by element type, with positions among the layouts
        for dtype in dict.fromkeys(t.dtype for t in alike):
            members = [n for n, t in enumerate(kinds.values()) if t.dtype is dtype]
            self.groups.append(([[*kinds.values()][n] for n in members], members))
        device = alike[0].device if alike else torch.device("cpu")
        self.empty: Empty = short_cuts(device).get("empty") or allocator(device)

    def __call__(self) -> Tensors:
        """The copies, on the current stream."""
        new = [self.empty(*layout) for layout in self.layouts]
        for sources, members in self.groups:
            if len(members) == 1:
                new[members[0]].copy_(sources[0])
            else:
                torch._foreach_copy_([new[n] for n in members], sources)
        return [None if n is None else new[n] for n in self.places]


@dataclass
class Recorded:
    """Graphs of one step. ``fixed``: inputs read in place, with addresses; ``copied``: the buffers of the others.

    They are replayed on the ``stream`` of their first use alone, since all replays share buffers.
    """

    stream: int
    fixed: list[tuple[int, int]]
    copied: list[tuple[int, Tensor]]
    saved_inputs: tuple[int, ...]
    replay: Callable[[], None] = lambda: None
    outputs: Copier = field(default_factory=Copier)
    saved: list[Tensor | None] = field(default_factory=list)
    tangents: dict[int, Tensor] = field(default_factory=dict)
    replay_backward: Callable[[], None] = lambda: None
    grads: Copier = field(default_factory=Copier)

    def moved(self, inputs: Sequence[Any]) -> set[int]:
        """Inputs that are no longer where the graph reads them."""
        return {n for n, address in self.fixed if inputs[n].data_ptr() != address}

    def forward(self, inputs: Sequence[Any]) -> tuple[Tensors, Saved]:
        """Outputs and saved tensors."""
        for n, buffer in self.copied:
            _fill(buffer, inputs[n])
        self.replay()
        given = [inputs[n] if n >= 0 else t for n, t in zip(self.saved_inputs, self.saved, strict=True)]
        return self.outputs(), Saved(given)

    def backward(self, tangents: Sequence[Tensor | None]) -> Tensors:
        """Gradients; a tangent that is None is zero."""
        for n, buffer in self.tangents.items():
            tangent = tangents[n]
            if tangent is None:
                buffer.zero_()
            else:
                _fill(buffer, tangent)
        self.replay_backward()
        return self.grads()


def _fill(buffer: Tensor, tensor: Tensor) -> None:
    if buffer.data_ptr() != tensor.data_ptr() or not same_layout(tensor, buffer.stride()):
        buffer.copy_(tensor)


def graphed(step: LoadedStep, budget: Budget) -> LoadedStep | GraphedStep:
    """``step`` by graphs; as it is, with a warning, on the CPU."""
    if step.device.type == "cuda":
        return GraphedStep(step, CudaRecorder(step.device), budget)
    warnings.warn(WITHOUT.format("the tensors are on the CPU"), UserWarning, stacklevel=2)
    return step


class GraphedStep:
    """A loaded step by graphs where that is possible; to be called like a ``LoadedStep``."""

    def __init__(self, plain: LoadedStep, recorder: Recorder, budget: Budget) -> None:
        self.plain, self.recorder, self.budget = plain, recorder, budget
        self.device, self.target, self.artifact, self.notes = plain.device, plain.target, plain.artifact, plain.notes
        self.has_backward = plain.has_backward
        self.saved_inputs, self.saved_strides = plain.saved_inputs, plain.saved_strides
        self.overwritten, self.returned_again = plain.overwritten, plain.returned_again
        self.recorded: Recorded | None = None
        self.recordings = 0
        self.reason = "backward writes over saved memory" if plain.overwritten else ""
        self._addresses: list[int] = []
        self._moving: set[int] = set()
        self._calls = 0
        self._ticket: Callable[[], Ticket | None] = lambda: None
        self._lock = threading.RLock()

    def forward(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """``(outputs, saved)``; the list is emptied."""
        with self._lock:
            recorded = self._ready(inputs)
            if recorded is None:
                return self.plain.forward(inputs)
            outputs, saved = recorded.forward(inputs)
            inputs.clear()
            saved.ticket = Ticket()
            self._ticket = weakref.ref(saved.ticket)
            return outputs, saved

    def backward(self, saved: Tensors, tangents: Tensors) -> Tensors:
        """Gradients; the lists are emptied."""
        ticket = getattr(saved, "ticket", None)
        with self._lock:
            if ticket is None or self._ticket() is not ticket or self.recorded is None or self._listened():
                return self.plain.backward(saved, tangents)
            grads = self.recorded.backward(tangents)
            saved.clear()
            tangents.clear()
            return grads

    def _listened(self) -> bool:
        """Somebody records, or wants to see, the single launches."""
        return bool(_modes()) or self.recorder.busy()

    def _ready(self, inputs: Tensors) -> Recorded | None:
        """The graphs, if this call may be a replay of them."""
        if self.reason or self._listened() or self._ticket() is not None:
            return None
        if self.recorded is not None:
            if self.recorder.stream() != self.recorded.stream:
                return None
            moved = self.recorded.moved(inputs)
            if not moved:
                return self.recorded
            self._moving |= moved
            self.recorded = None
        elif not self._warm(inputs):
            return None
        return self._record(inputs)

    def _warm(self, inputs: Tensors) -> bool:
        """Compare addresses with those of the last call; True after enough calls."""
        addresses = [t.data_ptr() for t in inputs if t is not None]
        if self._calls:
            self._moving |= {n for n, (a, b) in enumerate(zip(addresses, self._addresses, strict=True)) if a != b}
        self._addresses = addresses
        self._calls += 1
        return self._calls > WARM_UP

    def _record(self, inputs: Tensors) -> Recorded | None:
        if self.recordings == 0 and not self.budget.take():
            self.reason = "no further graphs"
            return None
        self.recordings += 1
        try:
            self.recorded = self._recorded([t for t in inputs if t is not None])
        except Exception as error:
            self._give_up(
                f"this step cannot be recorded: {type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
            )
        return self.recorded

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        warnings.warn(WITHOUT.format(reason), UserWarning, stacklevel=2)

    def _recorded(self, inputs: list[Tensor]) -> Recorded | None:
        """Record forward, and backward behind it, on buffers of the graphs' own."""
        every = self.recordings > MOST_RECORDINGS
        copied = {n: _like(t) for n, t in enumerate(inputs) if every or n in self._moving}
        given = [copied.get(n, t) for n, t in enumerate(inputs)]
        fixed = [(n, t.data_ptr()) for n, t in enumerate(inputs) if n not in copied]
        made = Recorded(self.recorder.stream(), fixed, list(copied.items()), self.saved_inputs)
        if self.has_backward:
            made.tangents = {n: _tangent(layout, self.device) for n, layout in self.plain.tangents.items()}
        self._rehearse(given, made)
        made.replay, (outputs, made.saved) = self.recorder.record(lambda: self.plain.forward(list(given)))
        storages = {t.untyped_storage().data_ptr() for t in given}
        if any(o is not None and o.untyped_storage().data_ptr() in storages for o in outputs):
            self._give_up("an output of this step is memory of an input")
            return None
        made.outputs = Copier(outputs)
        if self.has_backward:
            made.replay_backward, grads = self.recorder.record(
                lambda: self.plain.backward(list(made.saved), _listed(made.tangents))
            )
            made.grads = Copier(grads)
        return made

    def _rehearse(self, given: list[Tensor], made: Recorded) -> None:
        """Run everything once on this thread: what is compiled or set up at a first call cannot be recorded."""
        _, saved = self.plain.forward(list(given))
        if self.has_backward:
            self.plain.backward(saved, _listed(made.tangents))


def _like(tensor: Tensor) -> Tensor:
    """A buffer with the same strides and values."""
    buffer = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return buffer.copy_(tensor.detach())


def _tangent(layout: Layout, device: torch.device) -> Tensor:
    shape, strides, dtype = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


def _listed(tangents: dict[int, Tensor]) -> Tensors:
    return [tangents.get(n) for n in range(max(tangents, default=-1) + 1)]
