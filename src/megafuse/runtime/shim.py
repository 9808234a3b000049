"""Everything that differs between Triton versions about launching a kernel, from 3.2 to 3.9.

The plain road is ``kernel[grid](...)``: 9 to 15 us of host time. The fast road calls the compiled kernel's own C
launcher with addresses. It skips Triton's hooks and its specialisation on alignment, so it is taken only for versions
whose launcher is known (3.6, 3.9), while no hook listens, and with one compiled variant for each pattern of 16-byte
alignment of the pointers. Whatever is not as known falls back to the plain road.

``shim_worker.py`` is the other place with version differences: offline compilation in a process of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megafuse.codegen.artifact import KernelSource
from megafuse.core.dtypes import DType
from megafuse.core.errors import TargetError
from megafuse.runtime import early
from megafuse.runtime.assembled import Assembled, check_assembled
from megafuse.runtime.loading import load_module
from megafuse.runtime.places import Place
from megafuse.runtime.tensors import TORCH_DTYPES

Launcher = Callable[..., None]  # (stream, *places)
Bound = Callable[..., Any]  # (stream, *addresses)
DESCRIPTORS_SINCE = (3, 4)  # of Triton: tl.make_tensor_descriptor
_ALIGN = 15  # pointers whose low four bits are zero are 16-byte aligned


def triton_version() -> tuple[int, int]:
    """Major and minor version of the installed Triton.

    Raises:
        TargetError: Triton is not installed.
    """
    major, minor = _triton().__version__.split(".")[:2]
    return int(major), int(minor)


def interpreting() -> bool:
    """True when ``TRITON_INTERPRET=1`` makes Triton run kernels on the CPU; it is read when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def cuda_launcher(source: KernelSource) -> Callable[..., None]:
    """``launch(*tensors)``: runs a Triton kernel on the tensors' device, on its current stream.

    Compilation happens at the first launch for each device and alignment pattern. An empty grid launches nothing.

    Raises:
        TargetError: Triton is missing, or interprets kernels in this process.
    """
    kernel, address = cuda_kernel(source), Tensor.data_ptr

    def launch(*tensors: Tensor) -> None:
        device = tensors[0].get_device()
        if device == _current_device():
            kernel.launch(0, *map(address, tensors))
        else:
            with torch.cuda.device(device):
                kernel.launch(0, *map(address, tensors))

    return launch


def cuda_kernel(source: KernelSource) -> CudaKernel | DescribedKernel:
    """A Triton kernel to be launched on addresses.

    Raises:
        TargetError: Triton is missing, or interprets kernels in this process.
    """
    if interpreting():
        raise TargetError("TRITON_INTERPRET=1 is set: Triton kernels would not run on the GPU", hint="unset it")
    if source.fallback is None:
        return CudaKernel(_entry(source), source)
    plain = CudaKernel(_entry(source.fallback), source.fallback)
    if triton_version() < DESCRIPTORS_SINCE or 0 in source.grid:
        return plain
    return DescribedKernel(CudaKernel(_entry(source), source), plain, source.aligned)


def interpreted_kernel(source: KernelSource) -> Launcher:
    """``launch(stream, *places)`` on CPU memory through Triton's interpreter: fp64, fp32, fp16 and integers.

    Raises:
        TargetError: the process was not started with ``TRITON_INTERPRET=1``; the kernel has bf16 arguments, on which
            Triton's interpreter computes wrong numbers without a word; or it contains assembly, which needs a GPU.
    """
    if not interpreting():
        raise TargetError(
            "Triton's interpreter is off", hint="start the process with TRITON_INTERPRET=1 (it is read at import)"
        )
    wrong = [name for name, dtype in source.params if dtype is DType.BF16]
    if wrong:
        raise TargetError(
            f"kernel {source.entry}: Triton's interpreter is wrong in bf16 (arguments {', '.join(wrong)})",
            hint="interpret in fp32 or fp16, or use the kernel's NumPy text, which is right in bf16",
        )
    if "inline_asm" in (source.fallback or source).text:
        raise TargetError(
            f"kernel {source.entry}: it rounds to bf16 in assembly, which Triton's interpreter cannot run",
            hint="use the kernel's NumPy text, which rounds the same way",
        )
    complete_interpreter()
    kernel = _entry(source.fallback or source)
    if 0 in source.grid:
        return lambda stream, *places: None
    types = [TORCH_DTYPES[dtype] for _, dtype in source.params]

    def launch(stream: Any, *places: Place) -> None:
        tensors = [place.tensor(dtype).detach() for place, dtype in zip(places, types, strict=True)]
        kernel[source.grid](*tensors, *source.sizes)

    return launch


