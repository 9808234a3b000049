"""Printed Triton kernels on a CUDA device, all types, against the same references."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from codegen_blocks import Case
from codegen_joint import joint_cases, rounding_cases
from codegen_maps import map_cases
from codegen_programs import cases, other_cases
from codegen_running import differences, entry
from megafuse.codegen.triton import print_kernel
from megafuse.core.dtypes import DType

FLOATS = (DType.F32, DType.F16, DType.BF16)
EVERY = [
    *(case for dtype in FLOATS for case in (*cases(dtype), *joint_cases(dtype))),
    *(case for through in (DType.BF16, DType.F16) for case in rounding_cases(through)),
    *other_cases(),
    *map_cases(),
]


def to_device(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array).cuda()


def to_host(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    return tensor.cpu().numpy()


@pytest.mark.gpu
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_triton_text_matches_the_reference(case: Case, tmp_path: Path):
    source = print_kernel(case.program)
    tensors = {name: to_device(array) for name, array in case.arrays().items()}
    kernel = entry(source, tmp_path)
    kernel[source.grid](*tensors.values(), num_warps=source.num_warps, num_stages=source.num_stages)
    outputs = {name: to_host(tensor) for name, tensor in tensors.items()}
    found = differences(outputs, case, flushed=True)
    assert not found, "\n".join(found)
