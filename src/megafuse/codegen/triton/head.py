"""The first lines of every kernel: its signature, its docstring, and the wait for the kernel before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megafuse.codegen.artifact import EARLY
from megafuse.codegen.names import identifier
from megafuse.codegen.program import Param
from megafuse.codegen.source import Program
from megafuse.codegen.triton.frame import buffer_name
from megafuse.codegen.writer import Writer
from megafuse.core.sizes import Dim


@contextmanager
def kernel_head(
    writer: Writer, program: Program, config: str, *, waits: bool, dims: Sequence[Dim] = ()
) -> Iterator[None]:
    """Write the head of ``program``'s kernel; what is written inside of it is the kernel's body.

    With ``waits`` the kernel may be launched while the one before it still runs: it then waits before anything else,
    since it may neither read what is not yet written nor write over what is still read.
    """
    writer.line("@triton.jit")
    writer.line(f"def {identifier(program.name)}(")
    for param in program.params:
        writer.line(f"    {buffer_name(param.name)},  # {layout_text(param)}")
    for dim in dims:
        writer.line(f"    {dim.name},  # a size from {dim.least} on")
    if waits:
        writer.line(f"    {EARLY}: tl.constexpr = False,  # launched while the kernel before may still run")
    with writer.block("):"):
        writer.docstring([*program.doc, config])
        if waits:
            with writer.block(f"if {EARLY}:"):
                writer.line("_wait_for_kernel_before()")
        yield


def layout_text(param: Param) -> str:
    """Type and shape of a buffer, and its strides where they are not those of a contiguous tensor."""
    contiguous, step = [], 1
    for size in reversed(param.shape):
        contiguous.append(step)
        step *= size
    strides = "" if tuple(contiguous[::-1]) == param.strides else f", strides {list(param.strides)}"
    return f"{'out ' if param.written else ''}{param.dtype.value} {list(param.shape)}{strides}"
