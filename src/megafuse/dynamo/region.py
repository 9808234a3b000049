"""A Dynamo graph taken apart: a function of tensors alone to fuse, and the views of its results and inputs around it.

* **Sizes** that come as inputs of their own (dynamic shapes) are read from the tensor that has them, so that the fused
  function is keyed by shapes alone. Other numbers stay plain arguments, one program for each value.
* **Outputs that share memory** with an input or with one another are no results of the fused function: it returns the
  value that owns the memory, and the views are taken of it, and of the inputs, when it has run. So a later change in
  place shows in all of them, as in eager mode.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

VIEWS = frozenset(
    "alias as_strided chunk contiguous detach diagonal dsplit expand expand_as flatten getattr getitem hsplit "
    "movedim moveaxis narrow permute ravel reshape reshape_as select split split_with_sizes squeeze swapaxes swapdims "
    "t tensor_split transpose unbind unflatten unfold unsqueeze view view_as vsplit".split()
)  # calls that may give a view of their first argument, and change nothing
_MODE_CHANGES = ("_set_grad_enabled", "_enter_inference_mode", "inference_mode")
Read = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Region:
    """``body`` is fused: ``reads[i]`` finds its i-th argument, called ``names[i]``, among the graph's.

    ``scalars`` are the arguments of ``body`` that are plain numbers. ``finish(*graph arguments, *body results)`` gives
    the graph's outputs; None where they are the body's.
    """

    body: GraphModule
    reads: tuple[Read, ...]
    names: tuple[str, ...]
    scalars: tuple[int, ...]
    finish: GraphModule | None

    @property
    def computes(self) -> bool:
        """There is something to run besides views."""
        return any(n.op in ("call_function", "call_method", "call_module") for n in self.body.graph.nodes)


def cut(gm: GraphModule) -> Region | str:
    """The region of a Dynamo graph, or why it has none."""
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    wanted = [o for o in dict.fromkeys(pytree.tree_leaves(output.args[0])) if isinstance(o, Node)]
    if any("example_value" not in o.meta for o in wanted):
        return "PyTorch does not say what its outputs are"
    given = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
    owners = _owners(wanted, given)
    if isinstance(owners, str):
        return owners
    results = [o for o in dict.fromkeys(owners.values()) if o not in given]
    viewed = any(o is not owner for o, owner in owners.items())
    if viewed and any(_name(n) in _MODE_CHANGES for n in gm.graph.nodes):
        return "it changes the grad mode, and an output shares memory with another value"
    body, reads, names, scalars = _body(gm, results)
    finish = None if list(owners.values()) == results == wanted else _finish(gm, output, results)
    return finish if isinstance(finish, str) else Region(body, reads, names, scalars, finish)


# --- memory -----------------------------------------------------------------------------------------------------------


def _owners(wanted: Sequence[Node], given: Sequence[Node]) -> dict[Node, Node] | str:
    """For each output, the value that owns its memory where others share it, else the output itself."""
    of_inputs = frozenset().union(*(_storages(n) for n in given))
    count = Counter(s for o in wanted for s in _storages(o))
    owners = {}
    for out in wanted:
        shared = any(s in of_inputs or count[s] > 1 for s in _storages(out))
        owner = _owner(out) if shared else out
        if owner is None:
            return f"its output {out.name} shares memory with another value in a way that is not a plain view"
        owners[out] = owner
    return owners


def _storages(node: Node) -> frozenset[int]:
    """The memory behind a node's value, by Dynamo's stand-ins."""
    tensors = [t for t in pytree.tree_leaves(node.meta.get("example_value")) if isinstance(t, torch.Tensor)]
    return frozenset(int(t.untyped_storage()._cdata) for t in tensors if t.layout is torch.strided)


def _owner(node: Node) -> Node | None:
    """The tensor of which ``node`` is a view by way of calls that only view; None where another call is on the way."""
    if node.op in ("placeholder", "get_attr"):
        return node
    mine = _storages(node)
    parent = next((a for a in node.all_input_nodes if mine & _storages(a)), None)
    if parent is None or (not _is_tensor(parent) and _makes_memory(parent)):
        return node
    return _owner(parent) if _name(node) in VIEWS else None


def _makes_memory(node: Node) -> bool:
    return node.op not in ("placeholder", "get_attr") and not any(
        _storages(node) & _storages(a) for a in node.all_input_nodes
    )


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


# --- the function to fuse ---------------------------------------------------------------------------------------------


def _body(
    gm: GraphModule, results: Sequence[Node]
) -> tuple[GraphModule, tuple[Read, ...], tuple[str, ...], tuple[int, ...]]:
    graph, new = Graph(), dict[Node, Node]()
    inputs: list[tuple[Node, Read, bool]] = []
    sizes = _sizes(gm)
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if node not in sizes:
            new[node] = _input(graph, node, operator.itemgetter(position), not _is_tensor(node), inputs)
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(_attribute(gm, node), torch.Tensor):
            new[node] = _input(graph, node, _reader_of_attribute(gm, node), False, inputs)
        elif node.target == "item" and node.args[0].op == "placeholder":
            new[node] = _input(graph, node, _reader_of_item(_position(gm, node.args[0])), True, inputs)
    for node, (tensor, dim) in sizes.items():
        new[node] = graph.call_method("size", (new[tensor], dim))
    for node in gm.graph.nodes:
        if node not in new and node.op != "output":
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[r] for r in results))
    unused = {*(made for made, *_ in inputs), *(n for n in graph.nodes if _name(n) in VIEWS or n.target == "size")}
    for made in reversed(graph.nodes):
        if made in unused and not made.users:
            graph.erase_node(made)
    used = [i for i in inputs if i[0].users]
    scalars = tuple(i for i, (_, _, scalar) in enumerate(used) if scalar)
    return GraphModule(gm, graph), tuple(r for _, r, _ in used), _names([n.name for n, *_ in used]), scalars


def _input(graph: Graph, node: Node, read: Read, scalar: bool, inputs: list[tuple[Node, Read, bool]]) -> Node:
    """A new input of ``graph`` for ``node``; all are made before any other node."""
    made = graph.placeholder(node.name)
    inputs.append((made, read, scalar))
    return made


def _sizes(gm: GraphModule) -> dict[Node, tuple[Node, int]]:
    """Number inputs that are the size of a tensor input: that tensor, and which of its dims."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    places: dict[Any, tuple[Node, int]] = {}
    for node in filter(_is_tensor, placeholders):
        for dim, size in enumerate(node.meta["example_value"].shape):
            if isinstance(size, torch.SymInt):
                places.setdefault(size.node.expr, (node, dim))
    numbers = [(n, n.meta.get("example_value")) for n in placeholders]
    return {n: places[v.node.expr] for n, v in numbers if isinstance(v, torch.SymInt) and v.node.expr in places}


