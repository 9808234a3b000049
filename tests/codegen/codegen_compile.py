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
from triton.compiler import ASTSource

from codegen_abreast import abreast_cases, other_abreast_cases
from codegen_blocks import Case
from codegen_chains import chain_cases
from codegen_dots import dot_cases, production_cases
from codegen_joint import joint_cases, rounding_cases
from codegen_maps import map_cases
from codegen_programs import cases, other_cases
from codegen_running import entry
from codegen_versions import HAS_DESCRIPTORS, aligned
from megafuse.codegen.triton import print_kernel
from megafuse.core.dtypes import DType
from megafuse.runtime.offline import launched
from megafuse.runtime.shim_worker import fault_of

POINTERS = {
    DType.F64: "*fp64", DType.F32: "*fp32", DType.BF16: "*bf16", DType.F16: "*fp16", DType.I64: "*i64",
    DType.I32: "*i32", DType.I16: "*i16", DType.I8: "*i8", DType.U8: "*u8", DType.BOOL: "*i1",
}  # fmt: skip
ARCH = 90
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers and bytes of stack (spills) of a compiled kernel."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [str(CUOBJDUMP), "--dump-resource-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"])}


def compile_case(case: Case, folder: Path) -> dict[str, Any]:
    """Compile one case with 16-byte aligned pointers."""
    source = launched(print_kernel(case.program), ARCH)
    kernel = entry(source, folder)
    signature = {name: POINTERS[param.dtype] for name, param in zip(kernel.arg_names, case.program.params, strict=True)}
    ast = ASTSource(kernel, signature, {}, aligned(len(signature)))
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    compiled = triton.compile(ast, target=GPUTarget("cuda", ARCH, 32), options=options)
    ptx = compiled.asm["ptx"]
    vectors = sorted(set(re.findall(r"(?:ld|st)\.global\S*\.(v\d\.b\d+)", ptx)))
    found = {"name": case.name, "shared": compiled.metadata.shared, "vectors": vectors}
    found["wgmma"], found["tma"] = "wgmma.mma_async" in ptx, "cp.async.bulk.tensor" in ptx
    constants = set(re.findall(r"(%\w+) = arith\.constant", compiled.asm["ttir"]))
    sums = re.findall(r"tt\.dot [^,]+, [^,]+, (%\w+)", compiled.asm["ttir"])
    found["started_sums"] = [name for name in sums if name not in constants]
    found["fault"] = fault_of(ptx, compiled.asm["cubin"])
    return {**found, **resources(compiled.asm["cubin"], folder)}


def every_case() -> list[Case]:
    """What is compiled: bf16 programs, and those on other types; products where these are generated."""
    tiles = [*cases(DType.BF16), *joint_cases(DType.BF16), *rounding_cases(DType.BF16), *other_cases(), *map_cases()]
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
