"""Run chains in fp64 under Triton's interpreter (``TRITON_INTERPRET=1``) and as NumPy; prints how far these differ."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from codegen_interpret import install_stand_ins
from codegen_running import entry
from codegen_versions import complete_interpreter
from megafuse.compiler.driver import PRINTERS
from megafuse.compiler.variants import in_precision, make_variants, subjects
from megafuse.core.dtypes import DType
from tune_chains import chained, mlp
from tune_helpers import bench_with


def main() -> None:
    """One line a result: kernel, result, the largest difference and the largest number."""
    complete_interpreter()
    install_stand_ins()
    compiled = chained(mlp([7, 20, 1, 3], bias=True, activation=nn.ReLU), 45, 7, torch.float16)
    bench = bench_with(lambda variant: 1.0)
    for subject in (s for s in subjects(compiled.step) if s.chain is not None):
        variant = make_variants(compiled, {}, [subject.key], "numpy")[subject.key]
        exact = in_precision(variant, "numpy", DType.F64)
        given = {n: t.double() for n, t in bench.given(variant).items()}
        expected = bench.results(exact, given)
        buffers = {**given, **bench._made(exact, fill=True)}
        for program, args in zip(exact.programs, exact.args, strict=True):
            source = PRINTERS["triton"](program, assembly=False)
            with tempfile.TemporaryDirectory() as folder:
                entry(source, Path(folder))[source.grid](*(buffers[name] for name in args))
        for name, result in expected.items():
            print(subject.name, name, float((buffers[name] - result).abs().max()), float(result.abs().max()))


if __name__ == "__main__":
    main()
