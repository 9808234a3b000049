"""``dots="auto"``: products with epilogues through the whole pipeline, right by the rule; ``explain`` of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafuse
from megafuse.compiler import Compiled, NotFusedWarning, compile_call, engine
from megafuse.compiler.engine import available
from megafuse.core.device import device_spec
from megafuse.core.errors import InputError
from megafuse.fusion import planner
from megafuse.fusion.epilogue import DotRule
from megafuse.fusion.split_dot import Split
from megafuse.runtime.offline import compile_offline
from megafuse.runtime.shim import DESCRIPTORS_SINCE, triton_version
from megafuse.workloads import get, names
from pipeline_helpers import check_few, compiled_of

DESCRIBED = pytest.mark.skipif(
    triton_version() < DESCRIPTORS_SINCE,
    reason="products are generated from Triton 3.4 on: before, ptxas is slow",
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TokenFFN(nn.Module):
    """A GELU network per token, without biases, whose tokens are the middle dim."""

    def __init__(self, tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(tokens, dim, hidden) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(tokens, hidden, dim) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(torch.bmm(x.transpose(0, 1), self.w1))
        return torch.bmm(hidden, self.w2).transpose(0, 1)


class Residual(nn.Module):
    """Linear layers with biases, an activation that keeps what it is made of, a residual."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.silu(self.inner(x)))


class TwoProducts(nn.Module):
    """A sum of two products, which only one of both can take in, and one value used by both."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        left = self.a(x)
        return torch.tanh(left + self.b(torch.relu(left)))


class Turned(nn.Module):
    """A product that is read turned round, scaled per row, and cut along its rows."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(x @ self.w)
        return (y * x.sum(-1, keepdim=True)).transpose(-1, -2).contiguous()