def complete_interpreter() -> None:
    """Let Triton's interpreter spread scalar truth values over blocks, and heed them as masks of scalar stores.

    It makes integers of the former otherwise and, up to 3.3, stores in spite of the latter.
    """
    from triton.language import int1, semantic
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_splat
    if getattr(plain, "keeps_truth", False):
        return
    if store := getattr(semantic, "store", None):  # a function up to 3.3

        def masked(ptr: Any, value: Any, mask: Any, *others: Any) -> Any:
            refused = mask is not None and not mask.type.is_block() and not mask.handle.data.all()
            return None if refused else store(ptr, value, mask, *others)

        semantic.store = masked

    def create_splat(self: Any, *args: Any) -> Any:
        value = next(a for a in args if isinstance(a, TensorHandle))
        if value.data.dtype == bool:
            value = TensorHandle(value.data, int1)
        return plain(self, *(value if isinstance(a, TensorHandle) else a for a in args))

    create_splat.keeps_truth = True  # type: ignore[attr-defined]
    InterpreterBuilder.create_splat = create_splat


@functools.cache
def _triton() -> Any:
    try:
        import triton
    except ImportError as error:
        raise TargetError("Triton is not installed", hint="pip install triton") from error
    return triton


def _entry(source: KernelSource) -> Any:
    _triton()
    return getattr(load_module(source.text, source.entry), source.entry)


@dataclass(frozen=True)
class _Pointer:
    """An address as Triton takes it for a tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class CudaKernel:
    """Launches of one kernel on the current device.

    ``variants`` holds, by device and alignment pattern, a bound fast launch, or None for the plain road. ``hooks`` is
    Triton's list of what wants to see each launch of this kernel.
    """

    def __init__(self, kernel: Any, source: KernelSource) -> None:
        self.kernel, self.source = kernel, source
        self.variants: dict[Any, Bound | None] = {}
        self.told: dict[int, dict[str, int | bool]] = {}  # options and constants, by device
        self.hooks: list[Any] = getattr(kernel, "pre_run_hooks", [])
        self.dtypes = [TORCH_DTYPES[dtype] for _, dtype in source.params]

    def launch(self, stream: int, *pointers: int) -> None:
        """Launch on the current stream, by the fast road where that is known to be right; an empty grid is nothing."""
        if 0 in self.source.grid:
            return
        device = _current_device()
        key = (device, tuple(p & _ALIGN == 0 for p in pointers))
        bound = self.variants.get(key)
        if bound is None or self.hooks or listening():
            self._first(key, device, pointers)
        else:
            bound(_current_stream(device), *pointers)

    def direct(self, device: int) -> Bound | None:
        """The fast launch on 16-byte aligned addresses, once there was a launch on such; None: there is none."""
        if 0 in self.source.grid:
            return lambda stream, *pointers: None
        return self.variants.get((device, (True,) * len(self.dtypes)))

    def assemble(self) -> Assembled:
        """Compile for the current device and aligned addresses, as the first launch would, and launch nothing.

        Raises:
            TargetError: the assembler may have made something else of the kernel.
        """
        return Assembled(None if 0 in self.source.grid else self._compiled([0] * len(self.dtypes)))

    def _first(self, key: Any, device: int, pointers: tuple[int, ...]) -> None:
        """The plain road: first launch of a variant, or hooks."""
        if key not in self.variants:
            self._compiled(pointers)
        compiled = self.plain(pointers)
        if key not in self.variants:
            self.variants[key] = bind(compiled, self.kernel, self.source)

    def _compiled(self, pointers: Sequence[int]) -> Any:
        """Compile and check; the compiled kernel. Hooks see launches, which this is not: Triton would call them."""
        src = self.source
        given = [_Pointer(p, dtype) for p, dtype in zip(pointers, self.dtypes, strict=True)]
        hooks, self.hooks[:] = self.hooks[:], []
        try:
            compiled = self.kernel.warmup(*given, *src.sizes, grid=src.grid, **self._told())
        finally:
            self.hooks[:] = hooks
        check_assembled(compiled, src)
        return compiled

    def plain(self, pointers: Sequence[int]) -> Any:
        """Launch as any Triton user does; returns the compiled kernel.

        Descriptors take memory for themselves: Triton asks an allocator that is set for the running thread.
        """
        given = [_Pointer(p, dtype) for p, dtype in zip(pointers, self.dtypes, strict=True)]
        if self.source.aligned:
            return contextvars.copy_context().run(self._with_allocator, given)
        return self._run(given)

    def _with_allocator(self, given: Sequence[_Pointer]) -> Any:
        device = torch.device("cuda", _current_device()) if torch.cuda.is_available() else torch.device("cpu")
        _triton().set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
        return self._run(given)

    def _run(self, given: Sequence[_Pointer]) -> Any:
        src = self.source
        return self.kernel[src.grid](*given, *src.sizes, **self._told())

    def _told(self) -> dict[str, int | bool]:
        """Options and constants for the current device: the same at every launch."""
        device = _any_device()
        if device not in self.told:
            told = early.device_options(self.source, triton_version())
            self.told[device] = {**self.source.options, **told, **early.constants(told)}
        return self.told[device]


@dataclass(frozen=True)
class DescribedKernel:
    """``described`` where tensor descriptors can be made of the tensors at ``positions``, else ``plain``.

    Descriptors are made on the device from Triton 3.4 on; the tensor copy engine came with compute capability 9.0.
    """

    described: CudaKernel
    plain: CudaKernel
    positions: tuple[int, ...]

    def assemble(self) -> Assembled:
        """As ``CudaKernel.assemble``, of the kernel that aligned addresses get."""
        return self._able(_current_device()).assemble()

    @property
    def hooks(self) -> list[Any]:
        """Those of the kernel that aligned addresses get."""
        return self._able(_current_device()).hooks

    def launch(self, stream: int, *pointers: int) -> None:
        """Launch on the current stream."""
        low = 0
        for position in self.positions:
            low |= pointers[position]
        (self.plain if low & _ALIGN else self._able(_current_device())).launch(stream, *pointers)

    def direct(self, device: int) -> Bound | None:
        """The fast launch on aligned addresses."""
        return self._able(device).direct(device)

    def _able(self, device: int) -> CudaKernel:
        return self.described if torch.cuda.get_device_capability(device) >= (9, 0) else self.plain


def bind(compiled: Any, kernel: Any, source: KernelSource) -> Bound | None:
    """The fast launch of a compiled kernel, or None where this Triton is not one whose launcher is known."""
    binder = _BINDERS.get(triton_version())
    if binder is None or compiled is None or not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        return None
    try:
        return binder(compiled, (*source.grid, 1), _constants(kernel, source))
    except (AttributeError, TypeError, ValueError):
        return None


def _constants(kernel: Any, source: KernelSource) -> tuple[Any, ...]:
    """Values of the kernel's parameters after the pointers: sizes, then constexprs, which launchers skip."""
    tail = list(inspect.signature(kernel.fn).parameters.values())[len(source.params) + len(source.sizes) :]
    if any(p.default is inspect.Parameter.empty for p in tail):
        raise TypeError("a parameter after the pointers and sizes has no default")
    return (*source.sizes, *(p.default for p in tail))


