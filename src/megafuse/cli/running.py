"""Running the check on a selection."""

from __future__ import annotations

from typing import Any

import torch

from megafuse.api import check, fuse
from megafuse.cli.selection import Selection
from megafuse.cli.targets import Example, make_example, pick_device
from megafuse.validate import CheckOptions, CheckReport

TARGET_ON = {"cuda": "cuda", "cpu": "interpret"}


def fuse_example(example: Example, device: str, *, strict: bool = False, dots: str = "library") -> Any:
    """The fused callable: generated kernels on a GPU, the generated tile programs through NumPy on the CPU."""
    return fuse(example.fn, *example.args, target=TARGET_ON[device], strict=strict, dots=dots, **example.kwargs)


def check_example(
    example: Example, device: str, options: CheckOptions, *, strict: bool = False, dots: str = "library"
) -> CheckReport:
    """Outputs, input gradients and the gradient of every used parameter, by the acceptance rule."""
    fused = fuse_example(example, device, strict=strict, dots=dots)
    return check(example.fn, *example.args, fused=fused, options=options, **example.kwargs)


def check_selection(
    selection: Selection,
    *,
    size: str | None = None,
    dtype: str | None = None,
    strict: bool = False,
    seeds: int = 5,
) -> CheckReport:
    """Check what ``selection`` names: at ``size``, by default small where the tile programs are executed on the CPU.

    NaN and Inf are errors where the block is checked, whatever the reference gives.
    """
    device = pick_device(selection)
    example = make_example(selection, size or ("full" if device == "cuda" else "small"), device, dtype)
    options = CheckOptions(seeds=seeds, require_finite=not selection.module)
    return check_example(example, device, options, strict=strict, dots=selection.dots)


def limit_threads() -> None:
    """One thread per process, for processes that share the cores."""
    torch.set_num_threads(1)
