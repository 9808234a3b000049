"""Chains of batched products: each problem's rows go through matrices of its own (per-token layers, ensembles)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import megafuse
from megafuse.compiler import Compiled, compile_call
from megafuse.core.device import device_spec
from megafuse.fusion.epilogue import DotRule
from megafuse.ir.chain import Chain, Rows, SumDot
from megafuse.runtime.offline import compile_offline
from megafuse.schedule.types import DotCall, Launch
from pipeline_helpers import check_few, compiled_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be a chain is one."""
    monkeypatch.setattr("megafuse.fusion.planner.WORTH_CHAINING", -math.inf)


class PerToken(nn.Module):
    """Layers with matrices of each token; ``form``: how they are written. Rows are ``[B, T, D]`` or ``[T, B, D]``.

    ``shared_bias``: one for all tokens, whose gradient is a sum over tokens too.
    """

    def __init__(
        self,
        tokens: int,
        widths: list[int],
        form: str,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        bias: bool = True,
        shared_bias: bool = False,
    ) -> None:
        super().__init__()
        self.form, self.activation = form, activation
        edges = list(itertools.pairwise(widths))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(tokens, k, n) / math.sqrt(k)) for k, n in edges)
        count = 1 if shared_bias else tokens
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(count, n) / 4) for _, n in edges) if bias else None

    def _layer(self, x: Tensor, number: int) -> Tensor:
        weight = self.weights[number]
        bias = None if self.biases is None else self.biases[number]
        if self.form == "einsum":
            y = torch.einsum("btk,tkn->btn", x, weight)
            return y if bias is None else y + bias
        if self.form == "baddbmm" and bias is not None:
            return torch.baddbmm(bias[:, None], x, weight)
        y = torch.bmm(x, weight) if self.form == "bmm" else x @ weight
        return y if bias is None else y + bias[:, None]

    def forward(self, x: Tensor) -> Tensor:
        for number in range(len(self.weights)):
            x = self._layer(x if number == 0 else self.activation(x), number)
        return x


