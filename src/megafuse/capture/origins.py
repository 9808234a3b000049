"""The user's source line behind each traced op: found on the Python stack, carried by fx, inherited by the backward."""

from __future__ import annotations

import dis
import linecache
import os
import re
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.fx import traceback as fx_traceback

from megafuse.ir.types import Origin

TORCH_DIR = str(Path(torch.__file__).absolute().parent) + os.sep
CAPTURE_DIR = str(Path(__file__).absolute().parent) + os.sep
_NN_DIR = str(Path(TORCH_DIR) / "nn" / "modules") + os.sep
_MARK = "megafuse:"
_TRACE_LINE = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


def is_library(filename: str) -> bool:
    """True for code of PyTorch, of capture, and for code with no file."""
    return filename.startswith((TORCH_DIR, CAPTURE_DIR, "<frozen")) or "contextlib" in Path(filename).name


def origin_at(filename: str, line: int) -> Origin:
    """The line as an origin, with its text where the file can be read."""
    return Origin(Path(filename).name, line, linecache.getline(filename, line).strip())


def current_origin(stop: str) -> Origin | None:
    """The innermost line of the user's code; the walk ends at the capture function named ``stop``.

    Where the callable is itself a library module, the line in ``torch.nn.modules`` stands in.
    """
    frame: FrameType | None = sys._getframe(1)
    library: FrameType | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if frame.f_code.co_name == stop and name.startswith(CAPTURE_DIR):
            break
        found = recorded_origin(frame) or (None if is_library(name) else origin_at(name, frame.f_lineno))
        if found is not None:
            return found
        if library is None and name.startswith(_NN_DIR):
            library = frame
        frame = frame.f_back
    return None if library is None else origin_at(library.f_code.co_filename, library.f_lineno)


def recorded_origin(frame: FrameType) -> Origin | None:
    """Where ``frame`` is fx running a recorded node: the innermost line of the user's code that the node came from."""
    code = frame.f_code
    if code.co_name != "run_node" or not code.co_filename.startswith(TORCH_DIR):
        return None
    trace = getattr(frame.f_locals.get("n"), "stack_trace", None)
    lines = [(file, int(line)) for file, line in _TRACE_LINE.findall(trace or "")]
    users = [at for at in lines if not is_library(at[0])] or lines
    return origin_at(*users[-1]) if users else None


def traceback_origin(tb: TracebackType | None) -> Origin | None:
    """The innermost line of the user's code in a traceback."""
    found: Origin | None = None
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        found = recorded_origin(tb.tb_frame) or (found if is_library(name) else origin_at(name, tb.tb_lineno))
        tb = tb.tb_next
    return found


def raised_by_user(tb: TracebackType | None) -> bool:
    """True when the innermost frame is the user's and executed a ``raise`` or ``assert`` itself."""
    if tb is None:
        return False
    while tb.tb_next is not None:
        tb = tb.tb_next
    if is_library(tb.tb_frame.f_code.co_filename):
        return False
    ops = {i.offset: i.opname for i in dis.get_instructions(tb.tb_frame.f_code)}
    return ops.get(tb.tb_lasti, "").startswith(("RAISE", "RERAISE"))


def mark(origin: Origin | None) -> None:
    """Make fx write ``origin`` on the nodes it records from now on."""
    if origin is not None:
        fx_traceback.set_stack_trace([f"{_MARK}{origin.file}\0{origin.line}\0{origin.code}"])


def node_origins(graph: torch.fx.Graph) -> dict[torch.fx.Node, Origin | None]:
    """Origin of each node; backward nodes take that of the forward op with their sequence number, or their users'."""
    origins: dict[torch.fx.Node, Origin | None] = {}
    by_sequence: dict[int, Origin] = {}
    previous: Origin | None = None
    for node in graph.nodes:
        origin = None if is_backward(node) else _parse(node.meta.get("stack_trace"))
        sequence = node.meta.get("seq_nr")
        if origin is not None and sequence is not None:
            by_sequence[sequence] = origin
        elif origin is None and is_backward(node):
            accumulates = node.meta.get("is_gradient_acc") or "Gradient addition" in str(node.meta.get("stack_trace"))
            known = by_sequence.get(sequence) if sequence is not None and not accumulates else None
            origin = known or _of_arguments(node, origins) or previous
        origins[node] = origin
        previous = origin or previous
    return origins


def is_backward(node: torch.fx.Node) -> bool:
    """True for a node that autograd recorded while it ran the backward."""
    tag: Any = node.meta.get("partitioner_tag")
    return bool(node.meta.get("autograd_backward")) or tag in ("is_backward", "must_be_in_backward")


def _of_arguments(node: torch.fx.Node, origins: dict[torch.fx.Node, Origin | None]) -> Origin | None:
    return next((o for a in node.all_input_nodes if is_backward(a) and (o := origins.get(a))), None)


def _parse(text: str | None) -> Origin | None:
    if not text or not text.startswith(_MARK):
        return None
    file, line, code = text[len(_MARK) :].split("\0", 2)
    return Origin(file, int(line), code)
