"""Compiles Triton kernels for an architecture with no GPU: a program of its own, run by ``offline.py``.

It imports nothing of megafuse. Standard input: one JSON object ``{"arch": 90, "kernels": [...]}``, each kernel with
``path`` (of its text), ``entry``, ``params`` (Triton pointer types), ``options`` (of Triton's compiler), ``constants``
(parameters that are not at their defaults). Standard output: one JSON line per kernel, in order, as soon as it is done.
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
_PACKED_CONSTANT = re.compile(r"ADD\S*\.16x2\s[^;]*0x")
_DESCRIPTOR = re.compile(r"(?:or|add)\.[bs]64 [^;]*, (-?\d{18,});")  # address of an operand of wgmma, with its layout
_JUMPS = frozenset("BRA BRX JMP JMX CALL RET EXIT BREAK BSSY BSYNC WARPSYNC YIELD".split())
_MOVES = ("MOV", "IMAD.U32", "IMAD.MOV.U32")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*([^;]*);")


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
    start = time.perf_counter()
    compiled = triton.compile(
        ast_source(fn, kernel["params"], kernel.get("sizes", 0), kernel.get("constants", {})),
        target=GPUTarget("cuda", arch, 32),
        options=kernel["options"],
    )
    seconds = time.perf_counter() - start
    cubin = compiled.asm["cubin"]
    if fault := fault_of(compiled.asm["ptx"], cubin):
        return {"error": fault}
    return {
        **resource_usage(cubin),
        "shared": int(compiled.metadata.shared),
        "layouts": layouts_of(compiled.asm["ptx"]),
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


def ast_source(fn: Any, params: list[str], sizes: int, given: dict[str, Any]) -> Any:
    """The kernel with all pointers 16-byte aligned, then ``sizes`` integers; the rest as ``given`` or by default."""
    from triton.compiler import ASTSource

    names = fn.arg_names
    constants = {p.name: given.get(p.name, p.default) for p in fn.params[len(params) + sizes :]}
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


def fault_of(ptx: str, cubin: bytes) -> str:
    """What the assembler is known to have made wrong in a kernel, or may have; empty if nothing."""
    if PACKED_ADD in ptx and adds_packed_constants(cubin):
        return "LLVM made packed 16-bit additions of constants, and ptxas loses some of these"
    if layouts_of(ptx) > 1:
        sass = _cuobjdump(cubin, "-sass")
        if lost := read_before_written(sass):
            return f"ptxas lost the address of an operand (uniform register {lost[0]} is read and was never written)"
        if lost := written_for_nothing(sass):
            return f"ptxas may have lost an operand's address ({lost[0]} is given one, and another before it is read)"
    return ""


def layouts_of(ptx: str) -> int:
    """In how many layouts the operands of products lie in shared memory."""
    return len({int(text) >> 32 for text in _DESCRIPTOR.findall(ptx)})


def adds_packed_constants(cubin: bytes) -> bool:
    """Whether some packed 16-bit addition has a constant operand; so it seems where there is no disassembler.

    ptxas 12.8 and 12.9 may then have lost the constant of another one: triton-lang/triton#11581.
    """
    try:
        return bool(_PACKED_CONSTANT.search(_cuobjdump(cubin, "-sass")))
    except (OSError, subprocess.SubprocessError):
        return True


def read_before_written(sass: str) -> list[str]:
    """Uniform registers that an instruction reads although none above it writes them.

    ptxas 12.8 (of Triton 3.6) drops writes of such registers where operands have different layouts in shared memory.
    """
    written: set[int] = set()
    lost: list[str] = []
    for _, op, text in _INSTRUCTION.findall(sass):
        first, *others = (part.strip() for part in text.split(","))
        target = re.fullmatch(r"UR(\d+)", first)
        wide = target is not None and "64" in op.split(".")[1:]
        for part in others if target else (first, *others):
            for number in map(int, re.findall(r"\bUR(\d+)\b", part)):
                if "gdesc[" in part:  # both operands' addresses, or the second's where the first is in registers
                    needed = range(number + 2 * (part != others[0]), number + 4)
                else:  # other addresses have 32 bits
                    needed = range(number, number + 1 + (f"desc[UR{number}]" in part or (wide and "[" not in part)))
                lost += [f"UR{n}" for n in needed if n not in written]
        if target:
            size = 4 if "128" in op else 2 if wide or "WIDE" in op else 1
            written |= {int(target[1]) + n for n in range(size)}
    return lost


def written_for_nothing(sass: str) -> list[str]:
    """Registers into which a uniform one is moved, and then another, with no instruction between that reads the first.

    A sign that ptxas had more addresses than uniform registers, and no proof of a fault: a kernel of ptxas 12.8 with
    many of them, and operands of different layouts, ended its process's use of a GPU; one with few, and one layout, did
    not.
    What other instructions write over is not counted: it is the unused half of a 64-bit pair.
    """
    waiting: set[int] = set()
    lost: list[str] = []
    for guard, op, text in _INSTRUCTION.findall(sass):
        kind = op.split(".")[0]
        if kind in _JUMPS:
            waiting.clear()
            continue
        first, *others = (part.strip() for part in text.split(","))
        target = re.fullmatch(r"R(\d+)", first)
        reach = 128 if "MMA" in kind else 4  # registers that an operand may stand for
        for part in others if target else (first, *others):
            for number in map(int, re.findall(r"\bR(\d+)\b", part)):
                waiting.difference_update(range(number, number + reach))
        if target and not guard:
            number = int(target[1])
            moves = op in _MOVES and re.search(r"\bUR\d+", text) is not None
            lost += [f"R{number}"] * (moves and number in waiting)
            waiting.discard(number)
            waiting |= {number} if moves else set()
    return lost


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers per thread, and ``spills``: bytes of stack per thread, by the wheel's cuobjdump."""
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", _cuobjdump(cubin, "--dump-resource-usage")))
    return {"registers": int(found["REG"]), "spills": int(found["STACK"])}


def _cuobjdump(cubin: bytes, option: str) -> str:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), option, file.name], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules are no top-level modules
    main()
