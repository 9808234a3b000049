"""Chains whose dots have a matrix for each of several problems (tokens, heads), right by the rule."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafuse
from megafuse.compiler import Compiled, compile_call
from megafuse.compiler.variants import subjects
from megafuse.core.device import device_spec
from megafuse.fusion import chain_search
from megafuse.fusion.epilogue import DotRule
from megafuse.ir.chain import SumDot, Walk
from megafuse.runtime.offline import compile_offline
from megafuse.runtime.shim import triton_version
from megafuse.schedule.types import DotCall, Launch
from pipeline_helpers import check_few, compiled_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "softplus": F.softplus,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "norm": lambda h: F.relu(F.rms_norm(h, (h.shape[-1],))),
}


def bmm(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """[B, T, K] by [T, K, N]."""
    y = torch.bmm(x.transpose(0, 1), w).transpose(0, 1)
    return y if b is None else y + b


def einsum(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """The same."""
    y = torch.einsum("btk,tkn->btn", x, w)
    return y if b is None else y + b


def baddbmm(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """[T, B, K] by [T, K, N]."""
    return torch.bmm(x, w) if b is None else torch.baddbmm(b[:, None], x, w)


def last(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """[B, K, T] by [T, K, N], tokens last."""
    y = torch.einsum("bkt,tkn->bnt", x, w)
    return y if b is None else y + b.t()


WAYS = {"bmm": bmm, "einsum": einsum, "baddbmm": baddbmm}


class PerToken(nn.Module):
    """Layers with a matrix for each token."""

    def __init__(self, tokens: int, widths: list[int], bias: bool, activation: Activation, way: str) -> None:
        super().__init__()
        edges = list(itertools.pairwise(widths))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(tokens, k, n) / math.sqrt(k)) for k, n in edges)
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(tokens, n)) for _, n in edges if bias)
        self.activation, self.way = activation, WAYS[way]

    def forward(self, x: Tensor) -> Tensor:
        for number, weight in enumerate(self.weights):
            x = self.way(x if number == 0 else self.activation(x), weight, self.biases[number] if self.biases else None)
        return x


def inputs(way: str, tokens: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    shape = (tokens, rows, width) if way == "baddbmm" else (rows, tokens, width)
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def walks(compiled: Compiled, forward: bool) -> list[Walk]:
    return [c.walk for c in compiled.cover.chains if c.forward == forward]


def planned(module: nn.Module, *args: Tensor, **options: object) -> Compiled:
    return compile_call(module, args, {}, device_spec(90), dots=DotRule(chain=True), **options)


def on_meta(tokens: int, rows: int, widths: list[int], dtype: torch.dtype = torch.bfloat16) -> Compiled:
    with torch.device("meta"):
        module = PerToken(tokens, widths, False, F.softplus, "bmm").to(dtype)
        return planned(module, inputs("bmm", tokens, rows, widths[0], dtype))


@pytest.fixture
def _whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be a chain is one, though the library is predicted to be faster."""
    predicted = chain_search.chain_seconds
    monkeypatch.setattr(chain_search, "chain_seconds", lambda *given: predicted(*given) / 10)
    monkeypatch.setattr("megafuse.fusion.planner.WORTH_CHAINING", -math.inf)


def fused_chains(module: nn.Module, *args: Tensor, walk: Walk, backward: bool = True) -> Compiled:
    """Fuse, check by the rule; the plan, all of whose dots of forward, and some of backward, are in chains."""
    fused = megafuse.fuse(module, *args, target="interpret")
    compiled = compiled_of(fused)
    assert walks(compiled, True) == [walk], compiled.cover.decisions
    assert not backward or walk in walks(compiled, False), compiled.cover.decisions
    assert not any(isinstance(c, DotCall) for c in compiled.step.forward)
    check_few(module, *args, fused=fused)
    return compiled


@pytest.mark.usefixtures("_whatever_they_cost")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_multiply_each_token_by_its_matrix(way: str, bias: bool, dtype: str) -> None:
    torch.manual_seed(1)
    module = PerToken(5, [12, 20, 7], bias, F.softplus, way).to(DTYPES[dtype])
    compiled = fused_chains(module, inputs(way, 5, 37, 12, DTYPES[dtype]), walk=Walk(5, 37))
    launches = [c for c in compiled.step.forward if isinstance(c, Launch)]
    assert len(launches) == 1, "biases and activations are computed between the products"
    (backward,) = [c for c in compiled.cover.chains if not c.forward]
    assert sum(isinstance(s, SumDot) for s in backward.stages) == 2, "gradients of the weights of each token"


