"""Activation checkpointing: what a checkpointed region computes is not saved for backward but computed there again.

``torch.compile`` tags the nodes of a region (``meta["recompute"]``, ``meta["ac_graph_id"]``). Backward reads of a
tagged value are served by a second computation of it that starts from what entered the region. Not computed again:
random draws, whose results are kept, and values handed from one region straight to the next, as PyTorch's own
partitioner keeps them.
"""

from __future__ import annotations

import operator

import torch
from torch.utils.checkpoint import CheckpointPolicy

from megafuse.capture.opaque import is_random
from megafuse.capture.origins import is_backward

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def nodes_again(graph: torch.fx.Graph) -> frozenset[torch.fx.Node]:
    """The forward nodes of a joint graph that backward has to compute again."""
    tagged = {n for n in graph.nodes if not is_backward(n) and _is_tagged(n)}
    stack = [a for n in graph.nodes if is_backward(n) for a in n.all_input_nodes if a in tagged]
    found: set[torch.fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(a for a in node.all_input_nodes if a in tagged)
    return frozenset(found)


def _is_tagged(node: torch.fx.Node) -> bool:
    made = _call_of(node)
    drawn = isinstance(made.target, torch._ops.OpOverload) and is_random(made.target)
    if made.op != "call_function" or made.meta.get("recompute") not in _AGAIN or drawn:
        return False
    region = made.meta.get("ac_graph_id", 0)
    return not any(_starts_later(user, region) for user in node.users)


def _call_of(node: torch.fx.Node) -> torch.fx.Node:
    """The call of which ``node`` is (a part of) the result."""
    return _call_of(node.all_input_nodes[0]) if node.target is operator.getitem else node


def _starts_later(user: torch.fx.Node, region: int) -> bool:
    return user.meta.get("recompute") in _AGAIN and user.meta.get("ac_graph_id", 0) > region
