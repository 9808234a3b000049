"""The block and its parts against the written formulas, on CPU."""

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rank_mixer_src import (
    ConfigError,
    DensePFFNv2,
    NezhaLayerNorm,
    RankMixerBlock,
    TokenMixer,
    dense_ffn_v2_compute,
    grouped_gemm,
    he_uniform,
    he_uniform_bound,
    token_gemm,
)

DTYPES = (torch.float32, torch.bfloat16)
PARAMETER_SHAPES = {
    "norm0.gamma": (16,),
    "norm0.beta": (16,),
    "norm1.gamma": (16,),
    "norm1.beta": (16,),
    "ffn.w1": (4, 16, 64),
    "ffn.b1": (4, 64),
    "ffn.wout": (4, 32, 16),
    "ffn.bout": (4, 16),
    "ffn.norm_x.weight": (32,),
    "ffn.norm_x.bias": (32,),
    "ffn.norm_gate.weight": (32,),
    "ffn.norm_gate.bias": (32,),
    "norm2.gamma": (16,),
    "norm2.beta": (16,),
}


def layer_norm_formula(z: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    centred = z - z.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps) * gamma + beta


def outer_norm_formula(z: Tensor, norm: NezhaLayerNorm) -> Tensor:
    return layer_norm_formula(z, norm.gamma, norm.beta, 1e-3)


def ffn_formula(x: Tensor, ffn: DensePFFNv2) -> Tensor:
    """The dense subgraph, one token at a time; ``x [B, T, D]``."""
    outputs = []
    for t in range(x.shape[1]):
        z = x[:, t] @ ffn.w1[t] + ffn.b1[t]
        u, g = z[:, : z.shape[1] // 2], z[:, z.shape[1] // 2 :]
        u = layer_norm_formula(u, ffn.norm_x.weight, ffn.norm_x.bias, 1e-5)
        g = layer_norm_formula(g, ffn.norm_gate.weight, ffn.norm_gate.bias, 1e-5)
        outputs.append((u * g * torch.sigmoid(g)) @ ffn.wout[t] + ffn.bout[t])
    return torch.stack(outputs, dim=1)


def block_formula(x: Tensor, block: RankMixerBlock) -> Tensor:
    b, t, d = x.shape
    mixed = outer_norm_formula(x, block.norm0).reshape(b, t, t, d // t).permute(0, 2, 1, 3).reshape(b, t, d)
    out1 = outer_norm_formula(mixed + x, block.norm1)
    return outer_norm_formula(out1 + ffn_formula(out1, block.ffn), block.norm2)


def gradients(block: RankMixerBlock, x: Tensor, out: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, (x, *block.parameters()), upstream)


def test_token_mixing_example() -> None:
    tokens = torch.tensor([[[0, 1, 2, 3], [4, 5, 6, 7]]])
    assert TokenMixer(2)(tokens).tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7]]]


def test_token_mixing_twice_is_identity() -> None:
    x = torch.randn(3, 4, 8)
    assert torch.equal(TokenMixer(4)(TokenMixer(4)(x)), x)