@pytest.mark.usefixtures("_whatever_they_cost")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_norms(activation: str) -> None:
    torch.manual_seed(2)
    module = PerToken(3, [16, 33, 33, 8], True, ACTIVATIONS[activation], "bmm")
    fused_chains(module, inputs("bmm", 3, 50, 16, torch.float32), walk=Walk(3, 50))


@pytest.mark.usefixtures("_whatever_they_cost")
@pytest.mark.parametrize("seed", range(10))
def test_random_networks(seed: int) -> None:
    """Widths from 1 to 256, rows and tokens from 2 on, depths, biases, types, ways."""
    draw = random.Random(seed)
    widths = [draw.choice([1, 3, 16, 37, 64, 128, draw.randint(1, 256)]) for _ in range(draw.randint(3, 5))]
    tokens, rows = draw.choice([2, 3, 7, 16, 150]), draw.choice([2, 3, 19, 64, 77])
    dtype, way = draw.choice(list(DTYPES.values())), draw.choice(list(WAYS))
    bias, activation = draw.random() < 0.5, draw.choice(list(ACTIVATIONS))
    print(f"{seed=} {widths=} {tokens=} {rows=} {dtype=} {bias=} {activation=} {way=}")
    torch.manual_seed(seed)
    module = PerToken(tokens, widths, bias, ACTIVATIONS[activation], way).to(dtype)
    x = inputs(way, tokens, rows, widths[0], dtype).detach().requires_grad_(draw.random() < 0.7)
    fused = megafuse.fuse(module, x, target="interpret")
    assert Walk(tokens, rows) in walks(compiled_of(fused), True)
    check_few(module, x, fused=fused)


@pytest.mark.usefixtures("_whatever_they_cost")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [16, 24])
def test_as_many_tokens_as_rows_as_columns(size: int, way: str) -> None:
    """Which axis is which is seen by how values lie."""
    torch.manual_seed(3)
    module = PerToken(size, [size] * 4, True, F.softplus, way)
    fused_chains(module, inputs(way, size, size, size, torch.float32), walk=Walk(size, size))


@pytest.mark.usefixtures("_whatever_they_cost")
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :, 2:14],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)[..., :12],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)[..., :12],
        lambda x: x[:, :1, :12].expand(-1, 5, -1),
    ],
    ids=["slice", "tokens last", "tokens first", "expanded"],
)
def test_inputs_are_read_by_strides(view: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(4)
    module = PerToken(5, [12, 20, 7], True, F.softplus, "bmm")
    x = view(torch.randn(37, 5, 16)).detach().requires_grad_()
    fused = megafuse.fuse(module, x, target="interpret")
    check_few(module, x, fused=fused)


class Last(nn.Module):
    """Tokens are the last axis, as ``einsum`` allows."""

    def __init__(self, tokens: int, widths: list[int]) -> None:
        super().__init__()
        edges = itertools.pairwise(widths)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(tokens, k, n) / math.sqrt(k)) for k, n in edges)

    def forward(self, x: Tensor) -> Tensor:
        for number, weight in enumerate(self.weights):
            x = last(x if number == 0 else F.silu(x), weight, None)
        return x


@pytest.mark.usefixtures("_whatever_they_cost")
def test_tokens_as_the_last_axis() -> None:
    torch.manual_seed(5)
    module, x = Last(5, [12, 20, 7]), torch.randn(37, 12, 5, requires_grad=True)
    check_few(module, x, fused=megafuse.fuse(module, x, target="interpret"))


class Mixed(nn.Module):
    """Outer rows of two axes, a norm before, a shared matrix and a shared bias between, a skip, a scale per token."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norm, self.shared = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.first, self.second = (nn.Parameter(torch.randn(tokens, dim, dim) / math.sqrt(dim)) for _ in range(2))
        self.bias, self.scale = nn.Parameter(torch.randn(dim)), nn.Parameter(torch.randn(tokens, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("abtk,tkn->abtn", self.norm(x), self.first) + self.bias
        h = F.silu(self.shared(h)) * self.scale
        return torch.einsum("abtk,tkn->abtn", h, self.second) + x


class Towers(nn.Module):
    """Products of the same rows beside one another: a gate, and a value that is returned."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        make = [nn.Parameter(torch.randn(tokens, dim, dim) / math.sqrt(dim)) for _ in range(3)]
        self.gate, self.value, self.out = make

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(torch.einsum("btk,tkn->btn", x, self.gate))
        value = torch.einsum("btk,tkn->btn", x, self.value)
        return torch.einsum("btk,tkn->btn", gate * value, self.out).sum(1), value


