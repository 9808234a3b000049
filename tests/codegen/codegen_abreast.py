"""Tile programs whose single rows stand abreast."""

from __future__ import annotations

import dataclasses

from codegen_blocks import Case
from codegen_gather import gather
from codegen_programs import concat_pad, layer_norm, layer_norm_backward, reductions
from megafuse.core.dtypes import DType


def abreast(case: Case, rows: int, chunk: int = 0) -> Case:
    """``case`` with single rows, ``rows`` of them abreast; ``chunk``: rows a program, where that changes no result."""
    changes = {"row_tile": 1, "abreast": rows} | ({"rows_per_chunk": chunk} if chunk else {})
    phases = tuple(dataclasses.replace(phase, **changes) for phase in case.program.phases)  # type: ignore[arg-type]
    name = f"{case.name}_{rows}_abreast" + f"_of_{chunk}" * bool(chunk)
    return dataclasses.replace(case, name=name, program=dataclasses.replace(case.program, name=name, phases=phases))


def abreast_cases(dtype: DType, narrow: bool = False) -> list[Case]:
    """Programs on one 16- or 32-bit float type.

    Whole and ragged columns, tails that fold (in two ways) and that do not, last chunks that are cut short, columns
    whose sums are the only thing left of a program with a single step, loops that are none, loads by index, guards and
    integers along the rows. ``narrow``: with less columns, for Triton's slow interpreter.
    """
    odd, pieces = (75, (64, 16)) if narrow else (1197, (1024, 256))
    backward = layer_norm_backward
    return [
        abreast(backward(dtype, 10, 2560, (2048, 512), 1, 4, stages=2), 2),
        abreast(backward(dtype, 6, 1280, (512, 512, 256), 1, 2), 2),
        abreast(backward(dtype, 12, odd, pieces, 1, 8), 4),
        abreast(layer_norm(dtype, 8, odd, pieces, 1, 4), 2),
        abreast(layer_norm(dtype, 12, odd, pieces, 1, 4), 4),
        abreast(concat_pad(dtype), 2, 6),
        abreast(gather(dtype, DType.I32, 1, (8, 4), rows=8), 2, 4),
        abreast(gather(dtype, DType.I64, 1, (16,), rows=8), 2),
    ]


def other_abreast_cases() -> list[Case]:
    """Every reduction, of two loop axes and two fixed ones: sums over the rows in one step, and in several."""
    kinds = (DType.F32, DType.F64, DType.I64, DType.BOOL)
    return [abreast(reductions(dtype, 2, looped, inner=2), 2) for dtype in kinds for looped in (False, True)]
