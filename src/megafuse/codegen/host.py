"""Prints a step's launch code: one readable Python function for forward, one for backward.

The text imports nothing. The runtime (or the preamble of an exported file) supplies these names as module globals:

* ``empty(shape, strides, dtype)``: an uninitialised tensor on the step's device;
* ``view(tensor, shape, strides, offset)``: strided view, ``offset`` in elements from the tensor's own first element;
* ``detached(tensor)``: the same memory as a plain tensor, no view of another (a returned output);
* ``fresh(tensor)``: a copy that shares memory with nothing (a returned gradient);
* ``arrange(tensor, shape, strides, dtype)``: ``tensor`` itself where it has that layout, else a copy that has; zeros
  for None;
* ``mm, bmm(a, b, out=)`` and ``addmm, baddbmm(bias, a, b, out=)``: library matrix products;
* ``opaque(call, args)``: runs an ATen call of the captured graph, returns the tuple of its results;
* dtype tokens (``f32``, ``bf16``, ...; ``bool_``) and one launcher per kernel, under the kernel's name;
* the values of open sizes (``n``), where the step serves several.
"""

from __future__ import annotations

import builtins
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from megafuse.codegen.artifact import HostSource
from megafuse.codegen.names import RESERVED, Namer
from megafuse.codegen.writer import LINE, Writer
from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError
from megafuse.core.sizes import may_exceed, open_dims
from megafuse.schedule.types import Alloc, Buffer, Call, DotCall, Free, Launch, OpaqueCall, Step, View

HELPERS = ("empty", "view", "detached", "fresh", "arrange", "mm", "bmm", "addmm", "baddbmm", "opaque")
_ARGUMENTS = (
    *("inputs", "saved", "tangents", "forward", "backward", "_"),
    *("SAVED_INPUTS", "SAVED_STRIDES", "OVERWRITTEN", "RETURNED_AGAIN"),
)
_HEAD = """Launch code of one fused step.

forward(inputs) -> (outputs, saved); backward(saved, tangents) -> grads. All are lists of tensors (None: no tensor); the
lists passed in are emptied, so that a tensor dies after its last use."""
_OPEN = "\n\nSizes that differ from call to call are names whose values the module is given when it is loaded."


def print_host(step: Step, kernel_names: Sequence[str], *, tangent_base: int = 0) -> HostSource:
    """The launch code of ``step``. ``kernel_names[i]`` names the launcher of kernel ``i``.

    ``tangents[j]`` is the tangent buffer of position ``tangent_base + j``: where tangents are numbered after the graph
    inputs, ``tangent_base`` is the number of the latter. ``saved[i]`` is ``step.saved[i]``. Three module constants go
    with the functions: ``SAVED_INPUTS[i]``, the input that ``saved[i]`` is (-1: none), ``SAVED_STRIDES[i]``, the
    strides that backward relies on, and ``OVERWRITTEN``, the positions in ``saved`` that backward writes over. Where an
    output is one tensor with a later output, ``RETURNED_AGAIN`` holds its position.

    Raises:
        VerifyError: a call uses a buffer that is not there, or writes to memory that the caller sees.
    """
    dims = open_dims((step.buffers, step.forward, step.backward, step.outputs, step.grads))
    names = _buffer_names(step, kernel_names, [d.name for d in dims])
    writer = Writer()
    writer.raw(f'"""{_HEAD}{_OPEN * bool(dims)}\n"""')
    writer.blank()
    writer.line(f"SAVED_INPUTS = {_tuple(_saved_inputs(step))}")
    writer.call(
        "SAVED_STRIDES = (", [str(step.buffer(n).strides) for n in step.saved], ",)" if len(step.saved) == 1 else ")"
    )
    writer.line(f"OVERWRITTEN = {_tuple(_overwritten(step))}")
    if again := [i for i, view in enumerate(step.outputs) if view is not None and view in step.outputs[i + 1 :]]:
        writer.line(f"RETURNED_AGAIN = {_tuple(again)}")
    needs = _Function(step, names, kernel_names, writer).forward()
    if step.backward or any(g is not None for g in step.grads):
        needs |= _Function(step, names, kernel_names, writer).backward(tangent_base)
    return HostSource(writer.text, tuple(sorted(needs)), tuple(d.name for d in dims))


