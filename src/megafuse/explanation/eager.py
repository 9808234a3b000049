"""Eager's traffic and time, op by op, from a run of the original on tensors without data.

The rule: every ATen op that is no view is one kernel; it reads each of its input tensors once (of a table that it reads
by index, as much as it writes) and writes each of its outputs once, and nothing stays in cache between ops. Its time is
the launch plus the larger of bytes / DRAM bandwidth and, for matrix products, flops / the peak rate. Views, allocations
and detaches cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megafuse.core.device import DeviceSpec

_FREE = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view detach alias lift_fresh "
    "_reshape_alias set_ resize_ is_same_size sym_size sym_stride sym_numel".split()
)
_DOTS = frozenset("mm bmm addmm baddbmm addbmm".split())
_BY_INDEX = frozenset("embedding index_select index _unsafe_index gather take".split())
RULE = "each ATen op other than a view reads its inputs and writes its outputs once"


@dataclass(frozen=True)
class EagerOp:
    """One kernel of eager execution."""

    name: str
    dram_bytes: int
    flops: int
    seconds: float


@dataclass(frozen=True)
class EagerEstimate:
    """All kernels of one eager step, forward and backward, by the rule in the module's docstring."""

    ops: tuple[EagerOp, ...]
    rule: str = RULE

    @property
    def dram_bytes(self) -> int:
        """Predicted DRAM traffic."""
        return sum(o.dram_bytes for o in self.ops)

    @property
    def seconds(self) -> float:
        """Predicted time."""
        return sum(o.seconds for o in self.ops)


def dot_rate(device: DeviceSpec, dtype: str) -> float:
    """Peak flops per second of matrix products of an element type (``bf16``, ``f32``, ``bfloat16``, ...)."""
    return device.dot_rate_16bit if dtype in ("bf16", "f16", "bfloat16", "float16") else device.dot_rate_fp32


def call_seconds(device: DeviceSpec, dram_bytes: int, flops: int, dtype: str) -> float:
    """Predicted time of one library call or eager kernel."""
    return device.launch_seconds + max(dram_bytes / device.dram_bandwidth, flops / dot_rate(device, dtype))


def estimate_eager(run: Callable[..., Any], inputs: Sequence[Tensor], device: DeviceSpec) -> EagerEstimate | None:
    """Estimate ``run(*inputs)`` and its backward; None where it cannot run on tensors without data.

    ``inputs`` are meta tensors; gradients flow to those that require one. The user's callable runs here on stand-ins,
    so whatever it raises means only that there is no estimate.
    """
    counter = _Counter(device)
    try:
        with counter:
            outputs = [t for t in pytree.tree_leaves(run(*inputs)) if isinstance(t, Tensor)]
            _backward(outputs)
    except Exception:
        return None
    return EagerEstimate(tuple(counter.ops))


def _backward(outputs: Sequence[Tensor]) -> None:
    roots = [t for t in outputs if t.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.empty_like(t) for t in roots])


@dataclass
class _Counter(TorchDispatchMode):
    device: DeviceSpec
    ops: list[EagerOp] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one op and note what it moves."""
        out = func(*args, **(kwargs or {}))
        if not _is_free(func):
            self.ops.append(self._op(func, [args, kwargs], out))
        return out

    def _op(self, func: Any, given: Any, out: Any) -> EagerOp:
        read = {id(t): t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)}
        written = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        name = func.overloadpacket.__name__
        sizes = [_memory(t) for t in read.values()]
        if name in _BY_INDEX:
            sizes[0] = min(sizes[0], _memory(written[0]))
        moved = sum(sizes) + sum(map(_memory, written))
        flops = _dot_flops(name, list(read.values()), written)
        dtype = str(written[0].dtype).removeprefix("torch.") if written else "float32"
        return EagerOp(name, moved, flops, call_seconds(self.device, moved, flops, dtype))


def _is_free(func: Any) -> bool:
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return views or func.overloadpacket.__name__ in _FREE


def _memory(tensor: Tensor) -> int:
    """Bytes that a tensor touches: axes of stride 0 once."""
    touched = math.prod(n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s != 0)
    return touched * tensor.element_size()


def _dot_flops(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    if name not in _DOTS:
        return 0
    left = read[-2] if len(read) > 1 else read[0]
    return 2 * written[0].numel() * left.shape[-1]
