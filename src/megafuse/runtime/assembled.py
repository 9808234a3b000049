"""What can be seen of a compiled kernel: whether the assembler made something else of it, as far as is known."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from dataclasses import dataclass
from typing import Any

from megafuse.codegen.artifact import KernelSource
from megafuse.core.errors import TargetError
from megafuse.runtime.shim_worker import fault_of, resource_usage


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


@dataclass(frozen=True)
class Assembled:
    """A kernel that was compiled and not launched; ``compiled`` as Triton has it, None of an empty grid."""

    compiled: Any = None

    @property
    def code(self) -> str:
        """Names the machine code; empty where there is none."""
        return hashlib.sha256(self._cubin).hexdigest() if self._cubin else ""

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a program takes."""
        return int(getattr(getattr(self.compiled, "metadata", None), "shared", 0))

    def spills(self) -> int:
        """Bytes of stack of a thread, as Triton's tools tell; 0 where there is no machine code, or they fail."""
        with contextlib.suppress(OSError, subprocess.SubprocessError, KeyError):
            return resource_usage(self._cubin)["spills"] if self._cubin else 0
        return 0

    @property
    def _cubin(self) -> bytes:
        return bytes(getattr(self.compiled, "asm", {}).get("cubin", b""))