def per_token(form: str, tokens: int, rows: int, widths: list[int], dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    shape = (rows, tokens, widths[0]) if form == "einsum" else (tokens, rows, widths[0])
    return PerToken(tokens, widths, form).to(dtype), torch.randn(*shape, dtype=dtype, requires_grad=True)


def chains_of(compiled: Compiled, rows: Rows) -> list[Chain]:
    return [c for c in compiled.cover.chains if c.rows == rows]


def fused_chain(module: Callable[..., Tensor], *args: Tensor, rows: Rows, least: int = 2) -> Compiled:
    """Fuse, check by the rule; the plan, which has at least so many chains of these rows."""
    fused = megafuse.fuse(module, *args, target="interpret")
    compiled = compiled_of(fused)
    assert len(chains_of(compiled, rows)) >= least, compiled.cover.decisions
    check_few(module, *args, fused=fused)
    return compiled


def planned(module: nn.Module, x: Tensor) -> Compiled:
    return compile_call(module, (x,), {}, device_spec(90), dots=DotRule(chain=True))


def on_meta(
    tokens: int, rows: int, widths: list[int], form: str = "einsum", dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        module = PerToken(tokens, widths, form).to(dtype)
        shape = (rows, tokens, widths[0]) if form == "einsum" else (tokens, rows, widths[0])
        return module, torch.empty(shape, dtype=dtype, requires_grad=True)


@pytest.mark.usefixtures("whatever_they_cost")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["einsum", "bmm", "matmul", "baddbmm"])
@pytest.mark.parametrize(("tokens", "rows", "widths"), [(3, 37, [20, 72, 33]), (5, 5, [33, 16, 16]), (2, 70, [64] * 4)])
def test_per_token_layers(form: str, tokens: int, rows: int, widths: list[int], dtype: str) -> None:
    """Tokens before and behind the rows, as many tokens as rows; gradients are sums over the rows of one token."""
    module, x = per_token(form, tokens, rows, widths, DTYPES[dtype])
    compiled = fused_chain(module, x, rows=Rows(rows, tokens))
    assert len(compiled.step.forward) <= 3 or not any(isinstance(c, DotCall) for c in compiled.step.forward)


def test_the_plan_of_per_token_layers() -> None:
    """16 tokens of 64 -> 128 -> 64: a launch forward, and backward one with the finisher of its sums."""
    compiled = planned(*on_meta(16, 4096, [64, 128, 64]))
    forward, backward = compiled.cover.chains
    assert forward.rows == backward.rows == Rows(4096, 16)
    assert sum(isinstance(s, SumDot) for s in backward.stages) == 2
    assert [sum(isinstance(c, Launch) for c in calls) for calls in (compiled.step.forward, compiled.step.backward)] == [
        1,
        2,
    ]
    assert not any(isinstance(c, DotCall) for c in (*compiled.step.forward, *compiled.step.backward))
    grids = [p.grid[0] for p, k in zip(compiled.programs, compiled.step.kernels, strict=True) if k.chain is not None]
    assert all(g % 16 == 0 and g <= 2 * device_spec(90).sms for g in grids)


def test_what_is_said_of_them() -> None:
    module, x = per_token("einsum", 3, 400, [24, 40, 24], torch.float32)
    text = str(megafuse.explain(megafuse.fuse(module, x, target="interpret")))
    assert "with 3 x 400 rows run as a chain" in text
    assert "multiplies 3 x 400 rows by matrices 24 -> 40, 40 -> 24" in text


def test_matrices_that_are_too_wide_are_the_librarys() -> None:
    compiled = planned(*on_meta(4, 2048, [64, 64, 300, 64, 64]))
    assert any("is in no chain: its matrix of 64 x 300 is wider than 256" in d for d in compiled.cover.decisions)
    assert all(s.node.shape[2] != 300 for c in compiled.cover.chains for s in c.dots)


@pytest.mark.usefixtures("whatever_they_cost")
@pytest.mark.parametrize("form", ["einsum", "bmm"])
def test_biases_of_all_tokens(form: str) -> None:
    torch.manual_seed(1)
    module = PerToken(3, [16, 24, 9], form, torch.tanh, shared_bias=True)
    x = torch.randn(*((29, 3) if form == "einsum" else (3, 29)), 16, requires_grad=True)
    compiled = fused_chain(module, x, rows=Rows(29, 3))
    assert not any(isinstance(c, DotCall) for c in (*compiled.step.forward, *compiled.step.backward))


class Heads(nn.Module):
    """Matrices of each head: heads stand between the axes of the rows, ``[B, H, S, D]``, with a norm between layers."""

    def __init__(self, heads: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(heads, dim, hidden) / math.sqrt(dim))
        self.down = nn.Parameter(torch.randn(heads, hidden, dim) / math.sqrt(hidden))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bhsd,hde->bhse", x, self.up)
        return x + torch.einsum("bhse,hed->bhsd", F.silu(self.norm(hidden)), self.down)


@pytest.mark.usefixtures("whatever_they_cost")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "heads", "length"), [(2, 3, 11), (3, 3, 3), (4, 2, 4)])
def test_problems_between_rows(batch: int, heads: int, length: int, dtype: str) -> None:
    torch.manual_seed(2)
    module = Heads(heads, 12, 20).to(DTYPES[dtype])
    x = torch.randn(batch, heads, length, 12, dtype=DTYPES[dtype], requires_grad=True)
    fused_chain(module, x, rows=Rows(batch * length, heads), least=1)


class Ensemble(nn.Module):
    """Networks of one shape side by side, on the same rows; their mean."""

    def __init__(self, count: int, widths: list[int]) -> None:
        super().__init__()
        self.layers = PerToken(count, widths, "baddbmm", F.silu)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.expand(self.count, *x.shape)).mean(0)


