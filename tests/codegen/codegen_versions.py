"""What the tests of generated text know about differences between Triton's releases."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.backends import compiler
from triton.runtime.interpreter import InterpreterBuilder

from megafuse.runtime import shim

# Up to 3.2 a tile of fewer elements than threads is read element by element.
READS_SMALL_TILES_IN_VECTORS = not hasattr(compiler, "AttrsDescriptor")


def aligned(count: int) -> Any:
    """The compiler's word for ``count`` pointers that are all 16-byte aligned."""
    if hasattr(compiler, "AttrsDescriptor"):  # up to 3.2
        properties = {"tt.divisibility": list(range(count))}
        return compiler.AttrsDescriptor.from_dict({"arg_properties": properties, "cls": "AttrsDescriptor"})
    return {(i,): [["tt.divisibility", 16]] for i in range(count)}


def complete_interpreter() -> None:
    """Give the interpreter the type of truth values, which that of 3.2 forgot (it cannot negate one without)."""
    if not hasattr(InterpreterBuilder, "get_int1_ty"):
        InterpreterBuilder.get_int1_ty = lambda self: tl.int1
    shim.complete_interpreter()
