"""What can be seen of a compiled kernel: whether the assembler made something else of it, as far as is known."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from typing import Any

from megafuse.codegen.artifact import KernelSource
from megafuse.core.errors import TargetError
from megafuse.runtime.shim_worker import fault_of


def check_assembled(compiled: Any, source: KernelSource) -> None:
    """Refuse a kernel that the assembler may have compiled into something else, as far as Triton's tools can tell.

    Raises:
        TargetError: it has, or may have.
    """
    asm = getattr(compiled, "asm", {})
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no disassembler, or it fails
        if "cubin" in asm and (fault := fault_of(asm["ptx"], asm["cubin"])):
            hint = "please report the module; until then, leave it unfused, or try chains=False"
            raise TargetError(f"kernel {source.entry}: {fault}", hint=hint)


def code_digest(compiled: Any) -> str:
    """Names the machine code of a compiled kernel; empty where there is none."""
    code = getattr(compiled, "asm", {}).get("cubin", b"")
    return hashlib.sha256(code).hexdigest() if code else ""
