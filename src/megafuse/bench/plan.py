"""Facts of a compiled step: its kernels with predicted DRAM bytes, its library products, its coverage."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from megafuse.api import engine_of
from megafuse.bench.step import Case
from megafuse.compiler import Compiled


@dataclass(frozen=True)
class PlannedKernel:
    """A generated kernel; ``bytes`` are predicted DRAM bytes of one launch."""

    name: str
    launches: int
    bytes: int


@dataclass(frozen=True)
class PlanFacts:
    """What the plan says of one step, forward and backward. Bytes are predictions, each region of a buffer once.

    ``dots`` run in the library, ``generated_dots`` in generated kernels (those computed again counted again).
    ``coverage_by_elements``: share of the pointwise and reduction results (floating-point, elements counted, dots left
    out) that generated kernels compute. ``coverage_by_calls``: share of the captured ATen calls that have a converter.
    """

    kernels: tuple[PlannedKernel, ...] = ()
    kernel_bytes: int = 0
    dots: int = 0
    dot_bytes: int = 0
    generated_dots: int = 0
    opaque_calls: int = 0
    opaque: tuple[str, ...] = ()
    coverage_by_elements: float = 0.0
    coverage_by_calls: float = 0.0
    compile_seconds: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of generated kernels and library products."""
        return self.kernel_bytes + self.dot_bytes

    def as_dict(self, input_bytes: int = 0) -> dict[str, Any]:
        """All facts, with bytes per input tensor where its bytes are given."""
        found = asdict(self) | {"total_bytes": self.total_bytes}
        if input_bytes:
            found["kernel_bytes_per_input"] = self.kernel_bytes / input_bytes
            found["total_bytes_per_input"] = self.total_bytes / input_bytes
        return found


def plan_facts(fused: Any) -> PlanFacts:
    """Facts of the binding that ``fuse`` made for its example call."""
    bindings = engine_of(fused).bindings
    if not bindings:
        return PlanFacts(reason="never called")
    bound = bindings[0]
    return PlanFacts(reason=bound.reason) if bound.compiled is None else compiled_facts(bound.compiled)


def compiled_facts(compiled: Compiled) -> PlanFacts:
    """Facts of one compilation."""
    step, captured = compiled.step, compiled.captured
    calls: list[Any] = [*step.forward, *step.backward]
    launched = [call.kernel for call in calls if kind_of(call) == "Launch"]
    kernels = tuple(
        PlannedKernel(k.name, launched.count(i), k.dram_bytes) for i, k in enumerate(step.kernels) if i in launched
    )
    dots = [call for call in calls if kind_of(call) == "DotCall"]
    sizes = {b.name: b.dtype.size for b in step.buffers}
    views = [v for d in dots for v in (d.out, d.a, d.b, d.bias) if v is not None]
    aten, opaque = captured.support.aten_calls, captured.support.opaque
    return PlanFacts(
        kernels=kernels,
        kernel_bytes=sum(k.launches * k.bytes for k in kernels),
        dots=len(dots),
        dot_bytes=sum(math.prod(v.shape) * sizes[v.buffer] for v in views),
        generated_dots=sum(_dots_of(step.kernels[number]) for number in launched),
        opaque_calls=sum(kind_of(call) == "OpaqueCall" for call in calls),
        opaque=tuple(str(entry) for entry in opaque),
        coverage_by_elements=_coverage(compiled.graph.nodes),
        coverage_by_calls=1 - len(opaque) / aten if aten else 1.0,
        compile_seconds=dict(compiled.seconds),
    )


def _dots_of(kernel: Any) -> int:
    """Dots of a generated kernel: its own, or those between the phases of a chain."""
    chain = () if kernel.chain is None else kernel.chain.stages
    return (kernel.dot is not None) + sum(not isinstance(stage, int) for stage in chain)


def kind_of(value: Any) -> str:
    """Class name of a step's call or a node's attributes: benchmarks read plans, they do not import stages."""
    return type(value).__name__


def _coverage(nodes: Iterable[Any]) -> float:
    generated = opaque = 0
    for node in nodes:
        kind, elements = kind_of(node.attrs), math.prod(node.shape)
        if kind in ("Map", "Cast") and node.dtype.is_float:
            generated += elements
        elif kind == "Reduce" and node.dtype.is_float:
            generated += math.prod(node.args[0].shape)
        elif kind in ("Opaque", "Pick") and node.dtype.is_float:
            opaque += elements
    return generated / (generated + opaque) if generated + opaque else 1.0


def input_bytes(case: Case) -> int:
    """Bytes of the case's inputs that require grad: the unit of "bytes per tensor"."""
    return sum(t.nbytes for t in case.inputs())
