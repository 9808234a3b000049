"""Launch code on a GPU, straight through: loaded a second time, with launches and allocations that check nothing.

What they would have to check is asked once for a whole call instead: that the tensors given are aligned as the compiled
kernels assume, that the step's device is current, and that nobody listens (launch hooks of Triton, dispatch modes of
PyTorch). Where something is otherwise, and until every kernel was compiled, the checking launch code runs.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from megafuse.runtime import shim

_ALIGN = 15  # addresses whose low four bits are zero are 16-byte aligned
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


class _Thread(threading.local):
    """``known``: this thread has a context on the device."""

    known = False


class Direct:
    """One function of launch code: ``run`` is ``checked`` or ``direct``, whichever may run.

    ``direct`` is the same function with globals of its own, in which its kernels become bound launches as soon as all
    of them are known. The first call of a thread (autograd has its own for backward) launches something plain first: a
    thread whose first CUDA call is a matrix product has no context yet, and PyTorch warns about that. ``is_aligned``:
    whoever calls has made sure that all tensors start at multiples of 16 bytes.
    """

    def __init__(
        self,
        checked: Callable[..., Any],
        direct: Callable[..., Any],
        kernels: Mapping[str, Any],
        device: torch.device,
        *,
        is_aligned: bool = False,
    ) -> None:
        self.checked, self.direct, self.device, self.index = checked, direct, device, device.index
        self.is_aligned = is_aligned
        used = direct.__code__.co_names if isinstance(direct, FunctionType) else ()
        self.kernels = {name: kernel for name, kernel in kernels.items() if name in used}
        self.ready = False
        self.hooks: tuple[list[Any], ...] = ()
        self._thread = _Thread()
        self._current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

    def run(self, *lists: list[Tensor | None]) -> Any:
        """Run on lists, which are emptied."""
        if self._current() == self.index and self._thread.known:
            unheard = self.ready and not (_modes() or any(self.hooks) or shim.listening())
            if unheard and (self.is_aligned or aligned(*lists)):
                return self.direct(*lists)
            return self._checked(lists)
        with torch.cuda.device(self.index):
            if not self._thread.known:
                torch.zeros((), device=self.device)
                self._thread.known = True
            return self._checked(lists)

    def _checked(self, lists: Sequence[list[Tensor | None]]) -> Any:
        out = self.checked(*lists)
        if not self.ready:
            self._bind()
        return out

    def _bind(self) -> None:
        """Take the bound launches of all kernels, if each was launched on aligned addresses."""
        bound = {name: kernel.direct(self.index) for name, kernel in self.kernels.items()}
        if all(launch is not None for launch in bound.values()) and isinstance(self.direct, FunctionType):
            self.direct.__globals__.update(bound)
            self.hooks = tuple(kernel.hooks for kernel in self.kernels.values())
            self.ready = True


def aligned(*lists: Sequence[Tensor | None]) -> bool:
    """All tensors start at multiples of 16 bytes; False where one is missing."""
    low = 0
    try:
        for tensors in lists:
            low |= functools.reduce(operator.or_, map(Tensor.data_ptr, tensors), 0)  # type: ignore[arg-type]
    except TypeError:
        return False
    return low & _ALIGN == 0


def stream_reader(device: torch.device) -> Callable[[], int]:
    """``current_stream()`` of launch code: the raw handle of the device's current stream."""
    read: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    index = device.index
    if read is None:
        return lambda: torch.cuda.current_stream(device).cuda_stream
    return lambda: read(index)
