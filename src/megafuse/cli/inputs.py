"""Inputs described on the command line: ``2,4,16:bfloat16:requires_grad``."""

from __future__ import annotations

import torch
from torch import Tensor

from megafuse.core.errors import InputError

DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
INTEGER_LIMIT = 2  # drawn integers are 0 or 1, so that they fit any table


def parse_dtype(name: str, option: str) -> torch.dtype:
    """The element type of that name.

    Raises:
        InputError: there is none.
    """
    if name not in DTYPES:
        raise InputError(f"argument {option}: unknown element type {name!r}", hint=f"use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_input(text: str, device: torch.device) -> Tensor:
    """A tensor of the shape, type and ``requires_grad`` that ``text`` describes, drawn from the global generator.

    Floating-point inputs are normal and, unless the type is followed by ``:no_grad``, require gradients.

    Raises:
        InputError: the text does not describe a tensor.
    """
    shape_text, *rest = text.split(":")
    try:
        shape = tuple(int(n) for n in shape_text.split(",") if n.strip())
    except ValueError:
        shape = (-1,)
    if any(n < 0 for n in shape):
        raise InputError(
            f"argument --input: {shape_text!r} is no shape in {text!r}", hint="write it as 2,4,16:bfloat16"
        )
    words = [w for w in rest if w not in ("requires_grad", "no_grad")]
    if len(words) > 1:
        raise InputError(
            f"argument --input: {words[1]!r} is not understood in {text!r}", hint="write it as 2,4,16:bfloat16"
        )
    dtype = parse_dtype(words[0] if words else "float32", "--input")
    if not dtype.is_floating_point:
        if "requires_grad" in rest:
            raise InputError(f"argument --input: {text!r} is an integer tensor, which has no gradient")
        return torch.randint(0, INTEGER_LIMIT, shape, device=device).to(dtype)
    return torch.randn(shape, device=device).to(dtype).requires_grad_("no_grad" not in rest)