def _attribute(gm: GraphModule, node: Node) -> Any:
    return operator.attrgetter(str(node.target))(gm)


def _reader_of_attribute(gm: GraphModule, node: Node) -> Read:
    return lambda args: _attribute(gm, node)


def _reader_of_item(position: int) -> Read:
    return lambda args: args[position].item()


def _position(gm: GraphModule, placeholder: Node) -> int:
    return list(gm.graph.find_nodes(op="placeholder")).index(placeholder)


def _names(raw: Sequence[str]) -> tuple[str, ...]:
    """Dynamo's names of inputs without the words for how each was reached, where they still differ then."""
    short = [re.sub(r"^_*(l_)?(self_)?|(modules|parameters|buffers)_+|_+$", "", name.lower()) for name in raw]
    count = Counter(short)
    return tuple(s if s.isidentifier() and count[s] == 1 else name for s, name in zip(short, raw, strict=True))


# --- the outputs ------------------------------------------------------------------------------------------------------


def _finish(gm: GraphModule, output: Node, results: Sequence[Node]) -> GraphModule | str:
    """The graph's outputs from its inputs and the fused function's results."""
    graph, new = Graph(), dict[Node, Node]()
    for node in gm.graph.find_nodes(op="placeholder"):
        new[node] = graph.placeholder(node.name)
    for node in results:
        new[node] = graph.placeholder(node.name)
    needed = _needed(output.all_input_nodes, new)
    for node in gm.graph.nodes:
        if node in needed:
            if _storages(node) and node.op != "get_attr" and _name(node) not in VIEWS:
                return f"a view among its outputs is made from {node.name}, which is computed"
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(torch.fx.node.map_arg(output.args[0], new.__getitem__))
    return GraphModule(gm, graph)


def _needed(outputs: Sequence[Node], available: Collection[Node]) -> set[Node]:
    found: set[Node] = set()
    stack = [o for o in outputs if o not in available]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(a for a in node.all_input_nodes if a not in available)
    return found
