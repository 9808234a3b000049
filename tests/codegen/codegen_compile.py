"""Compile Triton texts for sm_90 with no GPU; prints a JSON line per case: registers, spills, shared memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from codegen_abreast import abreast_cases, other_abreast_cases
from codegen_blocks import Case
from codegen_chains import chain_cases
from codegen_dots import dot_cases, production_cases
from codegen_joint import joint_cases, rounding_cases, summed_cases
from codegen_maps import map_cases
from codegen_programs import cases, other_cases
from codegen_running import entry
from codegen_versions import HAS_DESCRIPTORS
from megafuse.codegen.triton import print_kernel
from megafuse.core.dtypes import DType
from megafuse.runtime import early, shim
from megafuse.runtime.offline import launched
from megafuse.runtime.shim_worker import ast_source, fault_of

POINTERS = {
    DType.F64: "*fp64", DType.F32: "*fp32", DType.BF16: "*bf16", DType.F16: "*fp16", DType.I64: "*i64",
    DType.I32: "*i32", DType.I16: "*i16", DType.I8: "*i8", DType.U8: "*u8", DType.BOOL: "*i1",
}  # fmt: skip
ARCH = 90
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# The wait for the kernel before; what touches memory other than parameters and shared memory; jumps and their targets.
PTX_ORDER = re.compile(
    r"(griddepcontrol\.wait)|\b(?:ld|st|red|atom|cp|prefetch\w*|discard|applypriority|tensormap|fence)\.(?!param|shared)"
    r"|\b(?:bra|ret)\b|\$L__BB"
)
SASS_ORDER = re.compile(
    r"\b(ACQBULK)\b|\b(?:LDG|STG|LD|ST|LDGSTS|ATOM|ATOMG|RED|REDG|UTMA\w+|UBLK\w+|CCTL\w*|BRA|EXIT)\b"
)


def dump(cubin: bytes, folder: Path, option: str) -> str:
    """What the disassembler says of a compiled kernel."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([str(CUOBJDUMP), option, str(path)], capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers and bytes of stack (spills) of a compiled kernel."""
    text = dump(cubin, folder, "--dump-resource-usage")
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"])}


def waits(text: str, order: re.Pattern[str]) -> str:
    """How often a kernel waits for the one before, and whether all threads do so before they touch memory."""
    found = [match[1] for match in order.finditer(text)]
    times = sum(map(bool, found))
    return f"{times} times" + ", first" * (times > 0 and bool(found[0]))


def compile_case(case: Case, folder: Path) -> dict[str, Any]:
    """Compile one case with 16-byte aligned pointers."""
    source = launched(print_kernel(case.program), ARCH)
    kernel, told = entry(source, folder), early.options(source, ARCH, shim.triton_version())
    ast = ast_source(kernel, [POINTERS[param.dtype] for param in case.program.params], 0, early.constants(told))
    compiled = triton.compile(ast, target=GPUTarget("cuda", ARCH, 32), options={**source.options, **told})
    ptx = compiled.asm["ptx"]
    vectors = sorted(set(re.findall(r"(?:ld|st)\.global\S*\.(v\d\.b\d+)", ptx)))
    found = {"name": case.name, "shared": compiled.metadata.shared, "vectors": vectors}
    found["wgmma"], found["tma"] = "wgmma.mma_async" in ptx, "cp.async.bulk.tensor" in ptx
    constants = set(re.findall(r"(%\w+) = arith\.constant", compiled.asm["ttir"]))
    sums = re.findall(r"tt\.dot [^,]+, [^,]+, (%\w+)", compiled.asm["ttir"])
    found["started_sums"] = [name for name in sums if name not in constants]
    body, sass = ptx[ptx.index(".entry") :], dump(compiled.asm["cubin"], folder, "-sass")
    found["early"] = getattr(compiled.metadata, "launch_pdl", False)
    found["waits"] = [waits(body, PTX_ORDER), waits(sass, SASS_ORDER)]
    found["fault"] = fault_of(ptx, compiled.asm["cubin"])
    return {**found, **resources(compiled.asm["cubin"], folder)}


def every_case() -> list[Case]:
    """What is compiled: bf16 programs, and those on other types; products where these are generated."""
    tiles = [*cases(DType.BF16), *joint_cases(DType.BF16), *rounding_cases(DType.BF16), *other_cases(), *map_cases()]
    tiles += summed_cases()
    tiles += [*abreast_cases(DType.BF16), *other_abreast_cases()]
    products = [*dot_cases(DType.BF16), *production_cases()] if HAS_DESCRIPTORS else []
    return [*tiles, *products, *chain_cases(DType.BF16), *chain_cases(DType.F32)]


def main() -> None:
    every = every_case()
    chosen = [case for case in every if not sys.argv[1:] or case.name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            print(json.dumps(compile_case(case, Path(folder))))


if __name__ == "__main__":
    main()
