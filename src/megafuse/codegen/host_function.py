"""Prints one of the two functions of launch code: its calls in order, what they allocate, and when that dies."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megafuse.codegen.host_pools import SAVED_POOL, Names, Pools, dtype_token
from megafuse.codegen.writer import LINE, Writer
from megafuse.core.dtypes import DType
from megafuse.core.errors import VerifyError
from megafuse.core.sizes import is_open, may_exceed
from megafuse.schedule.types import Alloc, Buffer, Call, DotCall, Free, Launch, OpaqueCall, Step, View

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


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


def tuple_text(values: Iterable[object]) -> str:
    """Values as a tuple in Python."""
    items = [str(v) for v in values]
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


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


def _same_memory(view: View, buffer: Buffer) -> bool:
    """The view is all of the buffer, whose elements lie densely, in another shape or order."""
    sizes = (*view.shape, *view.strides, *buffer.shape, *buffer.strides, view.offset)
    if any(map(is_open, sizes)) or math.prod(view.shape) != math.prod(buffer.shape):
        return False
    whole_buffer = View(buffer.name, buffer.shape, buffer.strides)
    return _extent(view) == _extent(whole_buffer) == (0, math.prod(buffer.shape))


def _overlap(a: View, b: View) -> bool:
    (a_lo, a_hi), (b_lo, b_hi) = _extent(a), _extent(b)
    return a.buffer == b.buffer and may_exceed(b_hi, a_lo) and may_exceed(a_hi, b_lo)


class Function:
    """Printer of one function. ``live`` are the buffers that exist at the present line, ``own`` those made here."""

    def __init__(self, step: Step, names: Names, kernel_names: Sequence[str], writer: Writer) -> None:
        self.step, self.names, self.kernel_names, self.writer = step, names.buffers, kernel_names, writer
        self.buffers = {b.name: b for b in step.buffers}
        self.live: set[str] = set()
        self.own: set[str] = set()
        self.needs: set[str] = set()
        self.uses: Counter[View] = Counter()
        self.locals: dict[tuple[str, View], str] = {}
        self.pending: list[str] = []
        self.kept = ""  # the kind of pool that outlives the function
        self.all_names = names
        self.pools = Pools(step, (), names, writer)

    def forward(self, saved: Sequence[str]) -> set[str]:
        """Print ``forward``; returns the globals that it needs. ``saved``: buffers, and their pool."""
        self.pools = Pools(self.step, ("forward", "saved"), self.all_names, self.writer)
        self.kept = "saved"
        returned = [v for v in self.step.outputs if v is not None]
        used = self._count(self.step.forward, returned) | set(self.step.saved)
        self._shape_as_used(self.step.forward)
        self.writer.line()
        self.writer.line()
        with self.writer.block("def forward(inputs):"):
            for buffer in self._of_kind("input", used):
                self._load(buffer, f"inputs[{buffer.position}]")
            self.writer.line("inputs.clear()")
            self._calls(self.step.forward)
            outputs = [self._output(v) for v in self.step.outputs]
            kept = [self.pools.memory("saved") if n == SAVED_POOL else self._name(n) for n in saved]
            lists = [f"[{', '.join(outputs)}]", f"[{', '.join(kept)}]"]
            fits = sum(map(len, lists)) < LINE - 20
            self.writer.call("return " if fits else "return (", lists, "" if fits else ")")
        return self.needs

    def backward(self, saved: Sequence[str], tangent_base: int) -> set[str]:
        """Print ``backward``; returns the globals that it needs. ``saved``: as in ``forward``."""
        self.pools = Pools(self.step, ("backward", "saved"), self.all_names, self.writer)
        returned = [v for v in self.step.grads if v is not None]
        used = self._count(self.step.backward, returned)
        self._shape_as_used(self.step.backward)
        self.writer.line()
        self.writer.line()
        with self.writer.block("def backward(saved, tangents):"):
            for position, name in enumerate(saved):
                if name == SAVED_POOL:
                    self._load_pool(f"saved[{position}]")
                elif name in used:
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

    def _shape_as_used(self, calls: Sequence[Call]) -> None:
        """Give buffers of this function the shape of the one view under which they are used, where it is all of them.

        Kernels see addresses alone, so that such a buffer needs no view.
        """
        made = {call.buffer for call in calls if isinstance(call, Alloc)} - set(self.step.saved)
        by_buffer: dict[str, list[View]] = {}
        for view in self.uses:
            by_buffer.setdefault(view.buffer, []).append(view)
        for name, views in by_buffer.items():
            buffer = self.buffers[name]
            if name in made and len(views) == 1 and _same_memory(views[0], buffer):
                self.buffers[name] = replace(buffer, shape=views[0].shape, strides=views[0].strides)

    def _of_kind(self, kind: str, used: set[str]) -> list[Buffer]:
        found = [b for b in self.step.buffers if b.kind == kind and b.name in used]
        return sorted(found, key=lambda b: b.position)

    def _load(self, buffer: Buffer, source: str) -> None:
        shape = ", ".join(map(repr, buffer.shape))
        self.writer.line(f"{self.names[buffer.name]} = {source}  # {buffer.dtype.value}[{shape}]")
        self.live.add(buffer.name)

    def _load_pool(self, source: str) -> None:
        pool = next(p for p in self.step.pools if p.kind == "saved")
        self._global("address")
        self.pools.open(pool, source)
        for name in pool.places:
            self.pools.place(self.buffers[name])
            self.live.add(name)

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

    def _expr(self, view: View, helper: str = "view") -> str:
        """``view`` as an expression; a view that is used again gets a local name first."""
        name = self._name(view.buffer)
        if whole(view, self.buffers[view.buffer]):
            return name
        if (helper, view) in self.locals:
            return self.locals[helper, view]
        self._global(helper)
        text = f"{helper}({name}, {view.shape}, {view.strides}, {view.offset})"
        if self.uses[view] < 2:
            return text
        local = f"{name}_view{sum(v.buffer == view.buffer for _, v in self.locals) + 1}"
        self.writer.line(f"{local} = {text}")
        self.locals[helper, view] = local
        return local

    def _place(self, buffer: str) -> str:
        """What a kernel is given of a buffer: its address."""
        name = self._name(buffer)
        if buffer in self.pools:
            return name
        self._global("address")
        return f"address({name})"

    def _calls(self, calls: Sequence[Call]) -> None:
        if any(isinstance(call, Launch) for call in calls):
            self._global("current_stream")
            self.writer.line("stream = current_stream()")
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
        if call.buffer in self.pools:
            self.pending += self.pools.died(call.buffer, self.kept)
            return
        self.pending.append(self.names[call.buffer])
        for key in [k for k in self.locals if k[1].buffer == call.buffer]:
            self.pending.append(self.locals.pop(key))

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
        self.live.add(call.buffer)
        self.own.add(call.buffer)
        if call.buffer in self.pools:
            if self.pools.place(buffer):
                self._global("empty", "address", dtype_token(DType.U8))
            return
        self._global("empty", dtype_token(buffer.dtype))
        args = [str(buffer.shape), str(buffer.strides), dtype_token(buffer.dtype)]
        self.writer.call(f"{self.names[call.buffer]} = empty(", args)

    @_print.register
    def _(self, call: Launch) -> None:
        self._global(self.kernel_names[call.kernel])
        self.writer.call(f"{self.kernel_names[call.kernel]}(", ["stream", *map(self._place, call.args)])

    @_print.register
    def _(self, call: DotCall) -> None:
        out, a, b = _dot_views(call)
        batched = len(out.shape) == 3
        fn = {(True, False): "bmm", (True, True): "baddbmm", (False, False): "mm", (False, True): "addmm"}[
            batched, call.bias is not None
        ]
        views = [*([call.bias] if call.bias else []), a, b, out]
        if len({self.buffers[v.buffer].dtype for v in views}) > 1:
            fn = f"mixed_{fn}"
        self._global(fn)
        args = [self._expr(v, "part") for v in views]
        args[-1] = f"out={args[-1]}"
        comment = f"{list(a.shape)} @ {list(b.shape)} -> {list(out.shape)}"
        self._commented(f"{fn}(", args, comment)

    @_print.register
    def _(self, call: OpaqueCall) -> None:
        self._global("opaque")
        args = [self._expr(v) for v in call.args]
        kept = [(i, name) for i, name in enumerate(call.results) if name]
        targets = [self.names[name] if name else "_" for name in call.results]
        head = f"{', '.join(targets)}{',' * (len(targets) == 1)} = " if targets else ""
        self._commented(f"{head}opaque(", [str(call.call), tuple_text(args)], call.reason)
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
        text, buffer = self._expr(view, "part"), self.buffers[view.buffer]
        shared = any(v != view and _overlap(v, view) for v in earlier)
        earlier.append(view)
        through = buffer.kind == "tangent" and whole(view, buffer)
        if (view.buffer in self.own and not shared) or through:
            return text
        self._global("fresh")
        return f"fresh({text})"