class Biases(nn.Module):
    """Per-token layers with biases, and a gain that all tokens share: sums over rows, and over tokens and rows."""

    def __init__(self, tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(tokens, dim, hidden) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(tokens, hidden, dim) * hidden**-0.5)
        self.b1 = nn.Parameter(torch.randn(tokens, 1, hidden))
        self.gain, self.b2 = nn.Parameter(torch.randn(hidden)), nn.Parameter(torch.randn(tokens, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(torch.bmm(x.transpose(0, 1), self.w1) + self.b1) * self.gain
        return torch.bmm(hidden, self.w2) + self.b2


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "token_ffn": (lambda: TokenFFN(3, 24, 40), (16, 3, 24)),
    "token_ffn_odd": (lambda: TokenFFN(5, 7, 9), (11, 5, 7)),
    "residual": (lambda: Residual(24, 40), (16, 24)),
    "residual_rows": (lambda: Residual(12, 20), (4, 5, 12)),
    "two_products": (lambda: TwoProducts(24), (33, 24)),
    "turned": (lambda: Turned(20), (2, 17, 20)),
    "biases": (lambda: Biases(3, 24, 40), (300, 3, 24)),
    "biases_odd": (lambda: Biases(5, 7, 9), (131, 5, 7)),
    "biases_few_rows": (lambda: Biases(2, 24, 40), (3, 2, 24)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODULES)
def test_products_take_in_what_follows(name: str, dtype: str) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(3)
    module = make().to(DTYPES[dtype])
    x = torch.randn(shape, dtype=DTYPES[dtype], requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret", dots="auto", chains=False)
    assert any(k.dot is not None for k in compiled_of(fused).step.kernels)
    check_few(module, x, fused=fused)


def test_fp32_products_stay_with_the_library() -> None:
    make, shape = MODULES["residual"]
    compiled = compiled_of(megafuse.fuse(make(), torch.randn(shape), target="interpret", dots="auto", chains=False))
    assert not any(k.dot is not None for k in compiled.step.kernels)


@pytest.mark.parametrize("name", names())
def test_workloads_are_right_either_way(name: str) -> None:
    module, inputs = get(name).make("odd", dtype=torch.bfloat16)
    check_few(module, *inputs, fused=megafuse.fuse(module, *inputs, target="interpret", dots="auto"))


def planned(module: nn.Module, x: Tensor, fuse: bool = True) -> Compiled:
    """The plan on tensors without data."""
    return compile_call(module, (x,), {}, device_spec(90), dots=DotRule(fuse))


def on_meta(make: Callable[[], nn.Module], *shape: int) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return make().to(torch.bfloat16), torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)


def test_without_tensor_descriptors_the_library_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = DotRule(True, chain=True)
    assert available(rule, "numpy") == rule
    monkeypatch.setattr(engine, "triton_version", lambda: (3, 3))
    assert available(rule, "numpy") == rule
    with pytest.warns(NotFusedWarning, match="needs Triton 3.4 or newer"):
        assert available(rule, "triton") == replace(rule, fuse=False)


@DESCRIBED
def test_the_activation_and_its_derivative_move_into_the_products_of_a_network_per_token() -> None:
    compiled = planned(*on_meta(lambda: TokenFFN(64, 1280, 2560), 1024, 64, 1280))
    kernels = compiled.step.kernels
    assert len(kernels) == 2 and all(k.dot is not None for k in kernels), "nothing else is left to compute"
    first, second = kernels
    assert (len(first.writes), len(second.writes)) == (2, 1), "dh itself is never written"
    before = planned(*on_meta(lambda: TokenFFN(64, 1280, 2560), 1024, 64, 1280), fuse=False)
    assert compiled.cover.seconds < before.cover.seconds
    assert not any(k.dot is not None for k in before.step.kernels)
    for report in compile_offline(compiled.artifact("triton").kernels):
        assert not report.error and report.spills == 0 and report.shared <= 227 * 1024


def test_bias_and_residual_move_into_the_second_product_of_a_block() -> None:
    workload = get("rank_mixer_block")
    sizes = workload.sizes("gpu", batch=1024, tokens=64, dim=1280, k=2)
    build = {k: v for k, v in sizes.items() if k not in workload.input_sizes}
    compiled = planned(*on_meta(lambda: workload.build(**build), 1024, 64, 1280))
    (kernel,) = [k for k in compiled.step.kernels if k.dot is not None]
    assert "bout" in kernel.reads and kernel.dot is not None and kernel.dot.b.buffer == "wout"
    assert compiled.step.buffer(kernel.writes[0]).dtype.value == "bf16"


@DESCRIBED
def test_bias_gradients_beside_a_product_do_not_read_its_values_again() -> None:
    compiled = planned(*on_meta(lambda: Residual(1024, 4096), 8192, 1024))
    (kernel,) = [k for k in compiled.step.kernels if any(b.startswith("partial") for b in k.writes) and k.dot]
    partial = next(b for b in kernel.writes if b.startswith("partial"))
    (finisher,) = [k for k in compiled.step.kernels if k.reads == (partial,)]
    assert compiled.step.buffer(finisher.writes[0]).kind == "grad"
    for report in compile_offline(compiled.artifact("triton").kernels):
        assert not report.error and report.spills == 0 and report.shared <= 227 * 1024


class Batched(nn.Module):
    """Products of several matrices, transposed on both sides."""

    def __init__(self, tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(tokens, dim, hidden) * dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self.w).transpose(0, 1)


PARTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one": (lambda: nn.Linear(24, 40, bias=False), (300, 24)),
    "several": (lambda: Batched(3, 24, 40), (1040, 3, 24)),
    "odd": (lambda: Batched(5, 7, 9), (531, 5, 7)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PARTS)
def test_products_in_parts_of_k(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that are large enough for it take long here: the cost model is told to cut all."""
    monkeypatch.setattr(planner, "split_of", lambda dot, *_: Split(dot, 5, 1e-6) if len(dot.args) == 2 else None)
    make, shape = PARTS[name]
    torch.manual_seed(4)
    module, x = make().to(DTYPES[dtype]), torch.randn(shape, dtype=DTYPES[dtype], requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret", dots="auto", chains=False)
    kernels = compiled_of(fused).step.kernels
    assert max(k.dot.splits for k in kernels if k.dot is not None) == 5
    check_few(module, x, fused=fused)
    assert "in 5 parts of" in str(megafuse.explain(fused))


@DESCRIBED
def test_weight_gradients_of_narrow_layers_are_cut_by_the_cost_model() -> None:
    compiled = planned(*on_meta(lambda: nn.Linear(128, 128, bias=False), 65536, 128))
    (kernel,) = [k for k in compiled.step.kernels if k.dot is not None]
    assert kernel.dot is not None and kernel.dot.splits > 8
    for report in compile_offline(compiled.artifact("triton").kernels):
        assert not report.error and report.spills == 0 and report.shared <= 227 * 1024


def test_explain_names_products_and_what_they_take_in() -> None:
    module, x = TokenFFN(3, 24, 40).bfloat16(), torch.randn(16, 3, 24, dtype=torch.bfloat16, requires_grad=True)
    text = str(megafuse.explain(megafuse.fuse(module, x, target="interpret", dots="auto", chains=False)))
    assert "multiplies x @ w1: [3, 16, 24] x [3, 24, 40]" in text
    assert "is multiplied by a generated kernel, which also makes" in text
    assert "by the library, 2 in generated kernels" in text


def test_other_sizes_and_other_ways_are_refused_or_served() -> None:
    module, x = Residual(24, 40), torch.randn(16, 24, requires_grad=True)
    with pytest.raises(InputError, match="unknown way to run dots: 'fast'"):
        megafuse.fuse(module, x, target="interpret", dots="fast")
    fused = megafuse.fuse(module, x, target="interpret", dots="auto")
    for rows in (5, 7, 40):
        other = torch.randn(rows, 24)
        torch.testing.assert_close(fused(other), module(other))
