"""The invariants of a graph, one small function a rule, in one table per op.

Each rule takes a node and returns what is wrong, or None. Run between stages; a failure is a bug of megafuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError
from megafuse.core.sizes import OpenSize, is_open, settle
from megafuse.ir.graph import Graph, Node
from megafuse.ir.ops import MAP_FNS, REDUCE_FNS, map_dtype
from megafuse.ir.types import (
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

Rule = Callable[[Node], "str | None"]
ROLES = ("param", "buffer", "arg", "tangent")
FLOAT_ONLY = frozenset(
    "sqrt rsqrt recip exp exp2 expm1 log log2 log1p log10 sin cos tan tanh sigmoid erf erfc asin acos atan sinh cosh "
    "asinh acosh atanh lgamma digamma erfinv erfcx ndtri atan2 copysign hypot nextafter".split()
)
NEVER_FLOAT = frozenset("not and or xor shl shr".split())
NEVER_BOOL = frozenset("neg sub div pow fmod remainder floordiv shl shr".split())


def verify(graph: Graph) -> None:
    """Check every invariant of ``graph``.

    Raises:
        VerifyError: with the node, what it breaks, and the user's line it came from.
    """
    for fault in graph_problems(graph):
        raise VerifyError(fault)
    for node in graph.nodes:
        problem = node_problem(node)
        if problem:
            args = ", ".join(f"{a!r} {a.type}" for a in node.args)
            where = str(node.origin) if node.origin else None
            raise VerifyError(f"{node!r}({args}) -> {node.type}: {problem}", where=where)


def node_problem(node: Node) -> str | None:
    """The first rule that ``node`` breaks, in words."""
    return next((p for rule in (*COMMON, *RULES[type(node.attrs)]) if (p := _problem(rule, node))), None)


def _problem(rule: Rule, node: Node) -> str | None:
    """What ``rule`` says; nothing where that depends on open sizes (see ``open_questions``)."""
    try:
        return rule(node)
    except OpenSize:
        return None


def open_questions(graph: Graph) -> tuple[Node, ...]:
    """Nodes that are legal at some of the open sizes only, as far as can be told: ``legal_at`` tells of given ones."""
    return tuple(node for node in graph.nodes if any(_is_open(rule, node) for rule in RULES[type(node.attrs)]))


def _is_open(rule: Rule, node: Node) -> bool:
    try:
        rule(node)
    except OpenSize:
        return True
    return False


def legal_at(node: Node, sizes: Mapping[str, int]) -> bool:
    """Whether a node breaks no rule where open sizes have these values."""
    args = [replace(a, attrs=settle(a.attrs, sizes), args=(), type=settle(a.type, sizes)) for a in node.args]
    settled = replace(node, attrs=settle(node.attrs, sizes), args=tuple(args), type=settle(node.type, sizes))
    return node_problem(settled) is None


# ---- the graph as a whole


def graph_problems(graph: Graph) -> Iterator[str]:
    """What is wrong with order, inputs, outputs and gradients."""
    yield from _order_problems(graph)
    yield from _input_problems(graph)
    yield from _output_problems(graph)


def _order_problems(graph: Graph) -> Iterator[str]:
    seen: set[Node] = set()
    for node in graph.nodes:
        if node in seen:
            yield f"{node!r} is listed twice"
        missing = [a for a in node.args if a not in seen]
        if missing:
            yield f"{node!r} comes before its arguments {missing}"
        seen.add(node)
    uids = {n.uid for n in graph.nodes}
    if len(uids) != len(graph.nodes):
        yield "two nodes have one uid: they come from different builders"


def _input_problems(graph: Graph) -> Iterator[str]:
    for i, node in enumerate(graph.inputs):
        if not isinstance(node.attrs, Input):
            yield f"input {i} is {node!r}, not an input node"
        elif node.attrs.position != i:
            yield f"input {node.attrs.name!r} stands at {i} but has position {node.attrs.position}"
    listed = set(graph.inputs)
    for node in graph.nodes:
        if node.is_a(Input) and node not in listed:
            yield f"{node!r} is read but is not among the graph's inputs"


def _output_problems(graph: Graph) -> Iterator[str]:
    nodes = set(graph.nodes)
    if not 0 <= graph.num_forward <= len(graph.outputs):
        yield f"num_forward is {graph.num_forward} for {len(graph.outputs)} outputs"
    if any(n is not None and n not in nodes for n in graph.outputs):
        yield "an output is not a node of the graph"
    if len(graph.grad_of) != len(graph.gradients):
        yield f"{len(graph.gradients)} gradients but grad_of has {len(graph.grad_of)} entries"
    if len(set(graph.grad_of)) != len(graph.grad_of):
        yield f"grad_of {graph.grad_of} names an input twice"
    for at, grad in zip(graph.grad_of, graph.gradients, strict=False):
        if not 0 <= at < len(graph.inputs):
            yield f"grad_of names input {at} of {len(graph.inputs)}"
        elif grad is not None and grad.shape != graph.inputs[at].shape:
            yield f"gradient {grad!r} of input {at} has shape {grad.shape}, not {graph.inputs[at].shape}"


# ---- rules of every node


def sizes_are_sane(node: Node) -> str | None:
    """Sizes are plain non-negative integers, or open."""
    bad = any(not is_open(s) and (type(s) is not int or s < 0) for s in node.shape)
    return f"shape {node.shape} is not made of non-negative integers" if bad else None


def _arity(*counts: int) -> Rule:
    def rule(node: Node) -> str | None:
        return None if len(node.args) in counts else f"takes {counts} arguments, has {len(node.args)}"

    return rule


def keeps_dtype(node: Node) -> str | None:
    """Every argument has the node's dtype."""
    wrong = [a for a in node.args if a.dtype is not node.dtype]
    return f"argument {wrong[0]!r} is {wrong[0].dtype.value}" if wrong else None