def dtype_token(dtype: DType) -> str:
    """The name of ``dtype`` in launch code: its value, but ``bool_`` for BOOL."""
    return "bool_" if dtype is DType.BOOL else dtype.value


def whole(view: View, buffer: Buffer) -> bool:
    """True when ``view`` is ``buffer`` itself. Strides of dims of size 1 do not count."""
    if view.offset or view.shape != buffer.shape:
        return False
    if 0 in view.shape:
        return True
    return all(v == b or n == 1 for n, v, b in zip(view.shape, view.strides, buffer.strides, strict=True))


def written_by(call: Call, step: Step) -> tuple[str, ...]:
    """Buffers whose memory ``call`` writes."""
    if isinstance(call, DotCall):
        return (call.out.buffer,)
    if isinstance(call, Launch):
        return step.kernels[call.kernel].writes
    return ()


def _tuple(values: Iterable[object]) -> str:
    items = [str(v) for v in values]
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _buffer_names(step: Step, kernel_names: Sequence[str], dims: Sequence[str]) -> dict[str, str]:
    taken = {*RESERVED, *dir(builtins), *HELPERS, *_ARGUMENTS, *kernel_names, *map(dtype_token, DType), *dims}
    namer = Namer(frozenset(taken))
    return {b.name: namer.one(b.name) for b in step.buffers}


def _saved_inputs(step: Step) -> list[int]:
    buffers = {b.name: b for b in step.buffers}
    return [buffers[n].position if buffers[n].kind == "input" else -1 for n in step.saved]


def _overwritten(step: Step) -> list[int]:
    written = {name for call in step.backward for name in written_by(call, step)}
    for view in step.outputs:
        if view is not None and view.buffer in written:
            raise VerifyError(f"backward writes over {view.buffer!r}, which forward returned to the caller")
    return [i for i, name in enumerate(step.saved) if name in written]


def _squeezed(view: View) -> View:
    """Without its first dim, which has size 1."""
    return View(view.buffer, view.shape[1:], view.strides[1:], view.offset)


def _dot_views(call: DotCall) -> tuple[View, View, View]:
    """``out, a, b`` as printed: 2-D when there is one problem only, so that the library copies no operand."""
    if call.out.shape[0] == 1:
        return _squeezed(call.out), _squeezed(call.a), _squeezed(call.b)
    return call.out, call.a, call.b


def _views(call: Call) -> tuple[View, ...]:
    if isinstance(call, DotCall):
        return (*_dot_views(call), *([call.bias] if call.bias else []))
    return call.args if isinstance(call, OpaqueCall) else ()


def _mentioned(call: Call) -> set[str]:
    """Buffers that a call reads or writes (allocation and release aside)."""
    if isinstance(call, Launch):
        return set(call.args)
    results = {r for r in call.results if r} if isinstance(call, OpaqueCall) else set()
    return results | {v.buffer for v in _views(call)}


def _extent(view: View) -> tuple[int, int]:
    """First element and one past the last element that ``view`` can touch."""
    if 0 in view.shape:
        return view.offset, view.offset
    last = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    return view.offset, view.offset + last + 1


def _overlap(a: View, b: View) -> bool:
    (a_lo, a_hi), (b_lo, b_hi) = _extent(a), _extent(b)
    return a.buffer == b.buffer and may_exceed(b_hi, a_lo) and may_exceed(a_hi, b_lo)


