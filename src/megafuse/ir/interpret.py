"""A NumPy evaluator of graphs: the device-free meaning of every op, against which later stages are tested.

Two modes. ``"f64"``: every float value is held in fp64 and casts to narrower float types do nothing, so the result is
the graph's exact mathematics. ``"native"``: every value is in its own dtype; a 16-bit map, reduce or dot computes in
fp32 and rounds its result once to nearest even. A constant of a 16-bit type is held in fp32 (as PyTorch passes scalars
to its kernels), unless a move or an output makes a tensor of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np

from megafuse.core.dtypes import DType
from megafuse.core.errors import InputError
from megafuse.ir.graph import Graph, Node
from megafuse.ir.numeric import FUNCTIONS, REDUCERS, Array
from megafuse.ir.types import (
    MOVES,
    Again,
    Cast,
    Concat,
    Const,
    Dot,
    Expand,
    Gather,
    Input,
    Iota,
    Map,
    Opaque,
    Pad,
    Permute,
    Pick,
    Reduce,
    Reshape,
    Slice,
)

Mode = Literal["f64", "native"]
OpaqueFn = Callable[[Node, list[Array]], "tuple[Array | None, ...]"]

_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.F16: np.dtype(np.float16),
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.I16: np.dtype(np.int16),
    DType.I8: np.dtype(np.int8),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
}


def numpy_dtype(dtype: DType, mode: Mode = "native") -> np.dtype[Any]:
    """The NumPy type in which a value of ``dtype`` is held."""
    return _NUMPY[DType.F64] if mode == "f64" and dtype.is_float else _NUMPY[dtype]


def convert(x: Array, target: np.dtype[Any]) -> Array:
    """Cast as PyTorch does: floats round to nearest even, float to integer truncates, to bool tests for nonzero."""
    if x.dtype == target:
        return x
    if target.kind == "b":
        return np.not_equal(x, 0)
    if target.kind in "iu" and x.dtype.kind not in "iub":
        return x.astype(np.int64).astype(target)  # through 64 bits: narrow integers wrap instead of being undefined
    return x.astype(target)


def evaluate(
    graph: Graph, inputs: Sequence[Array], *, mode: Mode = "f64", opaque: OpaqueFn | None = None
) -> list[Array | None]:
    """Evaluate ``graph`` on ``inputs`` (one per graph input, in order).

    Args:
        graph: what to evaluate.
        inputs: arrays of the inputs' shapes; their types are converted to what ``mode`` asks for.
        mode: ``"f64"`` or ``"native"``, see the module's docstring.
        opaque: called with an opaque node and its argument arrays; returns one array per result of the call.

    Returns:
        One array per graph output, ``None`` where the output is ``None``. In mode ``"f64"`` all floats are fp64.

    Raises:
        InputError: an input's shape is wrong, or the graph holds an opaque call and ``opaque`` is missing.
    """
    if len(inputs) != len(graph.inputs):
        raise InputError(f"the graph has {len(graph.inputs)} inputs, got {len(inputs)}")
    run = _Evaluation(inputs, mode, opaque)
    remaining = _use_counts(graph)
    values: dict[Node, Array] = {}
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            values[node] = run.node(node, [values[a] for a in node.args])
            for arg in node.args:
                remaining[arg] -= 1
                if not remaining[arg]:
                    del values[arg]
        return [None if n is None else run.stored(n, values[n]) for n in graph.outputs]


def _use_counts(graph: Graph) -> dict[Node, int]:
    """How often each value is read, outputs counted as reads."""
    count = dict.fromkeys(graph.nodes, 0)
    for node in graph.nodes:
        for arg in node.args:
            count[arg] += 1
    for out in graph.outputs:
        if out is not None:
            count[out] += 1
    return count


class _Evaluation:
    """One pass over one graph: the mode, the inputs and the results of opaque calls so far."""

    def __init__(self, inputs: Sequence[Array], mode: Mode, opaque: OpaqueFn | None) -> None:
        self.inputs, self.mode, self.opaque = inputs, mode, opaque
        self.calls: dict[Node, tuple[Array | None, ...]] = {}

    def held(self, dtype: DType) -> np.dtype[Any]:
        """NumPy type of a stored value."""
        return numpy_dtype(dtype, self.mode)

    def wide(self, dtype: DType) -> np.dtype[Any]:
        """NumPy type in which arithmetic on ``dtype`` is done."""
        return numpy_dtype(dtype.compute, self.mode)

    def stored(self, node: Node, value: Array) -> Array:
        """An own, writable copy of an output in its type."""
        return np.array(convert(value, self.held(node.dtype)))

    def node(self, node: Node, args: list[Array]) -> Array:
        """Value of ``node`` given its arguments'."""
        if node.is_a(*MOVES):
            return move(node, [convert(a, self.held(node.dtype)) for a in args])
        return np.asarray(_EVALUATORS[type(node.attrs)](self, node, args))


def _input(run: _Evaluation, node: Node, args: list[Array]) -> Array:
    assert isinstance(node.attrs, Input)
    value = np.asarray(run.inputs[node.attrs.position])
    if value.shape != node.shape:
        raise InputError(f"input {node.attrs.name!r} has shape {value.shape}, the graph expects {node.shape}")
    return convert(value, run.held(node.dtype))


