"""Matrix products of launch code: by the library, written where the next kernel wants them, rounded once.

On CUDA the operands and the result go to cuBLAS as they are. fp32 products follow PyTorch's own TF32 setting. On CPU,
16-bit operands are widened exactly, multiplied in fp32 and rounded once, as a GPU's matrix unit does it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
Product = Callable[..., Tensor]


def products(device: torch.device, notes: MutableSequence[str]) -> dict[str, Product]:
    """The launch-code functions ``mm, bmm, addmm, baddbmm`` for ``device``, and ``mixed_mm`` etc. for several types.

    ``notes`` gets a line the first time that a product cannot run as one library call.
    """
    table: dict[str, Product] = {"mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm, "baddbmm": torch.baddbmm}
    mixed = {f"mixed_{name}": _mixed(name, fn, device, notes) for name, fn in table.items()}
    return {**(table if device.type != "cpu" else {n: _on_cpu(fn) for n, fn in table.items()}), **mixed}


def _on_cpu(fn: Any) -> Product:
    def run(*operands: Tensor, out: Tensor) -> Tensor:
        return _by_fp32(fn, operands, out) if out.dtype in _HALF else fn(*operands, out=out)

    return run


def _mixed(name: str, fn: Any, device: torch.device, notes: MutableSequence[str]) -> Product:
    wide = _widening(fn, name)

    def run(*operands: Tensor, out: Tensor) -> Tensor:
        if device.type != "cpu":
            if wide is not None and _is_widening(operands, out):
                return wide(*operands, out=out)
            _note(notes, name, operands[-1].dtype, out.dtype)
        return _by_fp32(fn, operands, out)

    return run


def _is_widening(operands: tuple[Tensor, ...], out: Tensor) -> bool:
    a, b = operands[-2:]
    return len(operands) == 2 and out.dtype is torch.float32 and a.dtype is b.dtype and a.dtype in _HALF


def _widening(fn: Any, name: str) -> Product | None:
    """``fn`` with fp32 results of 16-bit operands, where this PyTorch has it."""
    packet = getattr(torch.ops.aten, name)
    if "dtype_out" not in packet.overloads():
        return None
    overload = packet.dtype_out
    return lambda a, b, *, out: overload(a, b, torch.float32, out=out)


def _by_fp32(fn: Any, operands: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Multiply in fp32 (fp64 where one is fp64) from exactly widened operands; round once into ``out``."""
    double = torch.float64 in (out.dtype, *(t.dtype for t in operands))
    inner = torch.float64 if double else torch.float32
    widened = [t.to(inner) for t in operands]
    if out.dtype is inner:
        return fn(*widened, out=out)
    return out.copy_(fn(*widened))


def _note(notes: MutableSequence[str], name: str, inner: torch.dtype, outer: torch.dtype) -> None:
    text = f"{name} of {inner} into {outer} runs through fp32 copies: this PyTorch's library call cannot do it"
    if text not in notes:
        notes.append(text)