def _scratch_free(run: Any) -> bool:
    return run.global_scratch_size == 0 and run.profile_scratch_size == 0


def _bind_36(compiled: Any, grid: tuple[int, ...], tail: tuple[Any, ...]) -> Bound | None:
    """3.6: a C function per signature.

    ``launch(gx, gy, gz, stream, function, cooperative, pdl, scratch, profile scratch, metadata, launch metadata, enter
    hook, exit hook, *arguments)``
    """
    run = compiled.run
    if not _scratch_free(run):
        return None
    launch, function, packed = run.launch, compiled.function, compiled.packed_metadata
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl
    gx, gy, gz = grid

    def bound(stream: int, *pointers: int) -> None:
        launch(gx, gy, gz, stream, function, cooperative, pdl, None, None, packed, None, None, None, *pointers, *tail)

    return bound


def _bind_39(compiled: Any, grid: tuple[int, ...], tail: tuple[Any, ...]) -> Bound | None:
    """3.9: one C function for all signatures.

    ``launch(gx, gy, gz, stream, function, cooperative, pdl, metadata, launch metadata, enter hook, exit hook, scratch,
    profile scratch, annotations, signature, arguments)``
    """
    run = compiled.run
    if not _scratch_free(run) or run.gsan_enabled:
        return None
    launch, function, packed = run.launch, compiled.function, compiled.packed_metadata
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl
    notes, signature = run.arg_annotations, run.kernel_signature
    gx, gy, gz = grid

    def bound(stream: int, *pointers: int) -> None:
        launch(
            gx, gy, gz, stream, function, cooperative, pdl, packed, None, None, None, None, None, notes, signature,
            (*pointers, *tail),
        )  # fmt: skip

    return bound


_BINDERS = {(3, 6): _bind_36, (3, 9): _bind_39}


def listening() -> bool:
    """Something wants to see every launch (profilers), so that the plain road must be taken."""
    try:
        runtime = _triton().knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    except AttributeError:  # this Triton keeps them elsewhere
        return True
    heard = enter is not None and getattr(enter, "calls", True)
    return bool(heard or (leave is not None and getattr(leave, "calls", True)))


def _any_device() -> int:
    """The current device; -1 where there is none."""
    with contextlib.suppress(AssertionError, RuntimeError):  # built without CUDA, or no driver
        return _current_device()
    return -1


def _current_device() -> int:
    current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
    return current()


def _current_stream(device: int) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream
