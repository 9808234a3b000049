"""What all printers do with the text of a kernel: make the record of it that the runtime takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.chain_program import ChainProgram
from megafuse.codegen.dot_program import DotProgram
from megafuse.codegen.names import identifier
from megafuse.codegen.program import TileProgram

Program = TileProgram | DotProgram | ChainProgram


def kernel_source(program: Program, backend: str, imports: str, parts: Sequence[str], **more: Any) -> KernelSource:
    """The record of a module of ``imports`` and ``parts`` (helpers and the kernel); ``more``: its further fields."""
    text = "\n\n\n".join(parts)
    return KernelSource(
        entry=identifier(program.name),
        backend=backend,
        text=f"{imports}\n\n{text}",
        params=tuple((param.name, param.dtype) for param in program.params),
        grid=program.grid,
        num_warps=program.num_warps,
        num_stages=program.num_stages,
        writes=tuple(at for at, param in enumerate(program.params) if param.written),
        **more,
    )
