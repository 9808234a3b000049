"""A step's schedule as text: buffers, and every call of forward and backward in order."""

from __future__ import annotations

from megafuse.schedule.types import Alloc, Buffer, Call, DotCall, Free, Launch, OpaqueCall, Step, View


def format_schedule(step: Step) -> str:
    """Buffers with layouts, those that share an allocation, calls of both directions, what is returned and saved."""
    lines = ["buffers", *(f"  {_buffer(b)}" for b in step.buffers)]
    lines += [f"pool of {p.kind}: {p.nbytes} bytes for {', '.join(p.places)}" for p in step.pools]
    for title, calls in (("forward", step.forward), ("backward", step.backward)):
        if calls:
            lines += [title, *(f"  {_call(step, c)}" for c in calls)]
    lines.append(f"outputs: {', '.join(map(_view, step.outputs)) or 'none'}")
    if step.backward:
        lines.append(f"gradients: {', '.join(map(_view, step.grads))}")
        lines.append(f"saved: {', '.join(step.saved)}")
    return "\n".join(lines) + "\n"


def _buffer(b: Buffer) -> str:
    return f"{b.name}: {b.dtype.value}{list(b.shape)} strides {list(b.strides)} {b.kind}"


def _view(view: View | None) -> str:
    if view is None:
        return "none"
    offset = f" + {view.offset}" if view.offset else ""
    return f"{view.buffer}{list(view.shape)} strides {list(view.strides)}{offset}"


def _call(step: Step, call: Call) -> str:
    if isinstance(call, Alloc):
        return f"alloc {call.buffer}"
    if isinstance(call, Free):
        return f"free {call.buffer}"
    if isinstance(call, Launch):
        return f"launch {step.kernels[call.kernel].name}({', '.join(call.args)})"
    if isinstance(call, DotCall):
        bias = f" + {_view(call.bias)}" if call.bias else ""
        return f"dot {_view(call.out)} = {_view(call.a)} @ {_view(call.b)}{bias}"
    return _opaque(call)


def _opaque(call: OpaqueCall) -> str:
    results = ", ".join(r or "_" for r in call.results)
    return f"opaque {results} = call {call.call}({', '.join(map(_view, call.args))})  reason: {call.reason}"