@pytest.mark.usefixtures("whatever_they_cost")
@pytest.mark.parametrize("dtype", DTYPES)
def test_ensembles(dtype: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(41, 10, dtype=DTYPES[dtype], requires_grad=True)
    fused_chain(Ensemble(5, [10, 32, 32, 3]).to(DTYPES[dtype]), x, rows=Rows(41, 5))


class Attention(nn.Module):
    """Softmax of one product times values: the matrices of a problem are computed, and no parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.split(self.dim, -1)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(self.dim)
        return torch.softmax(scores, -1) @ v


@pytest.mark.usefixtures("whatever_they_cost")
@pytest.mark.parametrize(("problems", "length", "dim"), [(3, 21, 10), (4, 16, 16), (2, 70, 12), (7, 7, 7)])
def test_matrices_that_are_computed(problems: int, length: int, dim: int) -> None:
    """Rows, widths and problems of one size are told apart by how they are read."""
    torch.manual_seed(4)
    x = torch.randn(problems, length, 3 * dim, requires_grad=True)
    fused_chain(Attention(dim), x, rows=Rows(length, problems), least=1)


def test_hidden_values_that_mix_tokens_split_a_chain() -> None:
    class Mixed(PerToken):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self._layer(x, 0))
            hidden = self._layer(hidden, 1)
            return self._layer(torch.relu(hidden + hidden.sum(1, keepdim=True)), 2)

    torch.manual_seed(5)
    module, x = Mixed(3, [16, 24, 24, 9], "einsum"), torch.randn(31, 3, 16, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret")
    assert all(len(c.dots) == 2 for c in compiled_of(fused).cover.chains if c.forward), "the third layer is apart"
    check_few(module, x, fused=fused)


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor, Rows]:
    """Per-token layers of any widths, forms and types."""
    tokens, rows = draw(st.integers(2, 6)), draw(st.integers(2, 40))
    widths = draw(st.lists(st.integers(2, 48), min_size=3, max_size=5))
    form = draw(st.sampled_from(["einsum", "bmm", "baddbmm"]))
    act = draw(st.sampled_from([F.gelu, torch.tanh, torch.relu, F.softplus, lambda x: x * torch.sigmoid(x)]))
    bias, shared = draw(st.booleans()), draw(st.booleans())
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    torch.manual_seed(draw(st.integers(0, 9)))
    note(f"{tokens=} {rows=} {widths=} {form=} {bias=} {shared=} {dtype=}")
    module = PerToken(tokens, widths, form, act, bias, shared).to(dtype)
    shape = (rows, tokens, widths[0]) if form == "einsum" else (tokens, rows, widths[0])
    return module, torch.randn(shape, dtype=dtype, requires_grad=draw(st.booleans())), Rows(rows, tokens)


@pytest.mark.usefixtures("whatever_they_cost")
@settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)
@given(networks())
def test_random_networks(made: tuple[nn.Module, Tensor, Rows]) -> None:
    module, x, rows = made
    fused_chain(module, x, rows=rows, least=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "rows", "widths"),
    [(16, 4096, [64, 128, 64]), (16, 256, [64, 128, 64]), (3, 37, [32, 64, 32]), (40, 61, [64] * 4)],
)
@pytest.mark.parametrize("form", ["einsum", "baddbmm"])
def test_they_compile_without_spills(
    form: str, tokens: int, rows: int, widths: list[int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megafuse.fusion.planner.WORTH_CHAINING", -math.inf)
    compiled = planned(*on_meta(tokens, rows, widths, form, DTYPES[dtype]))
    made = [s for s, k in zip(compiled.artifact("triton").kernels, compiled.step.kernels, strict=True) if k.chain]
    assert made
    for report in compile_offline(made):
        assert not report.error and report.spills == 0 and report.shared <= 227 * 1024
