"""The user's source line behind each traced op: found on the Python stack, carried by fx, inherited by the backward."""

from __future__ import annotations

import dis
import linecache
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.fx import traceback as fx_traceback

from megafuse.ir.types import Origin

TORCH_DIR = str(Path(torch.__file__).absolute().parent) + os.sep
CAPTURE_DIR = str(Path(__file__).absolute().parent) + os.sep
_MARK = "megafuse:"
Names = Mapping[int, tuple[str, str]]  # path and class of modules, by their ids
_TRACE_LINE = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)
_CHILD = re.compile(r"\._modules\['([^']*)'\]")  # how PyTorch 2.6 writes ".child" in places of modules


def is_library(filename: str) -> bool:
    """True for code of PyTorch, of capture, and for code with no file."""
    return filename.startswith((TORCH_DIR, CAPTURE_DIR, "<frozen")) or "contextlib" in Path(filename).name


def origin_at(filename: str, line: int) -> Origin:
    """The line as an origin, with its text where the file can be read."""
    return Origin(Path(filename).name, line, linecache.getline(filename, line).strip())


def module_names(modules: Sequence[nn.Module], labels: Sequence[str]) -> Names:
    """Path and class of each module by its id; ``labels``: the names of those at the top, or empty."""
    found: dict[int, tuple[str, str]] = {}
    for top, label in zip(modules, labels, strict=True):
        for name, module in top.named_modules():
            found.setdefault(id(module), (".".join(filter(None, (label, name))), type(module).__name__))
    return found


def current_origin(stop: str, modules: Names) -> Origin | None:
    """Where the innermost line of the user's code is; the walk ends at the capture function named ``stop``."""
    frames: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (frame.f_code.co_name == stop and frame.f_code.co_filename.startswith(CAPTURE_DIR)):
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _origin(frames, modules)


def traceback_origin(tb: TracebackType | None, modules: Names) -> Origin | None:
    """Where the innermost line of the user's code in a traceback is."""
    frames: list[tuple[FrameType, int]] = []
    while tb is not None:
        frames.append((tb.tb_frame, tb.tb_lineno))
        tb = tb.tb_next
    return _origin(frames[::-1], modules)


def _origin(frames: Iterable[tuple[FrameType, int]], modules: Names) -> Origin | None:
    """From frames, innermost first: the first line of the user's, and the first module."""
    line: Origin | None = None
    path, kind = "", ""
    for frame, number in frames:
        recorded = recorded_origin(frame)
        if recorded is not None:
            return recorded
        name = frame.f_code.co_filename
        line = line or (None if is_library(name) else origin_at(name, number))
        path, kind = (path, kind) if kind else modules.get(id(_first_argument(frame)), ("", ""))
        if line is not None and kind:
            break
    return _within(line, path, kind)


def _within(line: Origin | None, path: str, kind: str) -> Origin | None:
    """The line, in the module where that is not the one at the top; without a line, the module."""
    module = f"{path} ({kind})" if path else kind
    if line is None:
        return Origin("", 0, module=module) if module else None
    return replace(line, module=module) if path else line


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def recorded_origin(frame: FrameType) -> Origin | None:
    """Where ``frame`` is fx running a recorded node: the line and the module that the node came from."""
    code = frame.f_code
    if code.co_name != "run_node" or not code.co_filename.startswith(TORCH_DIR):
        return None
    node = frame.f_locals.get("n")
    lines = [(file, int(line)) for file, line in _TRACE_LINE.findall(getattr(node, "stack_trace", None) or "")]
    users = [at for at in lines if not is_library(at[0])]
    stack = list((getattr(node, "meta", {}).get("nn_module_stack") or {}).values())
    where, kind = (_CHILD.sub(r".\1", stack[-1][0]), stack[-1][1].__name__) if stack else ("", "")
    return _within(origin_at(*users[-1]) if users else None, where.partition("].")[2], kind)


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
        fx_traceback.set_stack_trace([_MARK + "\0".join((origin.file, str(origin.line), origin.code, origin.module))])


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
    file, line, code, module = text[len(_MARK) :].split("\0")
    return Origin(file, int(line), code, module)