# ---- leaves


def input_is_described(node: Node) -> str | None:
    """One stride a dim, and a known role."""
    assert isinstance(node.attrs, Input)
    if len(node.attrs.strides) != node.type.rank:
        return f"{len(node.attrs.strides)} strides for rank {node.type.rank}"
    return None if node.attrs.role in ROLES else f"unknown role {node.attrs.role!r}"


def const_is_scalar(node: Node) -> str | None:
    """Shape () and a Python value of the dtype's kind."""
    assert isinstance(node.attrs, Const)
    kind = float if node.dtype.is_float else bool if node.dtype is DType.BOOL else int
    if node.shape:
        return "a constant is a scalar"
    return None if type(node.attrs.value) is kind else f"value {node.attrs.value!r} is not a {kind.__name__}"


def iota_axis(node: Node) -> str | None:
    """The axis exists."""
    assert isinstance(node.attrs, Iota)
    return None if 0 <= node.attrs.axis < node.type.rank else f"no axis {node.attrs.axis}"


# ---- arithmetic


def map_shapes(node: Node) -> str | None:
    """Arguments have the node's shape, scalar constants aside."""
    wrong = [a for a in node.args if a.shape != node.shape and not a.is_a(Const)]
    return f"argument {wrong[0]!r} has shape {wrong[0].shape}" if wrong else None


def map_types(node: Node) -> str | None:
    """The function exists and gives the node's dtype from the arguments'."""
    assert isinstance(node.attrs, Map)
    if node.attrs.fn not in MAP_FNS:
        return f"unknown function {node.attrs.fn!r}"
    try:
        want = map_dtype(node.attrs.fn, [a.dtype for a in node.args])
    except ValueError as error:
        return str(error)
    return None if want is node.dtype else f"the result should be {want.value}"


