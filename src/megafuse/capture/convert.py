"""The walk over the recorded fx graph: every ATen call through its converter, or kept as an opaque call."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megafuse.capture import (
    convert_activation,
    convert_dot,
    convert_gather,
    convert_loss,
    convert_move,
    convert_norm,
    convert_pointwise,
    convert_reduce,
    convert_select,
    convert_special,
    convert_window,
)
from megafuse.capture.checkpoints import nodes_again
from megafuse.capture.context import Context, Refused, Unconverted
from megafuse.capture.dtypes import FROM_TORCH, tensor_type, type_name
from megafuse.capture.opaque import OUTSIDE, build_opaque, reason_for, result_types, safe_arguments
from megafuse.capture.origins import is_backward, node_origins
from megafuse.capture.registry import lookup
from megafuse.capture.types import OpaqueCall, SupportEntry, SupportReport
from megafuse.core.errors import CaptureError, NotFusableError, VerifyError
from megafuse.ir.graph import Builder, Node
from megafuse.ir.types import Expand, Input, Origin, Permute, Reshape, Slice

CONVERTERS = (
    convert_activation,
    convert_dot,
    convert_gather,
    convert_loss,
    convert_move,
    convert_norm,
    convert_pointwise,
    convert_reduce,
    convert_select,
    convert_special,
    convert_window,
)


_CHECKED = re.compile(r"aten::_?linalg_\w+_ex")  # the check is lost in the graphs of older PyTorch releases


class Walk:
    """Converts one fx graph. ``labels``: what the user calls the inputs, by position."""

    def __init__(self, builder: Builder, module: torch.fx.GraphModule, labels: Sequence[str]) -> None:
        self.builder, self.module, self.labels = builder, module, labels
        self.values: dict[torch.fx.Node, Any] = {}
        self.second: dict[torch.fx.Node, Any] = {}  # values of checkpointed regions as backward computes them again
        self.calls: list[OpaqueCall] = []
        self.entries: list[SupportEntry] = []
        self.aten_calls = 0

    def run(self, inputs: Sequence[Node]) -> list[Node | None]:
        """The graph's outputs."""
        origins = node_origins(self.module.graph)
        again = nodes_again(self.module.graph)
        places = iter(inputs)
        outputs: list[Node | None] = []
        for node in self.module.graph.nodes:
            self.builder.origin = origins[node]
            if node.op == "placeholder":
                self.values[node] = next(places)
            elif node.op == "get_attr":
                self.values[node] = self.attribute(node)
            elif node.op == "call_function":
                self.values[node] = self.call(node, origins[node], self.read_late if is_backward(node) else self.read)
                if node in again:
                    self.second[node] = self.call(node, origins[node], self.read_again)
            elif node.op == "output":
                outputs = [self.values[a] if isinstance(a, torch.fx.Node) else None for a in _flat(node.args[0])]
        return outputs

    @property
    def report(self) -> SupportReport:
        """Which calls stayed opaque."""
        return SupportReport(tuple(self.entries), self.aten_calls)

    def attribute(self, node: torch.fx.Node) -> Node:
        """A tensor that tracing itself made a constant: only single numbers come here."""
        value = operator.attrgetter(str(node.target))(self.module)
        if not isinstance(value, torch.Tensor) or value.device.type == "meta" or value.dim() > 0:
            raise CaptureError(f"a tensor constant ({node.target}) is not given as an argument",
                               where=str(self.builder.origin), hint="pass it as an argument or a buffer")  # fmt: skip
        return self.builder.const(value.item(), tensor_type(value).dtype)

    def read(self, node: torch.fx.Node) -> Any:
        """What forward reads for ``node``."""
        return self.values[node]

    def read_late(self, node: torch.fx.Node) -> Any:
        """What backward reads: the second computation, where there is one."""
        return self.second.get(node, self.values[node])

    def read_again(self, node: torch.fx.Node) -> Any:
        """What the second computation of a checkpointed region reads: itself, or what entered the region."""
        if node in self.second:
            return self.second[node]
        return pytree.tree_map_only(Node, self.builder.again, self.values[node])

    def call(self, node: torch.fx.Node, origin: Origin | None, read: Callable[[torch.fx.Node], Any]) -> Any:
        """One call: its converter's result, checked against the type PyTorch promised, or an opaque call."""
        args: Any = torch.fx.node.map_arg(node.args, read)
        kwargs: Any = torch.fx.node.map_arg(node.kwargs, read)
        if node.target is operator.getitem:
            return args[0][args[1]]
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(f"{node.target} is not an ATen op", where=str(origin), hint=OUTSIDE)
        _check_kind(node, origin)
        if node.target._schema.name.startswith(("aten::_assert", "aten::sym_constrain")):
            return None  # a check of values: it has no result
        self.aten_calls += 1
        return self.convert(node.target, args, kwargs, node.meta.get("val"), origin)

    def convert(self, op: torch._ops.OpOverload, args: Any, kwargs: Any, value: Any, origin: Origin | None) -> Any:
        """The converted call, or an opaque one with the reason."""
        converter = lookup(op)
        reason = reason_for(op)
        if converter is not None:
            try:
                context = Context(self.builder, result_types(value))
                result = converter(context, *args, **kwargs)
                _verify(op, result, context, origin)
                return result
            except Unconverted as why:
                reason = str(why)
            except Refused as why:
                where = origin.with_code if origin else None
                raise CaptureError(
                    f"PyTorch refuses {op}: {why}", where=where, hint=self.remedy(why.operands)
                ) from None
        self.entries.append(SupportEntry(str(op), reason, origin))
        args = safe_arguments(self.builder, op, args)
        return build_opaque(self.builder, op, args, kwargs, value, reason, self.calls)

    def remedy(self, operands: Sequence[Node]) -> str:
        """What to do about operands whose types do not fit, each under the name that the user knows."""
        return f"convert one of them: {', '.join(f'{self.named(n)} is {type_name(n.dtype)}' for n in operands)}"

    def named(self, node: Node) -> str:
        """The input of which a value is a view, or where and from which inputs of its type the value is computed."""
        source = node
        while source.is_a(Permute, Reshape, Expand, Slice):
            source = source.args[0]
        if isinstance(source.attrs, Input) and source.attrs.position < len(self.labels):
            return self.labels[source.attrs.position]
        known = {n: self.labels[n.attrs.position] for n in inputs_of(node) if isinstance(n.attrs, Input)}
        alike = [label for n, label in known.items() if n.dtype is node.dtype]
        return f"the value computed at {node.origin}" + (f" from {', '.join(alike)}" if alike else "")


