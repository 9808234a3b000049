"""Inputs described on the command line: ``2,4,16:bfloat16:no_grad``."""

from __future__ import annotations

import torch
from torch import Tensor

from megafuse.core.dtypes import spelled
from megafuse.core.errors import InputError

DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
FORM = "write shape, type and, where no gradient is wanted, no_grad: 2,4,16:bfloat16:no_grad"
INTEGER_LIMIT = 2  # drawn integers are 0 or 1, so that they fit any table


def parse_dtype(name: str, option: str) -> torch.dtype:
    """The element type of that name.

    Raises:
        InputError: there is none.
    """
    return DTYPES[spelled(name, DTYPES, option)]


def parse_input(text: str, device: torch.device, default: str = "float32") -> Tensor:
    """A tensor of the shape and type that ``text`` describes, drawn from the global generator.

    Floating-point inputs are normal and require gradients, unless ``:no_grad`` follows. ``default``: the type of those
    that name none.

    Raises:
        InputError: the text does not describe a tensor.
    """
    shape_text, *words = text.split(":")
    try:
        shape = tuple(int(n) for n in shape_text.split(",") if n.strip())
    except ValueError:
        shape = (-1,)
    if any(n < 0 for n in shape):
        raise InputError(f"argument --input: {shape_text!r} is no shape in {text!r}", hint=FORM)
    grad = words[-1:] != ["no_grad"]
    types = words if grad else words[:-1]
    if len(types) > 1:
        raise InputError(f"argument --input: {types[1]!r} is not understood in {text!r}", hint=FORM)
    dtype = parse_dtype(types[0] if types else default, "--input")
    if not dtype.is_floating_point:
        return torch.randint(0, INTEGER_LIMIT, shape, device=device).to(dtype)
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)
