"""``capture``: a callable and example arguments become one joint graph, with all that is needed to call it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from megafuse.capture.checks import Named, check_callable, check_float_inputs, check_hooks, check_tensors, check_values
from megafuse.capture.convert import Walk
from megafuse.capture.dtypes import tensor_type
from megafuse.capture.leaves import FlatCall, Fn, LeafGetter, flatten_call, named_state
from megafuse.capture.trace import DryRun, Source, Subject, Traced, dry_run, trace
from megafuse.capture.types import Captured, Leaf, SupportReport
from megafuse.core.errors import CaptureError, UnsupportedError
from megafuse.ir.graph import Builder, Graph, Node


def capture(
    fn: Fn,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    strict: bool = False,
    device: torch.device | None = None,
) -> Captured:
    """Capture ``fn(*args, **kwargs)``, forward and backward, as one graph.

    Parameters and buffers of ``fn`` and of modules among the arguments become inputs; other values are constants.
    Nothing is computed: the function runs on stand-ins without data, as it would on CUDA. Where arguments are stand-ins
    themselves (on the meta device), ``device`` says where the calls run that they stand for.

    Raises:
        InputError: an argument is not usable.
        CaptureError: PyTorch refuses the call, or the function cannot be traced.
        UnsupportedError: ``strict`` and an op would run as it is.
    """
    check_callable(fn)
    call = flatten_call(fn, tuple(args), dict(kwargs or {}))
    check_values([(f"argument {name}", v) for name, v in zip(call.labels, call.leaves, strict=True)])
    check_hooks(call.modules, getattr(fn, "__self__", None))
    subject = _subject(fn, call, device)
    dry = dry_run(subject)
    _adopt_constants(subject)
    captured = _assemble(subject, dry, trace(subject, dry))
    if strict:
        _refuse_opaque(captured.support)
    return captured


def leaf_getter(fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any] | None, captured: Captured) -> LeafGetter:
    """The quick collector of the leaves' tensors for later calls of the same structure."""
    return LeafGetter(fn, flatten_call(fn, tuple(args), dict(kwargs or {})), captured.leaves, captured.constants)


