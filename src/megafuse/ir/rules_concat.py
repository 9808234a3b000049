"""Rules that move work into the parts of a concatenation, so that each part is computed where its values are."""

from __future__ import annotations

from megafuse.ir.graph import Builder, Node
from megafuse.ir.rewrite import Rule, rule
from megafuse.ir.types import Cast, Concat, Permute, Reduce


def _concat(node: Node) -> Concat | None:
    return node.attrs if isinstance(node.attrs, Concat) else None


@rule(Cast)
def cast_of_concat(b: Builder, node: Node) -> Node | None:
    """cast(cat(a, b)) = cat(cast(a), cast(b)): a cast is pointwise."""
    attrs = _concat(node.args[0])
    return None if attrs is None else b.concat([b.cast(p, node.dtype) for p in node.args[0].args], attrs.axis)


@rule(Permute)
def permute_of_concat(b: Builder, node: Node) -> Node | None:
    """permute(cat(a, b)) = cat(permute(a), permute(b)) along the axis that the old one became."""
    attrs = _concat(node.args[0])
    assert isinstance(node.attrs, Permute)
    if attrs is None:
        return None
    perm = node.attrs.perm
    return b.concat([b.permute(p, perm) for p in node.args[0].args], perm.index(attrs.axis))


@rule(Reduce)
def reduce_of_concat(b: Builder, node: Node) -> Node | None:
    """A reduction over axes other than the concat's runs on each part alone."""
    attrs = _concat(node.args[0])
    assert isinstance(node.attrs, Reduce)
    axes = node.attrs.axes
    if attrs is None or attrs.axis in axes:
        return None
    axis = attrs.axis - sum(a < attrs.axis for a in axes)
    return b.concat([b.reduce(node.attrs.fn, p, axes) for p in node.args[0].args], axis)


CONCAT_RULES: tuple[Rule, ...] = (cast_of_concat, permute_of_concat, reduce_of_concat)