def inputs_of(node: Node) -> list[Node]:
    """The graph's inputs on which a value depends, in the order of their positions."""
    seen, todo = {node}, [node]
    while todo:
        new = [a for a in todo.pop().args if a not in seen]
        seen.update(new)
        todo += new
    return sorted((n for n in seen if isinstance(n.attrs, Input)), key=lambda n: n.uid)


def _check_kind(node: torch.fx.Node, origin: Origin | None) -> None:
    """The call can stand in a plan, be it as it is.

    Raises:
        NotFusableError: it gives values that the graph has no type for, or is one whose failure PyTorch looks for.
    """
    made = [v for v in _flat(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    odd = [f"gives values of type {v.dtype}" for v in made if v.dtype not in FROM_TORCH]
    odd += ["gives a sparse tensor" for v in made if v.layout is not torch.strided]
    if _CHECKED.fullmatch(str(node.target._schema.name)):  # type: ignore[union-attr]
        odd.append("may fail, which is looked for as it runs")
    if odd:
        raise NotFusableError(f"{node.target} {odd[0]}", where=str(origin), hint=OUTSIDE)


def _flat(tree: Any) -> list[Any]:
    return list(pytree.tree_leaves(tree, is_leaf=lambda x: x is None))


def _verify(op: torch._ops.OpOverload, result: Any, context: Context, origin: Origin | None) -> None:
    results = list(result) if isinstance(result, tuple | list) else [result]
    for i, (node, type_) in enumerate(zip(results, context.outs, strict=False)):
        if node is not None and type_ is not None and node.type != type_:
            raise VerifyError(f"converter of {op}: result {i} is {node.type}, PyTorch says {type_}", where=str(origin))
