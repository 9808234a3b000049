"""Kernels, library products and opaque calls of a step, described in order of execution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import typical
from megafuse.explanation.coalescing import coalescing
from megafuse.explanation.eager import call_seconds, dot_rate
from megafuse.explanation.records import Call, KernelInfo, LibraryInfo, PhaseInfo, TensorInfo
from megafuse.ir.graph import Node, contiguous_strides
from megafuse.ir.trace import Trace
from megafuse.ir.types import Dot, Opaque, Origin
from megafuse.schedule.types import (
    Buffer,
    ChainPart,
    DotCall,
    DotPart,
    KernelSchedule,
    Launch,
    OpaqueCall,
    PhaseSchedule,
    Step,
    View,
)


@dataclass
class StepReader:
    """Describes the calls of one step.

    ``cost`` gives (weighted results, L2 bytes beside DRAM) of a trace; ``slower`` the seconds by which a generated
    product is predicted to be slower than the library's. ``measured``: seconds of one launch by kernel
    key, where they are known.
    """

    step: Step
    device: DeviceSpec
    cost: Any
    slower: Callable[[Node], float]
    origins: Mapping[str, Origin | None]
    measured: Mapping[str, float]

    def __post_init__(self) -> None:
        self.buffers = {b.name: b for b in self.step.buffers}

    def calls(self) -> tuple[Call, ...]:
        """Forward calls, then backward calls."""
        found = [self._call(c, True) for c in self.step.forward] + [self._call(c, False) for c in self.step.backward]
        return tuple(c for c in found if c is not None)

    def tensor(self, name: str) -> TensorInfo:
        """A buffer by name."""
        b: Buffer = self.buffers[name]
        return TensorInfo(b.name, b.shape, b.dtype.value, typical(math.prod(b.shape)) * b.dtype.size, b.kind)

    def _call(self, call: Any, forward: bool) -> Call | None:
        if isinstance(call, Launch):
            return self._kernel(self.step.kernels[call.kernel], forward)
        if isinstance(call, DotCall):
            return self._dot(call, forward)
        return self._opaque(call, forward) if isinstance(call, OpaqueCall) else None

    def _kernel(self, kernel: KernelSchedule, forward: bool) -> KernelInfo:
        costs = [self.cost(p.trace) for p in kernel.phases]
        memory = kernel.dram_bytes / self.device.dram_bandwidth + sum(c for _, c in costs) / self.device.l2_bandwidth
        work = sum(r for r, _ in costs) / self.device.fp32_rate
        seconds = self.device.launch_seconds + max(memory, work)
        if kernel.dot is not None:
            seconds = self._product_seconds(kernel.dot, kernel.dram_bytes)
        flops, dtype = _flops(kernel)
        if kernel.chain is not None:
            seconds = max(self.device.launch_seconds + memory, call_seconds(self.device, 0, flops, dtype) + work)
        measured = self.measured.get(kernel.key)
        return KernelInfo(
            name=kernel.name,
            forward=forward,
            sources=_sources(p.trace for p in kernel.phases),
            reads=tuple(map(self.tensor, kernel.reads)),
            writes=tuple(map(self.tensor, kernel.writes)),
            phases=tuple(map(_phase, kernel.phases[:1] if kernel.chain else kernel.phases)),
            num_warps=kernel.num_warps,
            dram_bytes=kernel.dram_bytes,
            seconds=seconds,
            measured=measured,
            product=_product(kernel.dot) if kernel.dot else _chain(kernel.chain) if kernel.chain else "",
            num_products=len(_products(kernel)),
            flops=flops,
            shares=self._shares(kernel.dram_bytes, flops, dtype, measured or seconds),
            coalesced=coalescing(kernel.phases, self._strides),
            apart=kernel.apart,
            last_first=kernel.last_first,
        )

    def _shares(self, dram_bytes: int, flops: int, dtype: str, seconds: float) -> tuple[float, float]:
        """What a call uses of the DRAM's bandwidth and of the peak of matrix units."""
        return dram_bytes / self.device.dram_bandwidth / seconds, flops / dot_rate(self.device, dtype) / seconds

    def _strides(self, node: Node) -> Sequence[int]:
        buffer = self.buffers.get(self.step.names.get(node, ""))
        fits = buffer is not None and len(buffer.strides) == len(node.shape)
        return buffer.strides if buffer is not None and fits else contiguous_strides(node.shape)

    def _product_seconds(self, dot: DotPart, moved: int) -> float:
        """The library's time for the product, what a generated one takes longer, and the epilogue's traffic."""
        operands = self._view_bytes(dot.a) + self._view_bytes(dot.b)
        library = call_seconds(self.device, operands, *_flops_of([dot.node]))
        return library + self.slower(dot.node) + (moved - operands) / self.device.dram_bandwidth

    def _dot(self, call: DotCall, forward: bool) -> LibraryInfo:
        batch, m, k = call.a.shape
        n = call.b.shape[2]
        names = {(True, False): "bmm", (True, True): "baddbmm", (False, False): "mm", (False, True): "addmm"}
        bias = f" + {call.bias.buffer}" if call.bias else ""
        views = [call.out, call.a, call.b, *([call.bias] if call.bias else [])]
        moved = sum(self._view_bytes(v) for v in views)
        flops = typical(2 * batch * m * n * k)
        shapes = f"{list(call.a.shape)} x {list(call.b.shape)}"
        dtype = self.buffers[call.out.buffer].dtype.value
        seconds = call_seconds(self.device, moved, flops, dtype)
        return LibraryInfo(
            call=f"torch.{names[batch != 1, call.bias is not None]}",
            what=f"{call.out.buffer} = {call.a.buffer} @ {call.b.buffer}{bias}: {shapes}",
            where=_line(self.origins.get(call.out.buffer)),
            forward=forward,
            is_dot=True,
            flops=flops,
            dram_bytes=moved,
            seconds=seconds,
            shares=self._shares(moved, flops, dtype, seconds),
        )

    def _opaque(self, call: OpaqueCall, forward: bool) -> LibraryInfo:
        made = [r for r in call.results if r is not None]
        moved = sum(self._view_bytes(v) for v in call.args) + sum(self.tensor(r).nbytes for r in made)
        seconds = call_seconds(self.device, moved, 0, "f32")
        return LibraryInfo(
            call=f"ATen call {call.call}",
            what=f"{', '.join(made)}: {call.reason}",
            where=_line(self.origins.get(made[0])) if made else "",
            forward=forward,
            is_dot=False,
            flops=0,
            dram_bytes=moved,
            seconds=seconds,
            shares=self._shares(moved, 0, "f32", seconds),
        )

    def _view_bytes(self, view: View) -> int:
        touched = math.prod(n for n, s in zip(view.shape, view.strides, strict=True) if s != 0)
        return int(typical(touched)) * self.buffers[view.buffer].dtype.size


