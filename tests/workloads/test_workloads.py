"""Every workload builds and runs forward and backward in eager mode, with finite results throughout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafuse.workloads import get, names, registry
from megafuse.workloads.rank_mixer_block import RankMixerBlock
from megafuse.workloads.types import SIZE_NAMES, Workload, normal, register

HAND_NORMS = ("hand_norm", "cast_before_affine", "cast_after_affine")
PARTS = ("weight", "bias")


def outputs_of(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def live(gradient: Tensor | None) -> bool:
    """Whether a gradient is there, finite and not all zero."""
    return gradient is not None and finite(gradient) and bool(gradient.any())


def output(name: str) -> Tensor:
    module, inputs = get(name).make("odd")
    return outputs_of(module(*inputs))[0].detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", ["small", "odd"])
@pytest.mark.parametrize("name", names())
def test_forward_and_backward_are_finite(name: str, size: str, dtype: torch.dtype) -> None:
    module, inputs = get(name).make(size, dtype=dtype)
    torch.manual_seed(0)  # the upstream gradients below
    outputs = outputs_of(module(*inputs))
    assert all(finite(out) for out in outputs)
    torch.autograd.backward(outputs, [torch.randn_like(out) for out in outputs])
    parameters = dict(module.named_parameters())
    assert parameters
    assert not [key for key, parameter in parameters.items() if not live(parameter.grad)]
    assert all(live(x.grad) for x in inputs if x.requires_grad)
    assert all(parameter.dtype == dtype for parameter in parameters.values())


@pytest.mark.parametrize("name", names())
def test_gpu_sizes_build_on_the_meta_device(name: str) -> None:
    workload = get(name)
    keywords = {key: value for key, value in workload.sizes("gpu").items() if key not in workload.input_sizes}
    with torch.device("meta"):
        module = workload.build(**keywords)
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("name", names())
def test_same_seed_same_values(name: str) -> None:
    (first, x), (second, y) = (get(name).make(seed=3) for _ in range(2))
    other, _ = get(name).make(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", names("mutation"))
def test_mutations_keep_the_shape_and_change_the_result(name: str) -> None:
    module, (x,) = get(name).make("odd", dtype=torch.bfloat16)
    assert module(x).shape == x.shape
    assert module(x).dtype == x.dtype
    if name not in {*HAND_NORMS, "channels_first"}:
        assert not torch.allclose(output(name), output("rank_mixer_block"), atol=1e-2)


@pytest.mark.parametrize("name", HAND_NORMS)
def test_norms_by_hand_agree_with_the_block_in_float32(name: str) -> None:
    assert torch.allclose(output(name), output("rank_mixer_block"), atol=1e-4)


def test_channels_first_is_the_block_on_transposed_storage() -> None:
    block, (x,) = get("rank_mixer_block").make("odd")
    other, _ = get("channels_first").make("odd")
    source = dict(block.named_parameters())
    renamed = {
        "w1": source["w1"],
        "wout": source["wout"],
        "b1": source["b1"].t(),
        "bout": source["bout"].t(),
        **{f"outer.{i}.weight": source[f"norm{i}.gamma"] for i in range(3)},
        **{f"outer.{i}.bias": source[f"norm{i}.beta"] for i in range(3)},
        **{f"inner.{i}.{part}": source[f"{n}.{part}"] for i, n in enumerate(("norm_x", "norm_gate")) for part in PARTS},
    }
    other.load_state_dict(renamed)
    assert torch.allclose(other(x.mT.contiguous()).mT, block(x), atol=1e-4)


def test_token_mixer_example() -> None:
    block = RankMixerBlock(tokens=2, dim=4, k=2)
    mixed = block.token_mixer(torch.arange(8.0).view(1, 2, 4))
    assert mixed.tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7]]]


def test_block_against_the_formulas_in_float64() -> None:
    module, (x,) = get("rank_mixer_block").make("odd", dtype=torch.float64)
    p = dict(module.named_parameters())

    def layer_norm(z: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
        centered = z - z.mean(-1, keepdim=True)
        return centered / ((centered**2).mean(-1, keepdim=True) + eps).sqrt() * gamma + beta

    def outer(z: Tensor, i: int) -> Tensor:
        return layer_norm(z, p[f"norm{i}.gamma"], p[f"norm{i}.beta"], 1e-3)

    b, t, d = x.shape
    out1 = outer(x, 0).reshape(b, t, t, d // t).permute(0, 2, 1, 3).reshape(b, t, d)
    out1 = outer(out1 + x, 1)
    u, g = (torch.einsum("btd,tdh->bth", out1, p["w1"]) + p["b1"]).chunk(2, -1)
    g = layer_norm(g, p["norm_gate.weight"], p["norm_gate.bias"], 1e-5)
    hidden = layer_norm(u, p["norm_x.weight"], p["norm_x.bias"], 1e-5) * g / (1 + torch.exp(-g))
    out2 = torch.einsum("bth,thd->btd", hidden, p["wout"]) + p["bout"]
    assert torch.allclose(module(x), outer(out1 + out2, 2), rtol=1e-10, atol=1e-10)


def test_block_refuses_a_dim_that_tokens_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"dim \(10\) must be a multiple of tokens \(4\)"):
        RankMixerBlock(tokens=4, dim=10, k=2)


def test_there_are_enough_and_each_is_documented() -> None:
    assert len(names("mutation")) >= 10
    assert len(names("stranger")) >= 10
    assert all(workload.build.__doc__ for workload in registry.values())
    assert all(set(workload.default_sizes) == set(SIZE_NAMES) for workload in registry.values())


def test_unknown_names_and_sizes_are_explained() -> None:
    with pytest.raises(KeyError, match=r"no workload 'nothing'; there are: adaln, .*three_gates"):
        get("nothing")
    with pytest.raises(KeyError, match=r"'gmlp' has no size 'huge'; it has small, odd, gpu"):
        get("gmlp").sizes("huge")
    with pytest.raises(ValueError, match=r"'gmlp' takes the sizes .* got .*'depth'"):
        get("gmlp").sizes(depth=3)
    with pytest.raises(ValueError, match="registered twice"):
        register(get("gmlp"))
    with pytest.raises(ValueError, match="lacks"):
        Workload("broken", RankMixerBlock, normal(("batch",)), {"small": {"batch": 1}}, "stranger")


def test_sizes_may_be_changed_one_by_one() -> None:
    sizes = get("rank_mixer_block").sizes("small", batch=5)
    module, (x,) = get("rank_mixer_block").make(sizes, requires_grad=False)
    assert x.shape == (5, 4, 16)
    assert not x.requires_grad
    assert module(x).shape == x.shape
