"""Seeded construction of block, input and upstream gradient, and the step that is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rank_mixer_src.block import RankMixerBlock
from rank_mixer_src.config import WorkloadConfig

UPSTREAM_SEED_OFFSET = 1000


@dataclass(frozen=True)
class Workload:
    """What one step needs: the block, ``inputs [B, T, D]`` (requires grad) and ``grad_output [B, T, D]``."""

    block: nn.Module
    inputs: Tensor
    grad_output: Tensor

    def step(self) -> Tensor:
        """Run one forward and backward pass, see :func:`run_step`; returns the output ``[B, T, D]``."""
        return run_step(self.block, self.inputs, self.grad_output)


def build_workload(config: WorkloadConfig, *, rank: int = 0, device: torch.device | str = "cuda") -> Workload:
    """Build the block, then the input, then the upstream gradient.

    The process seed is ``seed + rank``; the block is constructed before ``torch.randn`` makes the input. The
    upstream gradient comes from a generator of its own on ``device``, seeded with ``seed + 1000 + rank``.
    """
    torch.manual_seed(config.seed + rank)
    dtype = config.torch_dtype
    block = RankMixerBlock(
        config.tokens,
        config.dim,
        config.k,
        ffn_type=config.ffn_type,
        gemm_backend=config.gemm_backend,
        device=device,
        dtype=dtype,
    )
    shape = (config.batch_size, config.tokens, config.dim)
    inputs = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    generator = torch.Generator(device=device).manual_seed(config.seed + UPSTREAM_SEED_OFFSET + rank)
    grad_output = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    return Workload(block, inputs, grad_output)


def run_step(block: nn.Module, inputs: Tensor, grad_output: Tensor) -> Tensor:
    """The measured call: clear all gradients, run the block forward, differentiate the complete block.

    ``block`` answers the call ``block(inputs, overlap="none")``; ``inputs``, ``grad_output`` and
    the returned output are ``[B, T, D]``.
    """
    inputs.grad = None
    block.zero_grad(set_to_none=True)
    out: Tensor = block(inputs, overlap="none")
    out.backward(grad_output)  # type: ignore[no-untyped-call]
    return out


def check_output_shape(out: Tensor, inputs: Tensor) -> None:
    """Raise :class:`RuntimeError` unless the output has the shape of the input."""
    if out.shape != inputs.shape:
        raise RuntimeError(f"output shape {list(out.shape)} differs from input shape {list(inputs.shape)}")
