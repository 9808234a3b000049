"""Cases: their types and PyTorch's flag for TF32 products."""

from __future__ import annotations

import torch

from megafuse.bench.cases import TF32, make_case


def test_tf32_is_fp32_with_the_flag_set_and_the_next_case_resets_it() -> None:
    source = {"kind": "rank_mixer", "shape": (2, 4, 16, 2)}
    case = make_case({**source, "dtype": TF32}, "cpu")
    assert torch.backends.cuda.matmul.allow_tf32
    assert case.name.endswith(TF32) and case.args[0].dtype is torch.float32
    assert make_case(case.source, "cpu").name == case.name, "another process makes the same case"
    make_case({**source, "dtype": "float32"}, "cpu")
    assert not torch.backends.cuda.matmul.allow_tf32
