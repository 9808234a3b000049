"""What capture returns: the graph, where its inputs come from, how its outputs are put together, what is opaque."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megafuse.ir.graph import Graph
from megafuse.ir.types import Opaque, Origin, Pick, TensorType

LeafPath = tuple[int | str, ...]


@dataclass(frozen=True)
class Leaf:
    """Where a graph input comes from at call time.

    ``path`` is ``(i,)`` for an ``arg`` (i-th tensor among the flattened arguments), ``(module, name)`` for a ``param``
    or ``buffer`` (number of the module among those found, qualified name in it), ``(label,)`` for an ``outer`` (a
    tensor at a place of the callable's scope, read there at each call: a closure variable, a global, an attribute) and
    ``(i,)`` for a ``const`` (``Captured.constants[i]``: a tensor made in the function, or reached through some other
    object). ``alias`` is the first leaf that shares this one's storage. ``label`` names the leaf in messages.
    """

    kind: str
    path: LeafPath
    type: TensorType
    strides: tuple[int, ...]
    requires_grad: bool
    label: str
    storage_offset: int = 0
    alias: int | None = None


@dataclass(frozen=True)
class Ref:
    """Place of the ``index``-th node argument in the argument template of an opaque call."""

    index: int


@dataclass(frozen=True)
class CallDevice:
    """Place of the device on which the step runs in the argument template of an opaque call."""


@dataclass(frozen=True)
class OpaqueCall:
    """A call that runs as is, an ATen op or what stands for it; arguments are plain values, ``Ref``, ``CallDevice``."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: bool = False

    def bind(self, tensors: Sequence[torch.Tensor], device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's actual arguments, given its node arguments and the device."""

        def put(value: Any) -> Any:
            if isinstance(value, Ref):
                return tensors[value.index]
            if isinstance(value, CallDevice):
                return device
            if isinstance(value, list | tuple):
                return type(value)(put(v) for v in value)
            return value

        return tuple(put(a) for a in self.args), {k: put(v) for k, v in self.kwargs.items()}


@dataclass(frozen=True)
class SupportEntry:
    """One op that runs as is: the ATen name, why, and the user's line."""

    target: str
    reason: str
    origin: Origin | None

    def __str__(self) -> str:
        return f"{self.target}: {self.reason} at {self.origin.with_code if self.origin else 'unknown line'}"


@dataclass(frozen=True)
class SupportReport:
    """The ops that no converter took, and how many ATen calls there were in all."""

    opaque: tuple[SupportEntry, ...] = ()
    aten_calls: int = 0

    def __str__(self) -> str:
        return "\n".join(map(str, self.opaque)) or "every op is converted"


@dataclass(frozen=True)
class OutSpec:
    """The user's output structure.

    ``leaves[i]`` is ("tensor", position among the output tensors), ("size", numbers of a ``torch.Size``) or ("value", a
    constant).
    """

    spec: pytree.TreeSpec
    leaves: tuple[tuple[str, Any], ...]
    alone: bool = field(init=False)  # the output is one tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "alone", self.spec.num_nodes == 1 and self.leaves == (("tensor", 0),))

    def build(self, tensors: Sequence[Any]) -> Any:
        """The user's output, from its tensors in order."""
        if self.alone:
            return tensors[0]
        made = [tensors[v] if k == "tensor" else torch.Size(v) if k == "size" else v for k, v in self.leaves]
        return pytree.tree_unflatten(made, self.spec)

    @property
    def num_tensors(self) -> int:
        """Number of tensor leaves."""
        return sum(kind == "tensor" for kind, _ in self.leaves)


@dataclass(frozen=True)
class Captured:
    """A captured callable.

    ``graph.inputs`` are the leaves, in order, then the tangents; ``tangent_of[j]`` is the forward output whose
    cotangent the j-th tangent is. Forward outputs are the user's tensors in order, then one new value for each of
    ``mutations`` (leaf, forward output): leaves updated in place. ``out_strides`` and ``out_requires_grad`` cover the
    user's tensors; ``out_alias[i]`` is the leaf of which output i is a view in the original, or None; ``out_shared[i]``
    the first earlier output whose memory it shares there, or None.
    """

    graph: Graph
    leaves: tuple[Leaf, ...]
    tangent_of: tuple[int, ...]
    out_spec: OutSpec
    out_strides: tuple[tuple[int, ...], ...]
    out_requires_grad: tuple[bool, ...]
    out_alias: tuple[int | None, ...]
    out_shared: tuple[int | None, ...]
    mutations: tuple[tuple[int, int], ...]
    calls: tuple[OpaqueCall, ...]
    support: SupportReport
    constants: tuple[torch.Tensor, ...] = ()

    @property
    def empty(self) -> str:
        """What in the call has no elements, in words; empty where nothing is: kernels take none such."""
        node = next((n for n in self.graph.nodes if 0 in n.shape), None)
        if node is None:
            return ""
        made = node.args[0].attrs if node.is_a(Pick) else node.attrs
        what = f"a result of {made.target}" if isinstance(made, Opaque) else "a value computed in the call"
        return f"{what} ({node.origin})" if node.origin else what
