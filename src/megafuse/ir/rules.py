"""Simplification rules of arithmetic, casts and reductions, and the table of all rules.

Each rule's docstring is its proof. A rule is bit-exact in floating point unless its ``differs`` says otherwise.
"""

from __future__ import annotations

import math
from itertools import pairwise

from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Graph, Node
from megafuse.ir.rewrite import Rule, rebuild, rewrite, rule
from megafuse.ir.rules_moves import MOVE_RULES, full_value, scalar_of, zero_pad
from megafuse.ir.types import MOVES, Cast, Const, Expand, Map, Pad, Reduce, Reshape

_FLOATS = {DType.BF16, DType.F16, DType.F32, DType.F64}
_EMBEDS: dict[DType, set[DType]] = {
    DType.BOOL: set(DType) - {DType.BOOL},
    DType.U8: {DType.I16, DType.I32, DType.I64} | _FLOATS,
    DType.I8: {DType.I16, DType.I32, DType.I64} | _FLOATS,
    DType.I16: {DType.I32, DType.I64, DType.F32, DType.F64},
    DType.I32: {DType.I64, DType.F64},
    DType.BF16: {DType.F32, DType.F64},
    DType.F16: {DType.F32, DType.F64},
    DType.F32: {DType.F64},
    DType.I64: set(),
    DType.F64: set(),
}
_MAX_EXPONENT = {DType.F64: 1022, DType.F32: 126, DType.BF16: 126, DType.F16: 14}


def embeds(narrow: DType, wide: DType) -> bool:
    """True when every value of ``narrow`` is a value of ``wide``, so that the cast loses nothing."""
    return wide in _EMBEDS[narrow]


def _const(node: Node) -> float | None:
    """Value of a constant."""
    return node.attrs.value if isinstance(node.attrs, Const) else None


def _fn(node: Node) -> str:
    """The function of a map or a reduction."""
    assert isinstance(node.attrs, (Map, Reduce))
    return node.attrs.fn


def _is_zero(value: float | None, sign: float) -> bool:
    """True for the zero of the given sign."""
    return value is not None and value == 0 and math.copysign(1, value) == sign


# ---- arithmetic


@rule(Map)
def drop_identity(b: Builder, node: Node) -> Node | None:
    """x*1 = x/1 = x; x-0 = x + -0 = x for every x, zeros of both signs included (x + +0 is not: it turns -0 to +0)."""
    fn = _fn(node)
    for x, c in (node.args, node.args[::-1]) if len(node.args) == 2 else ():
        value, right = _const(c), c is node.args[1]
        unit = value == 1 and (fn == "mul" or (fn == "div" and right))
        minus_zero = fn == "add" and (_is_zero(value, -1) or (value == 0 and not node.dtype.is_float))
        plus_zero = fn == "sub" and right and _is_zero(value, 1)
        if (unit or minus_zero or plus_zero) and x.type == node.type and node.dtype is not DType.BOOL:
            return x
    return None


@rule(Map)
def div_by_power_of_two(b: Builder, node: Node) -> Node | None:
    """x / 2^k = x * 2^-k: both scale the exponent, and the one rounding (of a subnormal result) is the same."""
    if _fn(node) != "div" or not node.dtype.is_float:
        return None
    x, c = node.args[0], _const(node.args[1])
    if not c or not math.isfinite(c) or x.shape != node.shape:
        return None
    fraction, exponent = math.frexp(c)
    if abs(fraction) != 0.5 or abs(exponent - 1) > _MAX_EXPONENT[node.dtype]:
        return None
    return b.map("mul", x, 1 / c)


@rule(Map)
def double_negation(b: Builder, node: Node) -> Node | None:
    """-(-x) = x and not(not(x)) = x: each flips bits back."""
    fn, x = _fn(node), node.args[0]
    again = fn in ("neg", "not") and isinstance(x.attrs, Map) and x.attrs.fn == fn
    return x.args[0] if again and x.args[0].type == node.type else None


@rule(Map)
def difference_with_itself(b: Builder, node: Node) -> Node | None:
    """x - x = x + -x = |x| * +0: +0 for finite x, NaN for an infinity or NaN.

    Compilers contract a product and the difference after it, fma(a, b, -round(a * b)), which leaves the rounding error
    of the product where the difference is 0.
    """
    if not node.dtype.is_float or len(node.args) != 2:
        return None
    x, y = node.args
    gone = _fn(node) == "sub" and _equal(x, y)
    if _fn(node) == "add":
        x, y = (y, x) if _is_negation(x, y) else (x, y)
        gone = _is_negation(y, x)
    return b.map("mul", b.map("abs", x), 0.0) if gone and x.type == node.type else None