class _Function:
    """Printer of one function. ``live`` are the buffers that exist at the present line, ``own`` those made here."""

    def __init__(self, step: Step, names: Mapping[str, str], kernel_names: Sequence[str], writer: Writer) -> None:
        self.step, self.names, self.kernel_names, self.writer = step, names, kernel_names, writer
        self.buffers = {b.name: b for b in step.buffers}
        self.live: set[str] = set()
        self.own: set[str] = set()
        self.needs: set[str] = set()
        self.uses: Counter[View] = Counter()
        self.locals: dict[View, str] = {}
        self.pending: list[str] = []

    def forward(self) -> set[str]:
        """Print ``forward``; returns the globals that it needs."""
        returned = [v for v in self.step.outputs if v is not None]
        used = self._count(self.step.forward, returned) | set(self.step.saved)
        self.writer.line()
        self.writer.line()
        with self.writer.block("def forward(inputs):"):
            for buffer in self._of_kind("input", used):
                self._load(buffer, f"inputs[{buffer.position}]")
            self.writer.line("inputs.clear()")
            self._calls(self.step.forward)
            outputs = [self._output(v) for v in self.step.outputs]
            saved = [self._name(n) for n in self.step.saved]
            lists = [f"[{', '.join(outputs)}]", f"[{', '.join(saved)}]"]
            fits = sum(map(len, lists)) < LINE - 20
            self.writer.call("return " if fits else "return (", lists, "" if fits else ")")
        return self.needs

    def backward(self, tangent_base: int) -> set[str]:
        """Print ``backward``; returns the globals that it needs."""
        returned = [v for v in self.step.grads if v is not None]
        used = self._count(self.step.backward, returned)
        self.writer.line()
        self.writer.line()
        with self.writer.block("def backward(saved, tangents):"):
            for position, name in enumerate(self.step.saved):
                if name in used:
                    self._load(self.buffers[name], f"saved[{position}]")
            for buffer in self._of_kind("tangent", used):
                self._arrange(buffer, f"tangents[{buffer.position - tangent_base}]")
            self.writer.line("saved.clear()")
            self.writer.line("tangents.clear()")
            self._calls(self.step.backward)
            earlier: list[View] = []
            self.writer.call("return [", [self._gradient(v, earlier) for v in self.step.grads], "]")
        return self.needs

    def _count(self, calls: Sequence[Call], returned: Sequence[View]) -> set[str]:
        """Count how often each view is printed; returns the buffers used at all."""
        used = {v.buffer for v in returned}
        self.uses.update(returned)
        for call in calls:
            self.uses.update(_views(call))
            used |= _mentioned(call)
        return used

    def _of_kind(self, kind: str, used: set[str]) -> list[Buffer]:
        found = [b for b in self.step.buffers if b.kind == kind and b.name in used]
        return sorted(found, key=lambda b: b.position)

    def _load(self, buffer: Buffer, source: str) -> None:
        shape = ", ".join(map(repr, buffer.shape))
        self.writer.line(f"{self.names[buffer.name]} = {source}  # {buffer.dtype.value}[{shape}]")
        self.live.add(buffer.name)

    def _arrange(self, buffer: Buffer, source: str) -> None:
        self._global("arrange", dtype_token(buffer.dtype))
        layout = [str(buffer.shape), str(buffer.strides), dtype_token(buffer.dtype)]
        self.writer.call(f"{self.names[buffer.name]} = arrange(", [source, *layout])
        self.live.add(buffer.name)

    def _global(self, *names: str) -> None:
        self.needs.update(names)

    def _name(self, buffer: str) -> str:
        if buffer not in self.live:
            raise VerifyError(f"launch code uses buffer {buffer!r}, which is not allocated, not given or already freed")
        return self.names[buffer]

    def _expr(self, view: View) -> str:
        """``view`` as an expression; a view that is used again gets a local name first."""
        name = self._name(view.buffer)
        if whole(view, self.buffers[view.buffer]):
            return name
        if view in self.locals:
            return self.locals[view]
        self._global("view")
        text = f"view({name}, {view.shape}, {view.strides}, {view.offset})"
        if self.uses[view] < 2:
            return text
        local = f"{name}_view{sum(v.buffer == view.buffer for v in self.locals) + 1}"
        self.writer.line(f"{local} = {text}")
        self.locals[view] = local
        return local

    def _calls(self, calls: Sequence[Call]) -> None:
        for call in calls:
            if isinstance(call, Free):
                self._free(call)
                continue
            self._flush()
            for name in written_by(call, self.step):
                kind = self.buffers[name].kind
                if kind in ("input", "tangent"):
                    raise VerifyError(f"a call writes to {kind} {name!r}, which belongs to the caller")
            self._print(call)
        self._flush()

    def _free(self, call: Free) -> None:
        """Names to delete are gathered, so that neighbouring releases share a line."""
        if call.buffer not in self.live:
            return  # not used here, so it was never taken out of its list
        self.live.discard(call.buffer)
        self.pending.append(self.names[call.buffer])
        for view in [v for v in self.locals if v.buffer == call.buffer]:
            self.pending.append(self.locals.pop(view))

    def _flush(self) -> None:
        if self.pending:
            self.writer.line(f"del {', '.join(self.pending)}")
            self.pending = []

    @functools.singledispatchmethod
    def _print(self, call: Call) -> None:
        raise VerifyError(f"launch code cannot express {call!r}")

    @_print.register
    def _(self, call: Alloc) -> None:
        buffer = self.buffers[call.buffer]
        self._global("empty", dtype_token(buffer.dtype))
        args = [str(buffer.shape), str(buffer.strides), dtype_token(buffer.dtype)]
        self.writer.call(f"{self.names[call.buffer]} = empty(", args)
        self.live.add(call.buffer)
        self.own.add(call.buffer)

    @_print.register
    def _(self, call: Launch) -> None:
        self._global(self.kernel_names[call.kernel])
        self.writer.call(f"{self.kernel_names[call.kernel]}(", [self._name(a) for a in call.args])

    @_print.register
    def _(self, call: DotCall) -> None:
        out, a, b = _dot_views(call)
        batched = len(out.shape) == 3
        fn = {(True, False): "bmm", (True, True): "baddbmm", (False, False): "mm", (False, True): "addmm"}[
            batched, call.bias is not None
        ]
        self._global(fn)
        args = [self._expr(v) for v in ([call.bias] if call.bias else []) + [a, b]]
        args.append(f"out={self._expr(out)}")
        comment = f"{list(a.shape)} @ {list(b.shape)} -> {list(out.shape)}"
        self._commented(f"{fn}(", args, comment)

    @_print.register
    def _(self, call: OpaqueCall) -> None:
        self._global("opaque")
        args = [self._expr(v) for v in call.args]
        kept = [(i, name) for i, name in enumerate(call.results) if name]
        targets = [self.names[name] if name else "_" for name in call.results]
        head = f"{', '.join(targets)}{',' * (len(targets) == 1)} = " if targets else ""
        self._commented(f"{head}opaque(", [str(call.call), _tuple(args)], call.reason)
        for _, name in kept:
            self._arrange(self.buffers[name], self.names[name])
            self.own.add(name)

    def _commented(self, head: str, args: Sequence[str], comment: str) -> None:
        """A call with a comment behind it, or above it where the line would be too long."""
        comment = " ".join(comment.split())
        flat = f"{head}{', '.join(args)})"
        if comment and len(flat) + len(comment) + 8 <= LINE:
            self.writer.line(f"{flat}  # {comment}")
            return
        if comment:
            self.writer.comment(comment)
        self.writer.call(head, args)

    def _output(self, view: View | None) -> str:
        """An output: a view of an input stays one; memory of the step's own is handed out as a plain tensor."""
        if view is None:
            return "None"
        text, buffer = self._expr(view), self.buffers[view.buffer]
        if buffer.kind == "input" or whole(view, buffer):
            return text
        self._global("detached")
        return f"detached({text})"

    def _gradient(self, view: View | None, earlier: list[View]) -> str:
        """A gradient, on which autograd may accumulate in place: nothing else that lives on may share its memory.

        A whole tangent passes through as the same object, as in eager mode: autograd sees its other references.
        """
        if view is None:
            return "None"
        text, buffer = self._expr(view), self.buffers[view.buffer]
        shared = any(v != view and _overlap(v, view) for v in earlier)
        earlier.append(view)
        through = buffer.kind == "tangent" and whole(view, buffer)
        if (view.buffer in self.own and not shared) or through:
            return text
        self._global("fresh")
        return f"fresh({text})"
