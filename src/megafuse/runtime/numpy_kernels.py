"""Runs kernels printed for NumPy on CPU tensors, over the tensors' own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megafuse.codegen.artifact import KernelSource
from megafuse.core.errors import TargetError
from megafuse.runtime.loading import load_module
from megafuse.runtime.places import Place
from megafuse.runtime.tensors import TORCH_DTYPES


def numpy_launcher(source: KernelSource) -> Callable[..., None]:
    """``launch(*tensors)``: runs a kernel on whole tensors."""
    launch = numpy_kernel(source)
    return lambda *tensors: launch(None, *map(Place, tensors))


def numpy_kernel(source: KernelSource) -> Callable[..., None]:
    """``launch(stream, *places)``: calls ``entry(*arrays, *sizes)``, which runs all programs of the grid.

    Each array is flat: the memory from a place to the end of its storage, without a copy.
    """
    kernel = getattr(load_module(source.text, source.entry), source.entry)
    types = [TORCH_DTYPES[dtype] for _, dtype in source.params]

    def launch(stream: Any, *places: Place) -> None:
        kernel(*[flat_array(p.tensor(t)) for p, t in zip(places, types, strict=True)], *source.sizes)

    return launch


def flat_array(tensor: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """The memory of a CPU tensor from its first element on, as a 1-D array that shares it; bf16 by ml_dtypes.

    Raises:
        TargetError: the tensor is not on the CPU, or ml_dtypes is missing.
    """
    if tensor.device.type != "cpu":
        raise TargetError(f"a NumPy kernel got a tensor on {tensor.device}", hint="give CPU tensors")
    offset = tensor.storage_offset()
    count = max(0, tensor.untyped_storage().nbytes() // tensor.element_size() - offset)
    flat = tensor.detach().as_strided((count,), (1,), offset)
    if flat.dtype is torch.bfloat16:
        return flat.view(torch.int16).numpy().view(_bfloat16())
    return flat.numpy()


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise TargetError("bf16 on NumPy needs ml_dtypes", hint="pip install ml_dtypes") from error
    return ml_dtypes.bfloat16
