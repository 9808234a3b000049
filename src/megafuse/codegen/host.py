"""Prints a step's launch code: one readable Python function for forward, one for backward.

The text imports nothing. The runtime (or the preamble of an exported file) supplies these names as module globals:

* ``current_stream()``: the stream to launch on; ``address(tensor)``: where a kernel finds its first element;
* ``empty(shape, strides, dtype)``: an uninitialised tensor on the step's device;
* ``view(tensor, shape, strides, offset)``: strided view, ``offset`` in elements from the tensor's own first element;
* ``part(tensor, shape, strides, offset)``: the same, where autograd need not know that it is a view;
* ``detached(tensor)``: the same memory as a plain tensor, no view of another (a returned output);
* ``fresh(tensor)``: a copy that shares memory with nothing (a returned gradient);
* ``arrange(tensor, shape, strides, dtype)``: ``tensor`` itself where it has that layout, else a copy that has; zeros
  for None;
* ``mm, bmm(a, b, out=)`` and ``addmm, baddbmm(bias, a, b, out=)``: library matrix products of one element type;
  ``mixed_mm`` and so on: of several;
* ``opaque(call, args)``: runs an ATen call of the captured graph, returns the tuple of its results;
* dtype tokens (``f32``, ``bf16``, ...; ``bool_``) and one launcher per kernel, under the kernel's name, which takes the
  stream and addresses;
* the values of open sizes (``n``), where the step serves several.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from megafuse.codegen.artifact import HostSource
from megafuse.codegen.host_function import PRODUCTS, Function, tuple_text, written_by
from megafuse.codegen.host_pools import SAVED_POOL, Names, dtype_token
from megafuse.codegen.names import RESERVED, Namer
from megafuse.codegen.writer import Writer
from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError
from megafuse.core.sizes import open_dims
from megafuse.schedule.types import Buffer, Step

HELPERS = (
    *("current_stream", "address", "empty", "view", "part", "detached", "fresh", "arrange", "opaque"),
    *PRODUCTS,
    *(f"mixed_{name}" for name in PRODUCTS),
)
_ARGUMENTS = (
    *("inputs", "saved", "tangents", "forward", "backward", "stream", "_"),
    *("SAVED_INPUTS", "SAVED_STRIDES", "OVERWRITTEN", "RETURNED_AGAIN", "TANGENTS"),
)
_POOL_NAMES = {"forward": "workspace", "backward": "workspace", "saved": "kept"}
_HEAD = """Launch code of one fused step.

forward(inputs) -> (outputs, saved); backward(saved, tangents) -> grads. All are lists of tensors (None: no tensor); the
lists passed in are emptied, so that a tensor dies after its last use."""
_OPEN = "\n\nSizes that differ from call to call are names whose values the module is given when it is loaded."


def print_host(step: Step, kernel_names: Sequence[str], *, tangent_base: int = 0) -> HostSource:
    """The launch code of ``step``. ``kernel_names[i]`` names the launcher of kernel ``i``.

    ``tangents[j]`` is the tangent buffer of position ``tangent_base + j``: where tangents are numbered after the graph
    inputs, ``tangent_base`` is the number of the latter. ``saved`` are the buffers of ``step.saved`` in order, those of
    a pool as one. Module constants go with the functions: ``SAVED_INPUTS[i]``, the input that ``saved[i]`` is (-1:
    none), ``SAVED_STRIDES[i]``, the strides that backward relies on, ``OVERWRITTEN``, the positions in ``saved`` that
    backward writes over, and ``TANGENTS[j]``, shape, strides and element type of a tangent that backward reads. Where
    an output is one tensor with a later output, ``RETURNED_AGAIN`` holds its position.

    Raises:
        VerifyError: a call uses a buffer that is not there, or writes to memory that the caller sees.
    """
    dims = open_dims((step.buffers, step.forward, step.backward, step.outputs, step.grads))
    names = _names(step, kernel_names, [d.name for d in dims])
    saved = _saved(step)
    writer = Writer()
    writer.raw(f'"""{_HEAD}{_OPEN * bool(dims)}\n"""')
    writer.blank()
    inputs = [b.position if b is not None and b.kind == "input" else -1 for _, b in saved]
    writer.line(f"SAVED_INPUTS = {tuple_text(inputs)}")
    strides = [str((1,) if b is None else b.strides) for _, b in saved]
    writer.call("SAVED_STRIDES = (", strides, ",)" if len(strides) == 1 else ")")
    writer.line(f"OVERWRITTEN = {tuple_text(_overwritten(step, [name for name, _ in saved]))}")
    if again := [i for i, view in enumerate(step.outputs) if view is not None and view in step.outputs[i + 1 :]]:
        writer.line(f"RETURNED_AGAIN = {tuple_text(again)}")
    needs = set[str]()
    if backward := bool(step.backward) or any(g is not None for g in step.grads):
        needs |= _tangents(step, tangent_base, writer)
    needs |= Function(step, names, kernel_names, writer).forward([name for name, _ in saved])
    if backward:
        needs |= Function(step, names, kernel_names, writer).backward([name for name, _ in saved], tangent_base)
    return HostSource(writer.text, tuple(sorted(needs)), tuple(d.name for d in dims))


def _names(step: Step, kernel_names: Sequence[str], dims: Sequence[str]) -> Names:
    taken = {*RESERVED, *dir(builtins), *HELPERS, *_ARGUMENTS, *kernel_names, *map(dtype_token, DType), *dims}
    pools = {f"{name}{end}" for name in _POOL_NAMES.values() for end in ("", "_memory")}
    namer = Namer(frozenset(taken | pools))
    return Names({b.name: namer.one(b.name) for b in step.buffers}, _POOL_NAMES)


def _saved(step: Step) -> list[tuple[str, Buffer | None]]:
    """What ``saved`` holds: buffers by name, and the pool of saved ones, once."""
    pooled = {name for pool in step.pools if pool.kind == "saved" for name in pool.places}
    buffers = {b.name: b for b in step.buffers}
    return [*{(SAVED_POOL, None) if n in pooled else (n, buffers[n]): None for n in step.saved}]


def _tangents(step: Step, base: int, writer: Writer) -> set[str]:
    """Print ``TANGENTS``; returns the globals that it needs."""
    tangents = sorted((b for b in step.buffers if b.kind == "tangent"), key=lambda b: b.position)
    entries = [f"{b.position - base}: ({b.shape}, {b.strides}, {dtype_token(b.dtype)})" for b in tangents]
    writer.call("TANGENTS = {", entries, "}")
    return {dtype_token(b.dtype) for b in tangents}


def _overwritten(step: Step, saved: Sequence[str]) -> list[int]:
    written = {name for call in step.backward for name in written_by(call, step)}
    for view in step.outputs:
        if view is not None and view.buffer in written:
            raise VerifyError(f"backward writes over {view.buffer!r}, which forward returned to the caller")
    return [i for i, name in enumerate(saved) if name in written]
