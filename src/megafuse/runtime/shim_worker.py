"""Compiles Triton kernels for an architecture with no GPU: a program of its own, run by ``offline.py``.

It imports nothing of megafuse. Standard input: one JSON object ``{"arch": 90, "kernels": [...]}``, each kernel with
``path`` (of its text), ``entry``, ``params`` (Triton pointer types), ``num_warps``, ``num_stages``. Standard output:
one JSON line per kernel, in order, as soon as it is done.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PACKED_ADD = "add.s16x2"


def main() -> None:
    """Read the work, compile each kernel, write its result."""
    work = json.load(sys.stdin)
    for kernel in work["kernels"]:
        try:
            result = compile_one(kernel, work["arch"])
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def compile_one(kernel: dict[str, Any], arch: int) -> dict[str, Any]:
    """Compile; registers and stack come from the cubin, shared memory (bytes) from Triton."""
    import triton
    from triton.backends.compiler import GPUTarget

    fn = _load(kernel["path"], kernel["entry"])
    options = {"num_warps": kernel["num_warps"], "num_stages": kernel["num_stages"]}
    start = time.perf_counter()
    compiled = triton.compile(
        _source(fn, kernel["params"], kernel.get("sizes", 0)), target=GPUTarget("cuda", arch, 32), options=options
    )
    seconds = time.perf_counter() - start
    if PACKED_ADD in compiled.asm["ptx"]:
        return {"error": "PTX holds packed 16-bit additions, whose constants ptxas loses"}
    cubin = compiled.asm["cubin"]
    return {
        **resource_usage(cubin),
        "shared": int(compiled.metadata.shared),
        "seconds": seconds,
        "ptx_bytes": len(compiled.asm["ptx"]),
        "cubin_bytes": len(cubin),
    }


def _load(path: str, entry: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"megafuse_offline_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, entry)


def _source(fn: Any, params: list[str], sizes: int) -> Any:
    """The kernel with all pointers 16-byte aligned, then ``sizes`` integers, and other parameters at their defaults."""
    from triton.compiler import ASTSource

    names = fn.arg_names
    constants = {p.name: p.default for p in fn.params[len(params) + sizes :]}
    signature = dict(zip(names, [*params, *["i32"] * sizes], strict=False))
    aligned = range(len(params))
    try:  # 3.2
        from triton.backends.compiler import AttrsDescriptor
    except ImportError:  # 3.3 and newer
        signature |= dict.fromkeys(constants, "constexpr")
        attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
        return ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attrs)
    hints = AttrsDescriptor.from_hints(dict.fromkeys(aligned, 16))
    return ASTSource(fn=fn, signature=signature, constants=constants, attrs=hints)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers per thread, and ``spills``: bytes of stack per thread, by the wheel's cuobjdump."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, timeout=60, check=True
        )
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", done.stdout))
    return {"registers": int(found["REG"]), "spills": int(found["STACK"])}


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules are no top-level modules
    main()