def _const(run: _Evaluation, node: Node, args: list[Array]) -> Array:
    assert isinstance(node.attrs, Const)
    return convert(np.asarray(node.attrs.value), run.wide(node.dtype))


def _iota(run: _Evaluation, node: Node, args: list[Array]) -> Array:
    assert isinstance(node.attrs, Iota)
    axis, rank = node.attrs.axis, node.type.rank
    index = np.arange(node.shape[axis]).reshape([-1 if i == axis else 1 for i in range(rank)])
    return np.broadcast_to(index.astype(run.held(node.dtype)), node.shape)


def _map(run: _Evaluation, node: Node, args: list[Array]) -> Array:
    assert isinstance(node.attrs, Map)
    wide = [convert(a, run.wide(n.dtype)) for a, n in zip(args, node.args, strict=True)]
    out = np.asarray(FUNCTIONS[node.attrs.fn](*wide))
    return np.broadcast_to(convert(out, run.held(node.dtype)), node.shape)


def _cast(run: _Evaluation, node: Node, args: list[Array]) -> Array:
    return convert(args[0], run.held(node.dtype))


def _reduce(run: _Evaluation, node: Node, args: list[Array]) -> Array:
    assert isinstance(node.attrs, Reduce)
    wide = run.wide(node.dtype)
    typed = {"dtype": wide} if node.attrs.fn in ("sum", "prod") else {}
    out = REDUCERS[node.attrs.fn](convert(args[0], wide), axis=node.attrs.axes, **typed)
    return convert(np.asarray(out), run.held(node.dtype))


def _dot(run: _Evaluation, node: Node, args: list[Array]) -> Array:
    acc = np.result_type(*(run.wide(n.dtype) for n in (node, *node.args)))
    a, b, *bias = (convert(x, acc) for x in args)
    out = np.matmul(a, b)  # [P, M, K] x [P, K, N] -> [P, M, N]
    return convert(out + bias[0] if bias else out, run.held(node.dtype))


def _gather(run: _Evaluation, node: Node, args: list[Array]) -> Array:
    assert isinstance(node.attrs, Gather)
    axis, table, index = node.attrs.axis, convert(args[0], run.held(node.dtype)), args[1]
    size = table.shape[axis]
    nothing = np.asarray(np.nan if node.dtype.is_float else 0).astype(table.dtype)
    if not size:
        return np.full(node.shape, nothing)
    found = np.take_along_axis(table, np.clip(index, 0, size - 1), axis)
    return np.where((index >= 0) & (index < size), found, nothing)


def _opaque(run: _Evaluation, node: Node, args: list[Array]) -> Array:
    assert isinstance(node.attrs, Opaque)
    if run.opaque is None:
        raise InputError(f"the graph calls {node.attrs.target}; pass opaque= to evaluate it", where=str(node.origin))
    results = run.opaque(node, [convert(a, run.held(n.dtype)) for a, n in zip(args, node.args, strict=True)])
    run.calls[node] = tuple(
        None if t is None or r is None else convert(np.asarray(r), run.held(t.dtype))
        for r, t in zip(results, node.attrs.results, strict=True)
    )
    return next(r for r in run.calls[node] if r is not None)


def _pick(run: _Evaluation, node: Node, args: list[Array]) -> Array:
    assert isinstance(node.attrs, Pick)
    value = run.calls[node.args[0]][node.attrs.index]
    assert value is not None, f"{node!r} reads a result that the opaque call did not return"
    return value


_EVALUATORS: dict[type, Callable[[_Evaluation, Node, list[Array]], Array]] = {
    Input: _input,
    Const: _const,
    Iota: _iota,
    Map: _map,
    Cast: _cast,
    Reduce: _reduce,
    Dot: _dot,
    Again: _cast,
    Gather: _gather,
    Opaque: _opaque,
    Pick: _pick,
}


def move(node: Node, args: Sequence[Array]) -> Array:
    """Value of a move node: no arithmetic, the arguments' type is kept."""
    attrs, x = node.attrs, args[0]
    match attrs:
        case Permute():
            return np.transpose(x, attrs.perm)
        case Reshape():
            return x.reshape(node.shape)
        case Expand():
            return np.broadcast_to(x, node.shape)
        case Slice():
            ranges = zip(attrs.starts, attrs.steps, node.shape, strict=True)
            return x[tuple(_python_slice(*r) for r in ranges)]
        case Pad():
            out = np.full(node.shape, attrs.value, x.dtype)
            out[tuple(slice(lo, lo + n) for lo, n in zip(attrs.lo, x.shape, strict=True))] = x
            return out
        case Concat():
            return np.concatenate(list(args), axis=attrs.axis)
    raise AssertionError(f"{node!r} is not a move")


def _python_slice(start: int, step: int, size: int) -> slice:
    """``size`` indices from ``start`` by ``step``, as a Python slice."""
    if size == 0:
        return slice(0, 0)
    if size == 1:
        return slice(start, start + 1)
    stop = start + step * size
    return slice(start, stop if stop >= 0 else None, step)