def _products(kernel: KernelSchedule) -> list[Node]:
    """The matrix products that a kernel computes."""
    if kernel.dot is not None:
        return [kernel.dot.node]
    return [] if kernel.chain is None else [s.node for s in kernel.chain.stages if not isinstance(s, int)]


def _flops(kernel: KernelSchedule) -> tuple[int, str]:
    return _flops_of(_products(kernel))


def _flops_of(dots: Sequence[Node]) -> tuple[int, str]:
    """Floating-point operations of products, and the element type of their operands."""
    flops = sum(typical(2 * math.prod(d.shape) * d.args[0].shape[2]) for d in dots)
    return flops, dots[0].args[0].dtype.value if dots else "f32"


def _chain(chain: ChainPart) -> str:
    """The products of a chain: the widths that its rows go through, and how many sums over the rows it makes."""
    dots = [s for s in chain.stages if not isinstance(s, int)]
    steps = [f"{s.node.args[0].shape[2]} -> {s.node.shape[2]}" for s in dots if s.sums is None]
    sums = [f"{s.node.shape[1]} x {s.node.shape[2]}" for s in dots if s.sums is not None]
    text = f"{chain.walk} by matrices {', '.join(steps)}" if steps else str(chain.walk)
    return f"{text}; sums over the rows: {', '.join(sums)}" if sums else text


def _product(dot: DotPart) -> str:
    bias = f" + {dot.bias.buffer}" if dot.bias else ""
    parts = f", in {dot.splits} parts of {dot.a.shape[2]}" * (dot.splits > 1)
    return f"{dot.a.buffer} @ {dot.b.buffer}{bias}: {list(dot.a.shape)} x {list(dot.b.shape)}{parts}"


def _phase(phase: PhaseSchedule) -> PhaseInfo:
    space = phase.trace.nest.space
    tile = phase.tile
    return PhaseInfo(space.num_rows, space.num_cols, tile.row_tile, tile.pieces, tile.why, tile.abreast)


def _line(origin: Origin | None) -> str:
    return "" if origin is None else f"{origin}" + (f": {origin.code}" if origin.code else "")


def _sources(traces: Iterable[Trace]) -> tuple[str, ...]:
    """The user's lines that kernels compute, in order of first use."""
    insts = (i for t in traces for i in t.insts if i.computes)
    return tuple(dict.fromkeys(line for i in insts if (line := _line(i.node.origin))))


def buffer_origins(step: Step) -> dict[str, Origin | None]:
    """The user's line of each buffer's value."""
    return {name: node.origin for node, name in step.names.items()}


def recomputed_in_backward(step: Step, forward: frozenset[Node]) -> int:
    """How many forward values (other than those read from memory) the backward kernels compute again."""
    launched = [step.kernels[c.kernel] for c in step.backward if isinstance(c, Launch)]
    insts = (i for k in launched for p in k.phases for i in p.trace.insts if i.computes)
    return len({i.node for i in insts if i.node in forward and not i.node.is_a(Dot, Opaque)})
