"""Run Triton texts under Triton's interpreter (``TRITON_INTERPRET=1``); prints what differs, one line each."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle

from codegen_abreast import abreast_cases, other_abreast_cases
from codegen_blocks import Case
from codegen_chains import chain_cases
from codegen_dots import dot_cases
from codegen_joint import joint_cases, rounding_cases, summed_cases
from codegen_maps import map_cases
from codegen_programs import cases, other_cases
from codegen_running import Guarded, differences, entry
from codegen_versions import complete_interpreter
from megafuse.codegen.triton import print_kernel
from megafuse.core.dtypes import DType
from megafuse.ir.numeric import FUNCTIONS

STAND_INS: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "rint": np.rint, "trunc": np.trunc, "expm1": np.expm1, "log1p": np.log1p, "log10": np.log10,
    "tan": np.tan, "tanh": np.tanh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh,
    "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "pow": np.power, "fmod": np.fmod,
    "atan2": np.arctan2, "copysign": np.copysign, "hypot": np.hypot, "div_rn": np.divide,
    "nextafter": np.nextafter,
    **{name: FUNCTIONS[fn] for name, fn in (("erfinv", "erfinv"), ("erfcx", "erfcx"), ("normcdfinv", "ndtri"))},
    "erfc": np.vectorize(math.erfc), "lgamma": np.vectorize(lambda x: _lgamma(float(x)), otypes=[np.float64]),
}  # fmt: skip


def _lgamma(x: float) -> float:
    return math.inf if math.isinf(x) or (x <= 0 and x == math.floor(x)) else math.lgamma(x)


def install_stand_ins() -> None:
    """The interpreter has no libdevice: give its stubs NumPy bodies."""
    for name, fn in STAND_INS.items():

        def call(*args: Any, fn: Callable[..., Any] = fn) -> tl.tensor:
            first = next(a for a in args if isinstance(a, tl.tensor))
            data = [a.handle.data if isinstance(a, tl.tensor) else first.handle.data.dtype.type(a) for a in args]
            with np.errstate(all="ignore"):
                out = np.asarray(fn(*data)).astype(first.handle.data.dtype)
            kind = tl.block_type(first.dtype, list(out.shape)) if out.ndim and first.type.is_block() else first.type
            return tl.tensor(TensorHandle(out, first.dtype), kind)

        setattr(libdevice, name, call)


def run(case: Case, folder: Path) -> list[str]:
    """Run one case; what differs from its reference."""
    source = print_kernel(case.program, assembly=False)
    given = {name: Guarded.of(array) for name, array in case.arrays().items()}
    kernel = entry(source, folder)
    kernel[source.grid](*(torch.from_numpy(one.array) for one in given.values()))
    outside = [f"{name}: written outside" for name, one in given.items() if not one.whole]
    return [*outside, *differences({name: one.array for name, one in given.items()}, case)]


def every_case() -> list[Case]:
    """What the interpreter can run: nothing with bf16, whose rounding is assembly."""
    floats = [case for dtype in (DType.F32, DType.F16) for case in (*cases(dtype, narrow=True), *joint_cases(dtype))]
    rows = [case for dtype in (DType.F32, DType.F16) for case in abreast_cases(dtype, narrow=True)]
    dots = [case for dtype in (DType.F32, DType.F16) for case in (*dot_cases(dtype), *chain_cases(dtype))]
    maps = [*rounding_cases(DType.F16), *other_cases(), *summed_cases(), *map_cases()]
    return [*floats, *rows, *other_abreast_cases(), *maps, *dots]


def main() -> None:
    complete_interpreter()
    install_stand_ins()
    every = every_case()
    chosen = [case for case in every if not sys.argv[1:] or case.name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        for case in chosen:
            for line in run(case, Path(folder)):
                print(f"{case.name}: {line}")
    print(f"ran {len(chosen)}")


if __name__ == "__main__":
    main()