class Attention(nn.Module):
    """Queries by keys, their softmax by values: the matrices are those of a head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return (scores @ v).transpose(1, 2).flatten(2)


@pytest.mark.usefixtures("_whatever_they_cost")
@pytest.mark.parametrize("tokens", [3, 4])
def test_what_stands_between_products_of_each_token(tokens: int) -> None:
    torch.manual_seed(6)
    module, x = Mixed(tokens, 12), torch.randn(4, 5, tokens, 12, requires_grad=True)
    check_few(module, x, fused=megafuse.fuse(module, x, target="interpret"))


@pytest.mark.usefixtures("_whatever_they_cost")
def test_products_beside_one_another() -> None:
    torch.manual_seed(7)
    fused_chains(Towers(3, 20), torch.randn(41, 3, 20, requires_grad=True), walk=Walk(3, 41))


@pytest.mark.usefixtures("_whatever_they_cost")
@pytest.mark.parametrize(("rows", "keys", "width"), [(10, 10, 12), (9, 14, 8), (16, 16, 16)])
def test_softmax_between_products_of_each_head(rows: int, keys: int, width: int) -> None:
    torch.manual_seed(8)
    q = torch.randn(3, rows, 2 * width, requires_grad=True)
    k, v = (torch.randn(3, keys, 2 * width, requires_grad=True) for _ in range(2))
    fused = megafuse.fuse(Attention(2), q, k, v, target="interpret")
    check_few(Attention(2), q, k, v, fused=fused)


@pytest.mark.usefixtures("_whatever_they_cost")
def test_explain_says_how_many_problems_there_are() -> None:
    module, x = PerToken(5, [12, 20, 300, 7, 9], False, F.relu, "bmm"), torch.randn(37, 5, 12, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret")
    text = str(megafuse.explain(fused))
    assert "with 37 rows of 5 problems run as a chain" in text
    assert "its matrix of 20 x 300 is wider than 256" in text
    check_few(module, x, fused=fused)


@pytest.mark.usefixtures("_whatever_they_cost")
def test_other_batches_are_served() -> None:
    """Sizes that are open have library products, as those of one problem have."""
    torch.manual_seed(9)
    module = PerToken(4, [8, 12, 6], True, F.silu, "bmm")
    fused = megafuse.fuse(module, inputs("bmm", 4, 16, 8, torch.float32), target="interpret")
    for rows in (5, 7, 40, 1):
        x = inputs("bmm", 4, rows, 8, torch.float32)
        torch.testing.assert_close(fused(x), module(x))


# --- prices and tiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "rows"), [(16, 2048), (8, 256), (32, 64), (16, 8192)])
def test_layers_of_each_token_are_trained_in_chains(tokens: int, rows: int) -> None:
    compiled = on_meta(tokens, rows, [128, 128, 128])
    assert walks(compiled, True) == [Walk(tokens, rows)], compiled.cover.decisions
    assert Walk(tokens, rows) in walks(compiled, False), compiled.cover.decisions
    for kernel, program in zip(compiled.step.kernels, compiled.programs, strict=True):
        if kernel.chain is not None:
            chunks = -(-rows // kernel.chain.tile.rows_per_chunk)
            assert program.grid[0] == tokens * chunks
            assert chunks == 1 or tokens * chunks <= 4 * device_spec(90).sms, "two a processor run at once"


def test_their_tiles_are_subjects_of_the_tuner() -> None:
    step = on_meta(16, 2048, [128, 128, 128]).step
    chains = {k.name for k in step.kernels if k.chain is not None}
    assert chains and chains == {s.name for s in subjects(step) if s.chain is not None}


@pytest.mark.slow
@pytest.mark.usefixtures("_whatever_they_cost")
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "rows", "widths"), [(32, 2048, [128] * 3), (16, 100, [128] * 4), (200, 64, [64] * 3)]
)
def test_chains_compile_without_spills(tokens: int, rows: int, widths: list[int], dtype: str) -> None:
    compiled = on_meta(tokens, rows, widths, DTYPES[dtype])
    chains = [s for s, k in zip(compiled.artifact("triton").kernels, compiled.step.kernels, strict=True) if k.chain]
    assert len(chains) == 2
    for report in compile_offline(chains):
        assert not report.error and report.shared <= 227 * 1024
        if report.spills and triton_version() < (3, 4):
            pytest.skip("Triton before 3.4 spills some registers in backward chains of several problems")
        assert report.spills == 0