def test_nezha_layer_norm_starts_as_plain_normalisation() -> None:
    norm = NezhaLayerNorm(8, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    assert norm.eps == 1e-3
    assert torch.equal(norm.gamma, torch.ones_like(norm.gamma))
    assert torch.equal(norm.beta, torch.zeros_like(norm.beta))
    torch.testing.assert_close(norm(x), layer_norm_formula(x, norm.gamma, norm.beta, 1e-3))


def test_nezha_layer_norm_rounds_bfloat16_once() -> None:
    norm = NezhaLayerNorm(64, dtype=torch.bfloat16)
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    exact = layer_norm_formula(x.float(), norm.gamma.float(), norm.beta.float(), 1e-3)
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).float(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("backend", ["bmm", "grouped"])
def test_block_matches_formula_with_all_gradients(backend: str) -> None:
    torch.manual_seed(0)
    block = RankMixerBlock(4, 16, 3, gemm_backend=backend, dtype=torch.float64)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(3, 4, 16, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    out, expected = block(x), block_formula(x, block)
    torch.testing.assert_close(out, expected)
    for found, wanted in zip(gradients(block, x, out, upstream), gradients(block, x, expected, upstream), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["bmm", "grouped"])
def test_shapes_dtypes_and_finite_gradients(dtype: torch.dtype, backend: str) -> None:
    block = RankMixerBlock(4, 16, 2, gemm_backend=backend, dtype=dtype)
    x = torch.randn(2, 4, 16, dtype=dtype, requires_grad=True)
    out = block(x, overlap="none", comp_only=False)
    out.backward(torch.randn_like(out))
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert {name: tuple(p.shape) for name, p in block.named_parameters()} == PARAMETER_SHAPES
    for value in (x, *block.parameters()):
        assert value.grad is not None
        assert value.grad.dtype == dtype
        assert bool(value.grad.isfinite().all())


def test_dense_ffn_keeps_the_documented_positional_signature() -> None:
    parameters = inspect.signature(dense_ffn_v2_compute).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert names == ["inputs", "w1", "b1", "wout", "bout", "norm_x", "norm_gate"]
    ffn = DensePFFNv2(4, 16, 32, dtype=torch.float64)
    x = torch.randn(2, 4, 16, dtype=torch.float64)
    out = dense_ffn_v2_compute(x, ffn.w1, ffn.b1, ffn.wout, ffn.bout, ffn.norm_x, ffn.norm_gate)
    torch.testing.assert_close(out, ffn_formula(x, ffn))
    assert torch.equal(out, ffn(x))
    assert ffn.norm_x.eps == ffn.norm_gate.eps == 1e-5


def test_comp_only_changes_nothing() -> None:
    block = RankMixerBlock(4, 16)
    x = torch.randn(2, 4, 16)
    assert torch.equal(block(x, comp_only=True), block(x))


def test_forward_rejects_other_overlap_and_shape() -> None:
    block = RankMixerBlock(4, 16)
    with pytest.raises(ValueError, match="overlap"):
        block(torch.randn(2, 4, 16), overlap="pipeline")
    with pytest.raises(ValueError, match="inputs"):
        block(torch.randn(2, 4, 8))


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"tokens": 3, "dim": 16}, "dim"),
        ({"tokens": 0, "dim": 16}, "tokens"),
        ({"tokens": 4, "dim": 16, "k": 0}, "k"),
        ({"tokens": 4, "dim": 16, "ffn_type": "sparse_moe"}, "ffn_type"),
        ({"tokens": 4, "dim": 16, "gemm_backend": "other"}, "gemm_backend"),
    ],
)
def test_block_names_the_bad_argument(settings: dict[str, Any], argument: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RankMixerBlock(**settings)
    assert caught.value.argument == argument


@pytest.mark.parametrize("shape", [(4, 16, 64), (4, 64), (4, 32, 16), (4, 16)])
def test_he_uniform_bounds_and_spread(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    bound = math.sqrt(6 / math.prod(shape[:-1]))
    parameter = he_uniform(shape)
    values = parameter.detach()
    assert he_uniform_bound(shape) == bound
    assert tuple(values.shape) == shape
    assert parameter.requires_grad
    assert float(values.abs().max()) <= bound * (1 + 1e-6)
    assert float(values.min()) < -0.8 * bound
    assert float(values.max()) > 0.8 * bound
    assert abs(float(values.mean())) < 0.25 * bound


def test_he_uniform_rounds_the_same_draw() -> None:
    torch.manual_seed(2)
    wide = he_uniform((4, 8, 8))
    torch.manual_seed(2)
    narrow = he_uniform((4, 8, 8), dtype=torch.bfloat16)
    assert torch.equal(wide.to(torch.bfloat16), narrow)


def test_he_uniform_needs_a_fan_in() -> None:
    for shape in [(), (0, 4)]:
        with pytest.raises(ValueError, match="he_uniform"):
            he_uniform_bound(shape)


def test_grouped_backend_equals_bmm() -> None:
    x = torch.randn(4, 6, 16)
    weights = torch.randn(4, 16, 8)
    torch.testing.assert_close(token_gemm(x, weights, "grouped"), token_gemm(x, weights, "bmm"))
    with pytest.raises(ValueError, match="gemm_backend"):
        token_gemm(x, weights, "other")


@pytest.mark.parametrize("sizes", [(3, 3, 3), (1, 5, 3), (0, 2, 7)])
def test_grouped_gemm_values_and_gradients(sizes: tuple[int, ...]) -> None:
    rows = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    pieces = torch.split(rows, list(sizes))
    expected = torch.cat([piece @ weight for piece, weight in zip(pieces, weights, strict=True)])
    torch.testing.assert_close(grouped_gemm(rows, weights, sizes), expected)
    assert torch.autograd.gradcheck(lambda r, w: grouped_gemm(r, w, sizes), (rows, weights))


def test_grouped_gemm_rejects_sizes_that_do_not_fit() -> None:
    rows, weights = torch.randn(9, 5), torch.randn(3, 5, 4)
    for sizes in [(4, 5), (3, 3, 4), (-1, 5, 5), ()]:
        with pytest.raises(ValueError, match="group_sizes"):
            grouped_gemm(rows, weights, sizes)