def map_domain(node: Node) -> str | None:
    """The function is defined for the argument's kind of number."""
    assert isinstance(node.attrs, Map)
    fn, dtype = node.attrs.fn, node.args[-1].dtype
    if fn in FLOAT_ONLY and not dtype.is_float:
        return f"{fn} needs a float, got {dtype.value}"
    if fn in NEVER_FLOAT and dtype.is_float:
        return f"{fn} of {dtype.value}"
    return f"{fn} of bool" if fn in NEVER_BOOL and dtype is DType.BOOL else None


def reduce_is_legal(node: Node) -> str | None:
    """Known function; axes sorted, distinct, in range, not empty; reduced dims dropped."""
    assert isinstance(node.attrs, Reduce)
    axes, x = node.attrs.axes, node.args[0]
    if node.attrs.fn not in REDUCE_FNS:
        return f"unknown function {node.attrs.fn!r}"
    if not axes or list(axes) != sorted(set(axes)) or axes[0] < 0 or axes[-1] >= x.type.rank:
        return f"axes {axes} of rank {x.type.rank}"
    kept = tuple(s for i, s in enumerate(x.shape) if i not in axes)
    return None if kept == node.shape else f"the result should have shape {kept}"


def dot_is_legal(node: Node) -> str | None:
    """[P, M, K] x [P, K, N] (+ [N]) -> [P, M, N], operands of one dtype."""
    a, b, *bias = node.args
    if a.type.rank != 3 or b.type.rank != 3:
        return "operands must have rank 3"
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return f"operands {a.shape} and {b.shape} do not match"
    if a.dtype is not b.dtype:
        return f"operands are {a.dtype.value} and {b.dtype.value}"
    if bias and bias[0].shape != (b.shape[2],):
        return f"bias has shape {bias[0].shape}"
    want = (a.shape[0], a.shape[1], b.shape[2])
    return None if node.shape == want else f"the result should have shape {want}"


def cast_changes(node: Node) -> str | None:
    """A cast keeps the shape and changes the dtype."""
    if node.shape != node.args[0].shape:
        return "a cast keeps the shape"
    return "a cast to the same dtype" if node.dtype is node.args[0].dtype else None


def again_is_same(node: Node) -> str | None:
    """The type is that of the argument."""
    return None if node.type == node.args[0].type else f"the result should be {node.args[0].type}"


# ---- moves


def permute_is_legal(node: Node) -> str | None:
    """``perm`` is a permutation, and the shape follows."""
    assert isinstance(node.attrs, Permute)
    perm, x = node.attrs.perm, node.args[0]
    if sorted(perm) != list(range(x.type.rank)):
        return f"{perm} is not a permutation of {x.type.rank} dims"
    want = tuple(x.shape[p] for p in perm)
    return None if node.shape == want else f"the result should have shape {want}"


def reshape_is_legal(node: Node) -> str | None:
    """The number of elements is kept."""
    same = math.prod(node.shape) == node.args[0].type.numel
    return None if same else f"{node.args[0].type.numel} elements into {node.type.numel}"


def expand_is_legal(node: Node) -> str | None:
    """Same rank; only dims of size 1 change."""
    x = node.args[0]
    if x.type.rank != node.type.rank:
        return "an expansion keeps the rank"
    bad = [i for i, (a, b) in enumerate(zip(x.shape, node.shape, strict=True)) if a not in (1, b)]
    return f"dim {bad[0]} of size {x.shape[bad[0]]} expands to {node.shape[bad[0]]}" if bad else None


def slice_is_legal(node: Node) -> str | None:
    """One start and step a dim, no step of 0, first and last index in range."""
    assert isinstance(node.attrs, Slice)
    starts, steps, x = node.attrs.starts, node.attrs.steps, node.args[0]
    if not len(starts) == len(steps) == node.type.rank == x.type.rank:
        return f"starts {starts}, steps {steps}, rank {x.type.rank}"
    for i, (start, step, size, whole) in enumerate(zip(starts, steps, node.shape, x.shape, strict=True)):
        last = start + step * (size - 1)
        if step == 0 or (size > 0 and not (0 <= start < whole and 0 <= last < whole)):
            return f"dim {i}: start {start}, step {step}, size {size} of {whole}"
    return None


