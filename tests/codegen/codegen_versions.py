"""What the tests of generated text know about differences between Triton's releases."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.backends import compiler
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from megafuse.runtime import shim

# Up to 3.2 a tile of fewer elements than threads is read element by element.
READS_SMALL_TILES_IN_VECTORS = not hasattr(compiler, "AttrsDescriptor")

HAS_DESCRIPTORS = hasattr(tl, "make_tensor_descriptor")  # from 3.4 on
LAUNCHES_EARLY = "launch_pdl" in CUDAOptions.__dataclass_fields__  # from 3.4 on


def complete_interpreter() -> None:
    """Let the interpreter negate truth values: that of 3.2 does not know their type there."""
    shim.complete_interpreter()
    if hasattr(InterpreterBuilder, "get_int1_ty"):
        return
    others = InterpreterBuilder.get_all_ones_value

    def all_ones(self: Any, kind: Any) -> TensorHandle:
        return TensorHandle(np.full(1, True), kind) if kind == tl.int1 else others(self, kind)

    InterpreterBuilder.get_int1_ty = lambda self: tl.int1
    InterpreterBuilder.get_all_ones_value = all_ones