def _is_negation(node: Node, x: Node) -> bool:
    """True for -x."""
    return isinstance(node.attrs, Map) and node.attrs.fn == "neg" and _equal(node.args[0], x)


def _equal(x: Node, y: Node) -> bool:
    """The same value, or a product of the same two."""
    product = isinstance(x.attrs, Map) and x.attrs.fn == "mul" and x.attrs == y.attrs and x.type == y.type
    return x is y or (product and x.args == y.args[::-1])


@rule(Map)
def scalar_arguments(b: Builder, node: Node) -> Node | None:
    """An argument that holds one constant everywhere is that constant, if its own type does not round it."""
    if not node.shape:
        return None
    args = [scalar_of(a) or a for a in node.args]
    if all(a.is_a(Const) for a in args):
        return b.broadcast(b.map(_fn(node), *args), node.shape)
    return rebuild(b, node, args)


@rule(Map, differs="sign of zero: a padded -0.0 stays what it is, where the sum had -0.0 + 0.0 = 0.0")
def add_of_pads(b: Builder, node: Node) -> Node | None:
    """Sum of zero-padded values whose ranges are disjoint: one after another, the ranges that touch are a concat.

    Every element gets at most one padded value and at most one dense one, so no two roundings are reordered. The
    backward of split, chunk and slices gives such sums: add(add(pad(a), pad(b)), pad(c)) = concat(a, b, c).
    """
    if _fn(node) != "add":
        return None
    leaves = _addends(node)
    pads = sorted((p for p in leaves if zero_pad(p)), key=lambda p: zero_pad(p) or (0, 0, 0))
    dense = [x for x in leaves if not zero_pad(x)]
    spans = [s for s in map(zero_pad, pads) if s]
    if len(pads) < 2 or len(dense) > 1 or len({axis for axis, _, _ in spans}) > 1:
        return None
    if any(prev[2] > here[1] for prev, here in pairwise(spans)):
        return None
    runs = _touching(spans)
    if len(runs) == len(pads):
        return None
    axis = spans[0][0]
    terms = [*dense, *(_pad_run(b, pads[i:j], spans[i][1], axis, node.shape) for i, j in runs)]
    total = terms[0]
    for term in terms[1:]:
        total = b.map("add", total, term)
    return total


def _addends(node: Node) -> list[Node]:
    """What an addition adds up, seen through those of its arguments that add a zero pad themselves."""
    out = []
    for a in node.args:
        inner = a.is_a(Map) and _fn(a) == "add" and any(zero_pad(x) for x in a.args)
        out += _addends(a) if inner else [a]
    return out


