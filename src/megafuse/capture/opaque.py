"""Calls that no converter takes: kept as they are, with a reason, in the side table of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megafuse.capture.dtypes import tensor_type
from megafuse.capture.types import CallDevice, OpaqueCall, Ref
from megafuse.core.errors import NotFusableError
from megafuse.ir.graph import Builder, Node
from megafuse.ir.types import Opaque, TensorType

OUTSIDE = "keep this call outside of the fused function"
_GATHERS = "embedding_bag _embedding_bag masked_scatter"
_SCATTERS = (
    "scatter index_put _unsafe_index_put index_fill index_copy embedding_dense_backward _embedding_bag_backward "
    "masked_scatter_backward"
)
_ATOMIC_SCATTERS = "scatter_add scatter_reduce index_add put"  # see torch.use_deterministic_algorithms
IN_NO_ORDER = "scatters by index, on GPUs in no fixed order"
_WINDOWS = "max_pool2d_with_indices max_pool3d_with_indices im2col col2im"
_REASONS = {
    **dict.fromkeys(_GATHERS.split(), "gathers by index"), **dict.fromkeys(_SCATTERS.split(), "scatters by index"),
    **dict.fromkeys(_ATOMIC_SCATTERS.split(), IN_NO_ORDER),
    "embedding_renorm": "changes rows of a table in place",
    **dict.fromkeys(("convolution", "convolution_backward"), "convolution"),
    **dict.fromkeys("sort topk median nanmedian kthvalue mode".split(), "sorts"),
    **dict.fromkeys("cumsum cumprod logcumsumexp cummax cummin".split(), "scan"),
    **dict.fromkeys("bucketize searchsorted isin".split(), "searches"),
    **dict.fromkeys("igamma igammac special_zeta frexp gcd lcm".split(), "iterates, with no closed formula"),
    **dict.fromkeys(_WINDOWS.split(), "windows"),
}  # fmt: skip


def is_random(op: torch._ops.OpOverload) -> bool:
    """True for an op that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def reason_for(op: torch._ops.OpOverload) -> str:
    """Why an op has no converter."""
    if is_random(op):
        return "draws random numbers"
    return _REASONS.get(op._schema.name.partition("::")[2], "no converter for this op")


def result_types(value: Any) -> tuple[TensorType | None, ...]:
    """Types of an op's results, in flattened order; None for what is not a tensor."""
    return tuple(
        tensor_type(v) if isinstance(v, torch.Tensor) else None
        for v in pytree.tree_leaves(value, is_leaf=lambda x: x is None)
    )


def safe_arguments(builder: Builder, op: torch._ops.OpOverload, args: Any) -> Any:
    """The arguments of a call whose kernel trusts that a kernel of forward stopped at bad ones.

    ``embedding_dense_backward`` adds to the row of each id; loads by index give NaN where an id is out of range, and go
    on. Such ids become the one after the last row, which ``table_gradient`` drops.
    """
    if op is not torch.ops.aten.embedding_dense_backward.default:
        return args
    grad, ids, rows, *others = args
    outside = builder.map("or", builder.map("lt", ids, 0), builder.map("ge", ids, rows))
    return (grad, builder.map("where", outside, rows, ids), rows, *others)


def table_gradient(grad: torch.Tensor, ids: torch.Tensor, rows: int, padding: int, by_frequency: bool) -> torch.Tensor:
    """``embedding_dense_backward`` of ``grad [*ids.shape, D]`` into ``rows`` rows, and one more for ids ``rows``.

    That row is left out of the result, a contiguous view ``[rows, D]``. ``padding`` does not serve for those ids: where
    there is none it is -1, and for many ids PyTorch's kernel writes that row.
    """
    op = torch.ops.aten.embedding_dense_backward.default
    return op(grad, ids, rows + 1, padding, by_frequency).narrow(0, 0, rows)


STAND_INS: dict[Any, Callable[..., Any]] = {torch.ops.aten.embedding_dense_backward.default: table_gradient}


def build_opaque(
    builder: Builder, op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], value: Any, reason: str,
    calls: list[OpaqueCall],
) -> Any:  # fmt: skip
    """The opaque node for a call, and its results in the structure of ``value``."""
    results = result_types(value)
    if not any(results):
        raise NotFusableError(f"{op} has no tensor result", hint=OUTSIDE)
    nodes: list[Node] = []

    def put(v: Any) -> Any:
        if isinstance(v, Node):
            nodes.append(v)
            return Ref(len(nodes) - 1)
        if isinstance(v, torch.device):
            return CallDevice()
        if isinstance(v, list | tuple):
            return type(v)(put(x) for x in v)
        return v

    template = tuple(put(a) for a in args)
    keywords = {k: put(v) for k, v in kwargs.items()}
    calls.append(OpaqueCall(STAND_INS.get(op, op), template, keywords, is_random(op)))
    node = builder.opaque(Opaque(str(op), len(calls) - 1, reason, results), nodes)
    if isinstance(value, torch.Tensor):
        return node
    return tuple(None if t is None else _result(builder, node, i) for i, t in enumerate(results))


def _result(builder: Builder, node: Node, index: int) -> Node:
    assert isinstance(node.attrs, Opaque)
    first = next(i for i, r in enumerate(node.attrs.results) if r is not None)
    return node if index == first and len(node.attrs.results) == 1 else builder.pick(node, index)
