"""Printed Triton kernels on a CUDA device, all types, against the same references."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from codegen_abreast import abreast_cases, other_abreast_cases
from codegen_blocks import Case
from codegen_chains import chain_cases
from codegen_dots import dot_cases
from codegen_joint import joint_cases, rounding_cases, summed_cases
from codegen_maps import map_cases
from codegen_programs import cases, other_cases
from codegen_running import differences, entry
from megafuse.codegen.triton import print_kernel
from megafuse.core.dtypes import DType
from megafuse.runtime.shim import cuda_launcher

FLOATS = (DType.F32, DType.F16, DType.BF16)
EVERY = [
    *(
        case
        for dtype in FLOATS
        for case in (*cases(dtype), *joint_cases(dtype), *chain_cases(dtype), *abreast_cases(dtype))
    ),
    *(case for through in (DType.BF16, DType.F16) for case in rounding_cases(through)),
    *other_cases(),
    *summed_cases(),
    *other_abreast_cases(),
    *map_cases(),
]


DOTS = [case for dtype in FLOATS for described in (False, True) for case in dot_cases(dtype, described)]


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


@pytest.mark.gpu
@pytest.mark.parametrize("case", DOTS, ids=lambda case: f"{case.name}-{case.program.descriptors}")
def test_products_match_the_reference(case: Case):
    tensors = {name: to_device(array) for name, array in case.arrays().items()}
    cuda_launcher(print_kernel(case.program))(*tensors.values())
    found = differences({name: to_host(tensor) for name, tensor in tensors.items()}, case, flushed=True)
    assert not found, "\n".join(found)


@pytest.mark.gpu
def test_tensors_that_no_descriptor_can_describe_are_multiplied_too():
    (case,) = [c for c in dot_cases(DType.BF16, descriptors=True) if c.name == "dot_residual_bf16"]
    source = print_kernel(case.program)
    assert source.aligned
    tensors = {}
    for name, array in case.arrays().items():  # every tensor starts two bytes after a multiple of 16
        tensors[name] = torch.empty(array.size + 1, dtype=torch.bfloat16, device="cuda")[1:]
        tensors[name].copy_(to_device(array))
    cuda_launcher(source)(*tensors.values())
    assert not differences({name: to_host(tensor) for name, tensor in tensors.items()}, case)