def pad_is_legal(node: Node) -> str | None:
    """The input lies inside the result."""
    assert isinstance(node.attrs, Pad)
    lo, x = node.attrs.lo, node.args[0]
    if not len(lo) == node.type.rank == x.type.rank:
        return f"lo {lo}, ranks {x.type.rank} and {node.type.rank}"
    bad = [i for i in range(len(lo)) if lo[i] < 0 or lo[i] + x.shape[i] > node.shape[i]]
    return f"dim {bad[0]} does not fit" if bad else None


def concat_is_legal(node: Node) -> str | None:
    """Parts agree off the axis, and their sizes add up on it."""
    assert isinstance(node.attrs, Concat)
    axis = node.attrs.axis
    if not node.args or not 0 <= axis < node.type.rank:
        return f"axis {axis}, {len(node.args)} parts"
    for part in node.args:
        if part.type.rank != node.type.rank or _without(part.shape, axis) != _without(node.shape, axis):
            return f"part {part!r} has shape {part.shape}"
    total = sum(p.shape[axis] for p in node.args)
    return None if total == node.shape[axis] else f"parts add up to {total}"


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


# ---- loads by index


def gather_is_legal(node: Node) -> str | None:
    """A table of the node's dtype, and an integer index of its shape; the table's shape is the same off the axis."""
    assert isinstance(node.attrs, Gather)
    axis, (table, index) = node.attrs.axis, node.args
    if table.dtype is not node.dtype:
        return f"the table is {table.dtype.value}"
    if index.dtype not in (DType.I32, DType.I64):
        return f"the index is {index.dtype.value}"
    if table.type.rank != node.type.rank or not 0 <= axis < node.type.rank:
        return f"axis {axis}, ranks {table.type.rank} and {node.type.rank}"
    if index.shape != node.shape:
        return f"the index has shape {index.shape}"
    same = _without(table.shape, axis) == _without(node.shape, axis)
    return None if same else f"the table has shape {table.shape}"


# ---- opaque calls


def opaque_type(node: Node) -> str | None:
    """The node's type is that of the first tensor result."""
    assert isinstance(node.attrs, Opaque)
    first = next((r for r in node.attrs.results if r is not None), None)
    return None if first == node.type else f"the first tensor result is {first}"


def pick_is_legal(node: Node) -> str | None:
    """Picks an existing tensor result of an opaque call, with its type."""
    assert isinstance(node.attrs, Pick)
    call = node.args[0].attrs
    if not isinstance(call, Opaque):
        return "the argument is not an opaque call"
    if not 0 <= node.attrs.index < len(call.results):
        return f"result {node.attrs.index} of {len(call.results)}"
    return None if call.results[node.attrs.index] == node.type else f"result is {call.results[node.attrs.index]}"


COMMON: tuple[Rule, ...] = (sizes_are_sane,)
RULES: dict[type, tuple[Rule, ...]] = {
    Input: (_arity(0), input_is_described),
    Const: (_arity(0), const_is_scalar),
    Iota: (_arity(0), iota_axis),
    Map: (_arity(1, 2, 3), map_types, map_shapes, map_domain),
    Cast: (_arity(1), cast_changes),
    Reduce: (_arity(1), keeps_dtype, reduce_is_legal),
    Dot: (_arity(2, 3), dot_is_legal),
    Again: (_arity(1), again_is_same),
    Permute: (_arity(1), keeps_dtype, permute_is_legal),
    Reshape: (_arity(1), keeps_dtype, reshape_is_legal),
    Expand: (_arity(1), keeps_dtype, expand_is_legal),
    Slice: (_arity(1), keeps_dtype, slice_is_legal),
    Pad: (_arity(1), keeps_dtype, pad_is_legal),
    Concat: (keeps_dtype, concat_is_legal),
    Gather: (_arity(2), gather_is_legal),
    Opaque: (opaque_type,),
    Pick: (_arity(1), pick_is_legal),
}