def _subject(fn: Fn, call: FlatCall, device: torch.device | None) -> Subject:
    sources = [Source("arg", (i,), call.leaves[at], f"argument {call.labels[at]}") for i, at in enumerate(call.tensors)]
    arguments = [(s.label, s.tensor) for s in sources]
    seen: set[int] = set()
    for number, module in enumerate(call.modules):
        for kind, name, tensor in named_state(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                sources.append(Source(kind, (number, name), tensor, _state_label(call, number, kind, name)))
    named = [(s.label, s.tensor) for s in sources]
    check_tensors(_real(named, device))
    check_float_inputs(arguments, any(s.tensor.dtype.is_floating_point for s in sources if s.kind == "param"))
    device = device or next((t.device for _, t in named if t.dim()), torch.device("cpu"))
    return Subject(fn, call, sources, device)


def _state_label(call: FlatCall, number: int, kind: str, name: str) -> str:
    at = call.module_at[number]
    word = "parameter" if kind == "param" else "buffer"
    return f"{word} {name}" if at is None else f"{word} {name} of argument {call.labels[at]}"


def _adopt_constants(subject: Subject) -> None:
    """Tensors found by the dry run are checked like the others; those that lie at places of the scope come first."""
    subject.constants.put_first({id(table[key]): label for label, (table, key) in subject.call.scope.places.items()})
    found = [(f"tensor {i} reached by the function", t) for i, t in enumerate(subject.constants.found)]
    made = set(subject.constants.made)
    outside = [pair for i, pair in enumerate(found) if i not in made]
    check_tensors(_real([*((s.label, s.tensor) for s in subject.sources), *outside], subject.device))


def _real(tensors: list[Named], device: torch.device | None) -> list[Named]:
    """Without the stand-ins, where these stand for tensors on another device than meta."""
    return tensors if device is None or device.type == "meta" else [t for t in tensors if t[1].device.type != "meta"]


def _assemble(subject: Subject, dry: DryRun, traced: Traced) -> Captured:
    constants = subject.constants.found
    outer = subject.constants.outer
    leaves = _leaves(subject.sources, constants, outer)
    total = dry.spec.num_tensors + len(dry.mutable)
    if traced.num_forward != total:
        raise CaptureError(f"PyTorch recorded {traced.num_forward} forward outputs where {total} were expected")
    builder = Builder()
    placeholders = [n for n in traced.module.graph.nodes if n.op == "placeholder"]
    tangent_of = tuple(i for i, r in enumerate(dry.requires_grad) if r) if traced.joint else ()
    if len(placeholders) != len(leaves) + len(tangent_of):
        raise CaptureError(f"PyTorch recorded {len(placeholders)} inputs, not {len(leaves)} and {len(tangent_of)}")
    inputs = _inputs(builder, leaves, placeholders)
    walk = Walk(builder, traced.module, [leaf.label for leaf in leaves])
    values = _scalars(
        builder, inputs, leaves, constants[len(outer) :], [i - len(outer) for i in subject.constants.made]
    )
    outputs = walk.run(values)
    grads, grad_of = _gradients(outputs[total:], leaves, traced)
    count = dry.spec.num_tensors
    changed = _changed(values, leaves, dry.mutable, outputs[count:total])
    forward = (*outputs[:count], *(node for _, node in changed))
    graph = Graph(tuple(inputs), (*forward, *grads), len(forward), grad_of)
    return Captured(
        graph=graph,
        leaves=leaves,
        tangent_of=tangent_of,
        out_spec=dry.spec,
        out_strides=dry.strides,
        out_requires_grad=dry.requires_grad if traced.joint else (False,) * len(dry.requires_grad),
        out_alias=dry.alias,
        out_shared=dry.shared,
        mutations=tuple((leaf, count + i) for i, (leaf, _) in enumerate(changed)),
        calls=tuple(walk.calls),
        support=walk.report,
        constants=tuple(constants[len(outer) :]),
    )


def _leaves(sources: Sequence[Source], constants: Sequence[torch.Tensor], outer: Sequence[str]) -> tuple[Leaf, ...]:
    read = [Source("outer", (label,), t, label) for label, t in zip(outer, constants, strict=False)]
    fixed = [Source("const", (i,), t, f"constant {i}") for i, t in enumerate(constants[len(outer) :])]
    every = [*sources, *read, *fixed]
    storages: dict[int, int] = {}
    leaves = []
    for i, source in enumerate(every):
        t = source.tensor
        first = storages.setdefault(int(t.untyped_storage()._cdata), i)
        leaves.append(
            Leaf(source.kind, source.path, tensor_type(t), tuple(t.stride()), t.requires_grad, source.label,
                 int(t.storage_offset()), None if first == i else first)
        )  # fmt: skip
    return tuple(leaves)


def _inputs(builder: Builder, leaves: Sequence[Leaf], placeholders: Sequence[torch.fx.Node]) -> list[Node]:
    inputs = []
    for position, node in enumerate(placeholders):
        value = node.meta["val"]
        leaf = leaves[position] if position < len(leaves) else None
        strides = leaf.strides if leaf else tuple(int(s) for s in value.stride())
        role = leaf.kind if leaf else "tangent"
        role = "buffer" if role in ("const", "outer") else role
        name = _name(leaf) if leaf else f"tangent_{position - len(leaves)}"
        inputs.append(builder.input(name, tensor_type(value), strides, role, position))
    return inputs


def _name(leaf: Leaf) -> str:
    if leaf.kind in ("param", "buffer"):
        return str(leaf.path[1])
    return leaf.label.removeprefix("argument ").replace("constant ", "constant_")


def _scalars(
    builder: Builder,
    inputs: Sequence[Node],
    leaves: Sequence[Leaf],
    constants: Sequence[torch.Tensor],
    made: Collection[int],
) -> list[Node]:
    """The inputs, with constants of one number that the function makes from a literal replaced by their value.

    ``made``: positions of constants made in the function; one that it merely reaches may change later.
    """
    values = list(inputs)
    for i, leaf in enumerate(leaves):
        if leaf.kind == "const" and leaf.type.rank == 0 and not leaf.requires_grad and leaf.path[0] in made:
            tensor = constants[int(leaf.path[0])]
            if tensor.device.type == "cpu":
                values[i] = builder.const(tensor.item(), leaf.type.dtype)
    return values


def _changed(
    before: Sequence[Node], leaves: Sequence[Leaf], mutable: Sequence[int], after: Sequence[Node | None]
) -> list[tuple[int, Node]]:
    """Leaves with a new value at the end, and that value."""
    changed = [(i, node) for i, node in zip(mutable, after, strict=True) if node is not None and node is not before[i]]
    for i, node in changed:
        if node.type != leaves[i].type:
            raise CaptureError(f"{leaves[i].label} changes from {leaves[i].type} to {node.type}",
                               hint="keep the shape and element type of buffers")  # fmt: skip
    return changed


def _gradients(
    found: Sequence[Node | None], leaves: Sequence[Leaf], traced: Traced
) -> tuple[tuple[Node | None, ...], tuple[int, ...]]:
    if not traced.joint:
        return (), ()
    wanted = tuple(i for i, leaf in enumerate(leaves) if leaf.requires_grad)
    return tuple(found[i] for i in wanted), wanted


def _refuse_opaque(support: SupportReport) -> None:
    if support.opaque:
        lines = "\n  ".join(map(str, support.opaque))
        raise UnsupportedError(
            f"{len(support.opaque)} ops would run as they are:\n  {lines}",
            where=str(support.opaque[0].origin),
            hint="leave out strict=True to allow them",
        )


__all__ = ["Captured", "LeafGetter", "capture", "flatten_call", "leaf_getter"]
