"""``explain``: from compiled values to records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megafuse.api import engine_of
from megafuse.compiler import Bound, Compiled
from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import open_dims, settle, typical
from megafuse.explanation.boundaries import kernel_of_nests, step_edges, sums_legend
from megafuse.explanation.calls import StepReader, buffer_origins, recomputed_in_backward
from megafuse.explanation.eager import EagerEstimate, estimate_eager
from megafuse.explanation.legend import legend
from megafuse.explanation.records import Coverage, Edge, Explanation, PlanInfo
from megafuse.explanation.resources import compiled_resources, with_resources
from megafuse.explanation.text import format_explanation
from megafuse.fusion.cost import nest_cost
from megafuse.fusion.epilogue import slower_by
from megafuse.ir.graph import Graph, Node
from megafuse.ir.trace import Trace
from megafuse.ir.types import Cast, Input, Map, Opaque, Reduce

MAX_SIZES = 12
_NODE = re.compile(r"%(\d+):(\w+)")
_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
           "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
           "bool": torch.bool}  # fmt: skip


def explain(fused: Any, *, resources: bool = False) -> Explanation:
    """Describe every binding of what ``fuse`` returned: kernels, boundaries and why, bytes and predicted time.

    Args:
        fused: what ``fuse`` returned, or a module of ``megafuse.nn``.
        resources: compile the kernels for the plan's device, with or without a GPU (about a second each), and show
            registers, spills, shared memory, occupancy and the limiting resource.

    Raises:
        InputError: ``fused`` did not come from ``fuse``.
    """
    engine = engine_of(fused)
    owner = getattr(engine.original, "__self__", None)  # a module is served through its bound forward
    subject = type(owner).__name__ if owner is not None else getattr(engine.original, "__name__", "callable")
    plans = tuple(_explain_bound(b, subject, resources, engine.sizes_served(b)) for b in engine.bindings)
    return Explanation(subject, plans, format_explanation(subject, plans))


def _explain_bound(bound: Bound, subject: str, resources: bool, sizes: Sequence[Mapping[str, int]]) -> PlanInfo:
    compiled = bound.compiled
    if compiled is None or bound.spec is None:
        return PlanInfo(subject, reason=bound.reason)
    plan = explain_compiled(compiled, eager_of(compiled, bound.spec.original))
    served = ", ".join("x".join(map(str, s.values())) for s in sizes[:MAX_SIZES])
    more = f" and {len(sizes) - MAX_SIZES} more" if len(sizes) > MAX_SIZES else ""
    plan = replace(plan, serves=f"{' x '.join(sizes[0])} = {served}{more}") if sizes else plan
    if bound.interpreted:
        kind = "NumPy" if bound.interpreted == "numpy" else "Triton's interpreter, which is NumPy"
        plan = replace(plan, runs_as=f"{kind} on the CPU (target='interpret'), not on that GPU")
    return with_resources(plan, compiled_resources(compiled), compiled.device) if resources else plan


def explain_compiled(compiled: Compiled, eager: EagerEstimate | None = None) -> PlanInfo:
    """Describe one compilation."""
    step, cover, device = compiled.step, compiled.cover, compiled.device

    def slower(dot: Node) -> float:
        return slower_by(dot, device)

    reader = StepReader(step, device, _costs(device), slower, buffer_origins(step), compiled.measured)
    homes = kernel_of_nests(step, cover.nests)
    names = _names(compiled)
    edges = [Edge(homes[b.first], homes[b.second], _readable(b.reason, names)) for b in cover.boundaries]
    return PlanInfo(
        title=_title(compiled),
        device=f"{device.name} (sm_{device.arch})",
        calls=reader.calls(),
        edges=step_edges(step, edges),
        decisions=tuple(_readable(d, names) for d in cover.decisions),
        notes=step.notes,
        saved=tuple(map(reader.tensor, step.saved)),
        peak_bytes=compiled.memory.peak,
        recomputed=recomputed_in_backward(step, compiled.graph.forward_nodes()),
        candidates=compiled.selection.table,
        opaque=tuple(map(str, compiled.captured.support.opaque)),
        coverage=coverage(compiled.graph),
        eager=eager,
        compile_seconds=dict(compiled.seconds),
        names=(*legend(compiled, {n.uid: _describe(n) for n in compiled.graph.nodes}), *sums_legend(step)),
    )


def eager_of(compiled: Compiled, original: Any) -> EagerEstimate | None:
    """Eager's estimate from the function that runs the original ops on other tensors."""
    sizes = {d.name: d.typical for d in open_dims(compiled.captured.leaves)}
    leaves = settle(compiled.captured.leaves, sizes)
    inputs = [
        torch.empty_strided(leaf.type.shape, leaf.strides, dtype=_DTYPES[leaf.type.dtype.value], device="meta")
        for leaf in leaves
    ]
    for tensor, leaf in zip(inputs, leaves, strict=True):
        tensor.requires_grad_(leaf.requires_grad)
    return estimate_eager(original, inputs, compiled.device)


def coverage(graph: Graph) -> Coverage:
    """Count the graph's floating-point maps, casts and reductions, and its opaque calls with floating-point results."""
    made = [n for n in graph.nodes if n.dtype.is_float and n.is_a(Map, Cast, Reduce)]
    opaque = [n for n in graph.nodes if n.dtype.is_float and n.is_a(Opaque)]
    return Coverage(len(made), len(opaque), _results(made), _results(opaque))


def _results(nodes: Sequence[Node]) -> int:
    return sum(typical(n.type.numel) for n in nodes)


def _costs(device: DeviceSpec) -> Any:
    def cost(trace: Trace) -> tuple[float, int]:
        found = nest_cost(trace, device)
        return found.results, found.cache_bytes

    return cost


def _title(compiled: Compiled) -> str:
    """The example call's tensors; where sizes are open, the values at which costs are given."""
    shown = [
        f"{n.attrs.name} {n.type}"
        for n in compiled.graph.inputs
        if isinstance(n.attrs, Input) and n.attrs.role == "arg"
    ]
    at = ", ".join(f"{d.name} = {d.typical}" for d in open_dims([n.type for n in compiled.graph.inputs]))
    return (", ".join(shown) or "no tensor arguments") + (f" (costs at {at})" if at else "")


def _names(compiled: Compiled) -> dict[int, str]:
    """What each graph value is called in reasons: its buffer, or its op and the user's line."""
    found = {n.uid: _describe(n) for n in compiled.graph.nodes}
    return found | {n.uid: name for n, name in compiled.step.names.items()}


def _describe(node: Node) -> str:
    kind = getattr(node.attrs, "fn", node.op)
    return f"{kind} of {node.origin}" if node.origin else f"a {kind}"


def _readable(reason: str, names: dict[int, str]) -> str:
    """``reason`` with graph values replaced by names that the reader knows."""
    return _NODE.sub(lambda m: names.get(int(m.group(1)), m.group(2)), reason)
