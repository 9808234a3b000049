"""What a converter works with: the builder, the result types PyTorch promised, and PyTorch's promotion rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megafuse.capture.dtypes import TO_TORCH, type_name
from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Node
from megafuse.ir.types import Const, Expand, Reshape, TensorType

Operand = Node | float | int | bool
Result = Node | tuple[Any, ...] | list[Any]


class Unconverted(Exception):
    """Raised by a converter that does not take this call; the text is the reason, and the op becomes opaque."""


class Refused(Exception):
    """Raised by a converter for a call that PyTorch refuses on CUDA, though not on stand-ins; the text says why.

    ``operands``: those whose types do not fit.
    """

    def __init__(self, what: str, operands: Sequence[Node]) -> None:
        super().__init__(what)
        self.operands = operands


_CATEGORY = {DType.BOOL: 0, DType.U8: 1, DType.I8: 1, DType.I16: 1, DType.I32: 1, DType.I64: 1}
_INT_ORDER = (DType.U8, DType.I8, DType.I16, DType.I32, DType.I64)
_FLOAT_ORDER = (DType.BF16, DType.F16, DType.F32, DType.F64)


def category(value: Operand) -> int:
    """0 for bool, 1 for integer, 2 for float."""
    if isinstance(value, Node):
        return _CATEGORY.get(value.dtype, 2)
    return 0 if isinstance(value, bool) else 1 if isinstance(value, int) else 2


def join(a: DType, b: DType) -> DType:
    """PyTorch's promotion of two element types."""
    if a is b:
        return a
    if {a, b} == {DType.BF16, DType.F16}:
        return DType.F32
    if a.is_float or b.is_float:
        floats = [d for d in (a, b) if d.is_float]
        return max(floats, key=_FLOAT_ORDER.index)
    if DType.BOOL in (a, b):
        return b if a is DType.BOOL else a
    if {a, b} == {DType.U8, DType.I8}:
        return DType.I16
    return max(a, b, key=_INT_ORDER.index)


def uniform(x: Node) -> Node | None:
    """The scalar constant that ``x`` repeats in every element, if it is one."""
    while x.is_a(Expand, Reshape) and len(x.args) == 1:
        x = x.args[0]
    return x if isinstance(x.attrs, Const) else None


def promote(args: Sequence[Operand]) -> DType:
    """PyTorch's ``result_type``: tensors with dims, then 0-dim tensors, then Python numbers."""
    ranks: list[list[Operand]] = [
        [a for a in args if isinstance(a, Node) and a.type.rank > 0],
        [a for a in args if isinstance(a, Node) and a.type.rank == 0],
        [a for a in args if not isinstance(a, Node)],
    ]
    result: DType | None = None
    level = -1
    for group in ranks:
        top = max((category(a) for a in group), default=-1)
        if top <= level:
            continue
        for a in group:
            if category(a) < top:
                continue
            own = a.dtype if isinstance(a, Node) else (DType.BOOL, DType.I64, DType.F32)[top]
            result = own if result is None or level < top else join(result, own)
            level = top
    assert result is not None
    return result


@dataclass
class Context:
    """One ATen call being converted. ``outs`` are the promised types of its tensor results (None for others)."""

    b: Builder
    outs: tuple[TensorType | None, ...]

    @property
    def out(self) -> TensorType:
        """Promised type of the first result."""
        first = self.outs[0]
        assert first is not None
        return first

    def const(self, value: float | int | bool, dtype: DType) -> Node:
        """A scalar constant."""
        return self.b.const(value, dtype)

    def full(self, value: float | int | bool, type_: TensorType) -> Node:
        """A constant tensor. Its elements are of its type, unlike a number beside a tensor, which is not rounded."""
        if type_.dtype in (DType.F16, DType.BF16):
            value = torch.tensor(value, dtype=torch.float64).to(TO_TORCH[type_.dtype]).item()
        return self.b.broadcast(self.b.const(value, type_.dtype), type_.shape)

    def up(self, x: Node) -> Node:
        """``x`` in the type in which it is computed with."""
        return self.b.cast(x, x.dtype.compute)

    def operand(self, x: Operand, common: DType) -> Node:
        """An operand as PyTorch's kernels see it: rounded to the common type, widened to the compute type.

        Python numbers go straight to the compute type.
        """
        if isinstance(x, Node):
            return self.b.cast(self.b.cast(uniform(x) or x, common), common.compute)
        return self.b.const(x, common.compute)

    def operands(self, *xs: Operand, common: DType | None = None) -> list[Node]:
        """Operands of a float op whose common type is that of the result unless given."""
        kind = common or (self.out.dtype if self.out.dtype.is_float else promote(xs))
        return [self.operand(x, kind) for x in xs]

    def finish(self, x: Node, index: int = 0) -> Node:
        """Round once to the promised type and broadcast to the promised shape."""
        type_ = self.outs[index]
        assert type_ is not None
        return self.b.broadcast(self.b.cast(x, type_.dtype), type_.shape)

    def each(self, fn: str, *xs: Node) -> Node:
        """One map inside an op whose CUDA kernel computes in the result's own type: rounded to it, widened again."""
        kind = self.out.dtype
        return self.b.cast(self.b.cast(self.b.map(fn, *xs), kind), kind.compute)

    def pointwise(self, fn: str, *xs: Operand) -> Node:
        """A whole pointwise op: promotion, one map, one rounding."""
        return self.finish(self.b.map(fn, *self.operands(*xs)))

    def axes(self, x: Node, dims: int | Sequence[int] | None) -> tuple[int, ...]:
        """Dims as PyTorch's reductions take them: None and the empty list mean all."""
        if isinstance(dims, int):
            dims = [dims]
        if not x.type.rank:
            return ()
        return tuple(sorted({d % x.type.rank for d in dims})) if dims else tuple(range(x.type.rank))

    def mean(self, x: Node, axes: Sequence[int], keepdim: bool = True) -> Node:
        """Mean over axes in the type of ``x``."""
        count = 1
        for a in axes:
            count *= x.shape[a]
        total = self.b.reduce("sum", x, axes, keepdim=keepdim)
        return self.b.map("mul", total, 1.0 / count if count else float("nan"))

    def same_types(self, *xs: Node | None) -> None:
        """All arguments have one floating-point type, as the CUDA kernel asks.

        Raises:
            Refused: they have not.
        """
        kinds = list(dict.fromkeys(x.dtype for x in xs if x is not None))
        if len(kinds) > 1:
            first = [next(x for x in xs if x is not None and x.dtype is k) for k in kinds]
            raise Refused(f"expected arguments of one element type, got {' and '.join(map(type_name, kinds))}", first)
        if kinds and not kinds[0].is_float:
            raise Refused(f"expected floating-point arguments, got {type_name(kinds[0])}", [x for x in xs if x])

    def value(self, x: Operand) -> float | int | bool | None:
        """The number behind a Python scalar or constant node, else None."""
        if isinstance(x, Node):
            return x.attrs.value if isinstance(x.attrs, Const) else None
        return x
