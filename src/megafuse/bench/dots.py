"""The library products of a step, on the step's own tensors: how long the matrix work alone takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {"aten::mm": torch.mm, "aten::bmm": torch.bmm, "aten::addmm": torch.mm, "aten::baddbmm": torch.bmm}


@dataclass(frozen=True, eq=False)
class Dot:
    """One product: the operands as the step gave them (natural strides), and how to run it."""

    run: Callable[..., Tensor]
    a: Tensor
    b: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(P, M, K, N)."""
        batch = self.a.shape[0] if self.a.dim() == 3 else 1
        return batch, self.a.shape[-2], self.a.shape[-1], self.b.shape[-1]

    @property
    def flops(self) -> int:
        """Floating-point operations: 2 P M K N."""
        batch, rows, inner, cols = self.shape
        return 2 * batch * rows * inner * cols

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the product."""
        return (*self.a.shape[:-1], self.b.shape[-1])

    @property
    def bytes(self) -> int:
        """Bytes of both operands and the result, each once."""
        out = self.a.element_size()
        for size in self.out_shape:
            out *= size
        return self.a.nbytes + self.b.nbytes + out

    def describe(self) -> dict[str, Any]:
        """Shapes, strides (elements), flops and bytes for a record."""
        strides = {"a_strides": list(self.a.stride()), "b_strides": list(self.b.stride())}
        return {"P,M,K,N": list(self.shape), **strides, "flops": self.flops, "bytes": self.bytes}


class DotRecorder(TorchDispatchMode):
    """Notes every matrix product that PyTorch runs while it is active, in order; keeps the operands alive."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Dot] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op; remember its operands if it is a product."""
        del types
        out = func(*args, **(kwargs or {}))
        run = _PRODUCTS.get(func._schema.name)
        if run is not None:
            a, b = args[-2:]
            self.found.append(Dot(run, a.detach(), b.detach()))
        return out


def record_dots(step: Callable[[], Any]) -> list[Dot]:
    """The products of one step, forward and backward, without those of biases and scalars."""
    recorder = DotRecorder()
    with recorder:
        step()
    return recorder.found


def products_work(dots: Sequence[Dot]) -> Callable[[], None]:
    """All products back to back, ``out=`` into tensors made here (contiguous), which the work keeps alive."""
    ready = [(d.run, d.a, d.b, torch.empty(d.out_shape, dtype=d.a.dtype, device=d.a.device)) for d in dots]

    def work() -> None:
        for run, a, b, out in ready:
            run(a, b, out=out)

    return work
