"""A step's launch code, loaded and bound to a target: the functions ``forward`` and ``backward``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megafuse.codegen.artifact import Artifact, KernelSource
from megafuse.core.errors import TargetError, VerifyError
from megafuse.runtime import dots, numpy_kernels, shim, tensors
from megafuse.runtime.direct import Direct, stream_reader
from megafuse.runtime.loading import load_host
from megafuse.runtime.places import Place

Tensors = list[Tensor | None]
OpaqueTable = Callable[[int, tuple[Tensor, ...]], Sequence[Tensor | None]]
Launcher = Callable[..., None]
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
TARGETS = ("cuda", "interpret")


class LoadedStep:
    """The launch code of one step on one device.

    ``forward(inputs) -> (outputs, saved)`` and ``backward(saved, tangents) -> grads`` take and return lists and empty
    the lists they are given. No grad mode is touched: call them where autograd does not record.

    ``saved_inputs[i]`` is the input that ``saved[i]`` is, or -1; ``saved_strides[i]`` are the strides that backward
    relies on; ``overwritten`` are the positions in ``saved`` whose memory backward writes over. ``returned_again``
    are the outputs that are one tensor with a later output. ``tangents``: shape, strides and element type of those that
    backward reads. ``notes`` say what runs otherwise than planned.
    """

    def __init__(
        self,
        artifact: Artifact,
        target: str,
        device: torch.device | str,
        *,
        opaque: OpaqueTable | None = None,
        poison: bool | None = None,
        sizes: Mapping[str, int] | None = None,
        is_aligned: bool = False,
    ) -> None:
        """Load ``artifact`` for ``target`` ("cuda", or "interpret" on CPU tensors).

        ``opaque(call, args)`` runs the capture's ATen call and returns its results. ``poison`` fills every allocation
        with NaN (default: environment variable ``MEGAFUSE_POISON=1``). ``sizes`` are the values of the artifact's open
        sizes. ``is_aligned``: the inputs of every forward start at multiples of 16 bytes.

        Raises:
            TargetError: the target is not available, or a kernel has no text for it.
            VerifyError: the launch code needs a name that nothing supplies.
        """
        self.device = _checked_device(target, torch.device(device))
        self.target, self.artifact = target, artifact.at(sizes or {})
        self.notes: list[str] = list(artifact.notes)
        poison = os.environ.get("MEGAFUSE_POISON") == "1" if poison is None else poison
        kernels = _kernels(self.artifact.kernels, target)
        names = {
            **_helpers(self.device, poison, self.notes),
            **{name: _launcher(kernel) for name, kernel in kernels.items()},
            "opaque": _opaque(opaque),
            **(sizes or {}),
        }
        missing = [n for n in (*artifact.host.needs, *artifact.host.dims) if n not in names]
        if missing:
            raise VerifyError(f"launch code needs {', '.join(missing)}, which no kernel or helper supplies")
        module = load_host(artifact.host.text, names)
        self.saved_inputs: tuple[int, ...] = module.get("SAVED_INPUTS", ())
        self.saved_strides: list[tuple[int, ...]] = list(module.get("SAVED_STRIDES", ()))
        self.overwritten: tuple[int, ...] = module.get("OVERWRITTEN", ())
        self.returned_again: tuple[int, ...] = module.get("RETURNED_AGAIN", ())
        self.tangents: dict[int, Layout] = module.get("TANGENTS", {})
        self.has_backward = "backward" in module
        self.forward: Callable[[Tensors], tuple[Tensors, Tensors]] = module["forward"]
        self.backward: Callable[[Tensors, Tensors], Tensors] = module.get("backward", _no_backward)
        if self.device.type == "cuda":
            short = {} if poison else tensors.short_cuts(self.device)
            direct = load_host(artifact.host.text, {**names, **short})
            self.forward = Direct(self.forward, direct["forward"], kernels, self.device, is_aligned=is_aligned).run
            self.backward = Direct(self.backward, direct.get("backward", _no_backward), kernels, self.device).run


def _checked_device(target: str, device: torch.device) -> torch.device:
    if target not in TARGETS:
        raise TargetError(f"unknown target {target!r}", hint=f"use one of {', '.join(TARGETS)}")
    if target == "interpret":
        if device.type != "cpu":
            raise TargetError(f"target 'interpret' runs on CPU tensors, not on {device}")
        return device
    if device.type != "cuda" or not torch.cuda.is_available():
        what = f"target 'cuda' needs a CUDA device, not {device}"
        raise TargetError(what, hint="use target='interpret' on CPU tensors")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _helpers(device: torch.device, poison: bool, notes: list[str]) -> dict[str, Any]:
    empty = tensors.allocator(device, poison=poison)
    own: dict[str, Any] = {"empty": empty, "view": tensors.view, "part": tensors.view, "detached": tensors.detached}
    own |= {"fresh": tensors.fresh, "arrange": tensors.arranger(empty), **dots.products(device, notes)}
    if device.type == "cuda":
        own |= {"current_stream": stream_reader(device), "address": Tensor.data_ptr}
    else:
        own |= {"current_stream": lambda: None, "address": Place}
    return {**tensors.DTYPE_TOKENS, **own}


def _kernels(sources: Sequence[KernelSource], target: str) -> Mapping[str, Any]:
    found: dict[str, tuple[str, Any]] = {}
    for source in sources:
        known = found.get(source.entry)
        if known and known[0] != source.digest:
            raise VerifyError(f"two different kernels are called {source.entry!r}")
        found[source.entry] = known or (source.digest, _kernel(source, target))
    return {name: kernel for name, (_, kernel) in found.items()}


def _kernel(source: KernelSource, target: str) -> Any:
    makers: dict[tuple[str, str], Callable[[KernelSource], Any]] = {
        ("triton", "cuda"): shim.cuda_kernel,
        ("triton", "interpret"): shim.interpreted_kernel,
        ("numpy", "interpret"): numpy_kernels.numpy_kernel,
    }
    if (source.backend, target) not in makers:
        raise TargetError(f"kernel {source.entry}: {source.backend} text does not run on target {target!r}")
    return makers[source.backend, target](source)


def _launcher(kernel: Any) -> Launcher:
    launch: Launcher = getattr(kernel, "launch", kernel)
    return launch


def _opaque(table: OpaqueTable | None) -> OpaqueTable:
    """``opaque(call, args)`` whose results share no memory with the arguments, as a planned buffer must not."""
    if table is None:
        return _no_opaque

    def opaque(call: int, args: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        given = {_address(a) for a in args}
        results = table(call, args)
        return tuple(r.clone() if r is not None and _address(r) in given else r for r in results)

    return opaque


def _address(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() or None if isinstance(tensor, Tensor) else None


def _no_opaque(call: int, args: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    raise VerifyError(f"the step runs ATen call {call}, but was loaded without a table of calls")


def _no_backward(saved: Tensors, tangents: Tensors) -> Tensors:
    raise VerifyError("this step has no backward")
