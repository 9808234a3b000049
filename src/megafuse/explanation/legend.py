"""What the tensors of a plan are: the names in kernels are short, and say little of gradients."""

from __future__ import annotations

from collections.abc import Sequence

from megafuse.capture.types import Captured, Leaf
from megafuse.compiler import Compiled
from megafuse.ir.graph import Node

KINDS = ("input", "tangent", "output", "grad", "saved")


def legend(compiled: Compiled, describe: dict[int, str]) -> tuple[str, ...]:
    """One line for each kind of tensor that stays beyond a kernel: ``name = what it is``, separated by commas.

    ``describe`` says what a graph value computes and where, by its number.
    """
    step, captured = compiled.step, compiled.captured
    found = {b.name: _given(b.position, captured) for b in step.buffers if b.kind in ("input", "tangent")}
    for number, view in enumerate(step.outputs):
        if view is not None:
            found.setdefault(view.buffer, _output(number, captured))
    for leaf, view in zip(captured.graph.grad_of, step.grads, strict=True):
        if view is not None:
            found.setdefault(view.buffer, f"gradient of {captured.leaves[leaf].label}")
    made: dict[str, Node] = {name: node for node, name in step.names.items()}
    for buffer in step.buffers:
        if buffer.kind == "saved" and buffer.name in made:
            found.setdefault(buffer.name, describe[made[buffer.name].uid])
    lines = ([f"{b.name} = {found[b.name]}" for b in step.buffers if b.kind == k and b.name in found] for k in KINDS)
    return tuple(", ".join(line) for line in lines if line)


def _given(position: int, captured: Captured) -> str:
    leaves: Sequence[Leaf] = captured.leaves
    if position < len(leaves):
        return leaves[position].label
    return f"upstream gradient of {_output(captured.tangent_of[position - len(leaves)], captured)}"


def _output(number: int, captured: Captured) -> str:
    """The user's outputs come first, then the new values of what the call changes."""
    count = captured.out_spec.num_tensors
    if number < count:
        return "output" if count == 1 else f"output {number}"
    return f"new value of {captured.leaves[captured.mutations[number - count][0]].label}"