def _touching(spans: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Index ranges of consecutive spans without gaps between them."""
    runs: list[tuple[int, int]] = []
    for i, (_, lo, _) in enumerate(spans):
        if runs and spans[i - 1][2] == lo:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs


def _pad_run(b: Builder, pads: list[Node], lo: int, axis: int, shape: tuple[int, ...]) -> Node:
    """The concatenation of the pads' inputs, padded to ``shape``."""
    inner = b.concat([p.args[0] for p in pads], axis)
    return b.pad(inner, [lo if i == axis else 0 for i in range(len(shape))], shape)


# ---- casts


@rule(Cast)
def drop_widening_cast(b: Builder, node: Node) -> Node | None:
    """cast(cast(x: A -> B): B -> C) = cast(x: A -> C) when B holds every value of A; for C = A it is x."""
    x = node.args[0]
    if x.is_a(Cast) and embeds(x.args[0].dtype, x.dtype):
        return b.cast(x.args[0], node.dtype)
    return None


@rule(Cast)
def cast_of_full(b: Builder, node: Node) -> Node | None:
    """A cast of one repeated constant is the repeated cast of it, if its own type does not round it."""
    c = scalar_of(node.args[0])
    return b.broadcast(b.cast(c, node.dtype), node.shape) if c and node.shape else None


@rule(Cast)
def cast_before_expand(b: Builder, node: Node) -> Node | None:
    """cast(expand(x)) = expand(cast(x)): a cast works on each element alone."""
    x = node.args[0]
    return b.expand(b.cast(x.args[0], node.dtype), node.shape) if x.is_a(Expand) else None


@rule(Cast)
def cast_before_zero_pad(b: Builder, node: Node) -> Node | None:
    """cast(pad(x, 0)) = pad(cast(x), 0): zero is zero in every type."""
    x = node.args[0]
    if not (isinstance(x.attrs, Pad) and _is_zero(x.attrs.value, 1)):
        return None
    return b.pad(b.cast(x.args[0], node.dtype), x.attrs.lo, node.shape, 0.0)


@rule(Cast)
def cast_meets_cast(b: Builder, node: Node) -> Node | None:
    """cast(move(cast(x), ..)) = move(cast(cast(x)), ..), taken where the two casts are x: the inner loses nothing."""
    x = node.args[0]
    if not x.is_a(*MOVES) or x.is_a(Pad):
        return None
    back = [a for a in x.args if a.is_a(Cast) and a.args[0].dtype is node.dtype]
    if not any(embeds(node.dtype, a.dtype) for a in back):
        return None
    return rebuild(b, x, [b.cast(a, node.dtype) for a in x.args])


# ---- reductions


@rule(Reduce, differs="sign of zero: a sum that starts from 0.0 turns -0.0 to 0.0")
def reduce_of_one(b: Builder, node: Node) -> Node | None:
    """Reducing a dim of size 1 is dropping it."""
    assert isinstance(node.attrs, Reduce)
    fn, axes, x = node.attrs.fn, node.attrs.axes, node.args[0]
    if all(x.shape[a] != 1 for a in axes):
        return None
    kept = [i for i in range(x.type.rank) if not (i in axes and x.shape[i] == 1)]
    return b.reduce(fn, b.reshape(x, [x.shape[i] for i in kept]), [kept.index(a) for a in axes if a in kept])


@rule(Reduce, differs="order of additions")
def reduce_of_full(b: Builder, node: Node) -> Node | None:
    """Reducing one repeated constant gives a constant, where the number of its copies is known or does not matter."""
    assert isinstance(node.attrs, Reduce)
    x, fn = node.args[0], node.attrs.fn
    c = full_value(x) if fn in ("max", "min") else scalar_of(x)
    if c is None:
        return None
    assert isinstance(c.attrs, Const)
    value = c.attrs.value
    sizes = [x.shape[a] for a in node.attrs.axes]
    if fn in ("max", "min") or (fn == "sum" and value == 0) or (fn == "prod" and value in (0, 1)):
        result = value
    elif all(type(n) is int for n in sizes) and fn in ("sum", "prod"):
        copies = math.prod(sizes)
        try:
            result = value * copies if fn == "sum" else value**copies
        except OverflowError:
            return None
    else:
        return None
    return b.broadcast(b.const(result, node.dtype), node.shape)


@rule(Reduce, differs="order of additions")
def reduce_of_reduce(b: Builder, node: Node) -> Node | None:
    """The same associative function over axes B after axes A is one reduction over both.

    Not for sums and products of 16-bit types, which round between the two.
    """
    assert isinstance(node.attrs, Reduce)
    fn, axes, x = node.attrs.fn, node.attrs.axes, node.args[0]
    if not isinstance(x.attrs, Reduce) or x.attrs.fn != fn:
        return None
    if fn in ("sum", "prod") and node.dtype.compute is not node.dtype:
        return None
    inner = x.attrs.axes
    left = [i for i in range(x.args[0].type.rank) if i not in inner]
    return b.reduce(fn, x.args[0], [*inner, *(left[a] for a in axes)])


@rule(Reduce)
def reduce_before_unit_reshape(b: Builder, node: Node) -> Node | None:
    """A reshape that only adds or drops dims of size 1 renames axes: the reduction goes first, under the old names."""
    assert isinstance(node.attrs, Reduce)
    fn, axes, x = node.attrs.fn, node.attrs.axes, node.args[0]
    if not x.is_a(Reshape) or any(x.shape[a] == 1 for a in axes):
        return None
    source = x.args[0]
    old = [i for i, s in enumerate(source.shape) if s != 1]
    new = [i for i, s in enumerate(x.shape) if s != 1]
    if [source.shape[i] for i in old] != [x.shape[i] for i in new]:
        return None
    return b.reshape(b.reduce(fn, source, [old[new.index(a)] for a in axes]), node.shape)


ARITHMETIC_RULES: tuple[Rule, ...] = (
    scalar_arguments,
    drop_identity,
    div_by_power_of_two,
    double_negation,
    difference_with_itself,
    add_of_pads,
)
CAST_RULES: tuple[Rule, ...] = (
    drop_widening_cast,
    cast_of_full,
    cast_before_expand,
    cast_before_zero_pad,
    cast_meets_cast,
)
REDUCE_RULES: tuple[Rule, ...] = (reduce_of_one, reduce_of_full, reduce_of_reduce, reduce_before_unit_reshape)
SIMPLIFY: tuple[Rule, ...] = (*ARITHMETIC_RULES, *CAST_RULES, *REDUCE_RULES, *MOVE_RULES)


def simplify(graph: Graph) -> Graph:
    """``graph`` under every rule here and in ``rules_moves``."""
    return rewrite(graph, SIMPLIFY, "simplify")
