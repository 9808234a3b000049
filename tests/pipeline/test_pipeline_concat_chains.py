"""Chains with concats between layers, with cut products, and with residual connections."""

from __future__ import annotations

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
from megafuse.runtime.offline import compile_offline
from megafuse.schedule.types import DotCall, Launch
from pipeline_helpers import check_few, compiled_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be a chain is one."""
    monkeypatch.setattr("megafuse.fusion.planner.WORTH_CHAINING", -math.inf)


class Radiance(nn.Module):
    """As in radiance fields: a layer in the middle reads the input once more, before or behind what is hidden."""

    def __init__(self, dim: int, hidden: int, out: int, first: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, hidden), nn.Linear(hidden + dim, hidden)
        self.c, self.first = nn.Linear(hidden, out), first

    def forward(self, x: Tensor) -> Tensor:
        h = F.softplus(self.a(x))
        h = F.softplus(self.b(torch.cat([x, h] if self.first else [h, x], -1)))
        return self.c(h)


class Features(nn.Module):
    """Several inputs side by side, some computed on; they and earlier layers are read again by later ones."""

    def __init__(self, dims: tuple[int, int, int], hidden: int, out: int) -> None:
        super().__init__()
        self.a = nn.Linear(sum(dims), hidden)
        self.b = nn.Linear(hidden + sum(dims), hidden, bias=False)
        self.c = nn.Linear(2 * hidden, out)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        inputs = torch.cat([x, torch.tanh(y), z], -1)
        h = torch.relu(self.a(inputs))
        second = F.gelu(self.b(torch.cat([inputs, h], -1)))
        return self.c(torch.cat([h, second], -1))


class Dense(nn.Module):
    """Each layer reads all before it."""

    def __init__(self, dim: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim + n * growth, growth) for n in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.silu(layer(x))], -1)
        return x


class Gated(nn.Module):
    """Gate and value are the halves of one product."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Residual(nn.Module):
    """Widths change between residual blocks; one skip spans two of them."""

    def __init__(self, dim: int, hidden: int, out: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.c, self.d, self.skip = nn.Linear(dim, out), nn.Linear(out, out), nn.Linear(dim, out)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.b(F.gelu(self.a(x)))
        h = self.skip(x) + F.silu(self.c(h))
        return h + torch.tanh(self.d(h))


class TokenSkips(nn.Module):
    """Matrices of each token, ``[B, T, D]``; the input is read once more."""

    def __init__(self, tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(tokens, dim, hidden) / math.sqrt(dim))
        self.b = nn.Parameter(torch.randn(tokens, hidden + dim, dim) / math.sqrt(hidden + dim))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(torch.einsum("btd,tdh->bth", x, self.a))
        return torch.einsum("bth,thd->btd", torch.cat([h, x], -1), self.b)


CASES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "radiance": (lambda: Radiance(12, 20, 7), [(50, 12)]),
    "radiance_odd": (lambda: Radiance(33, 64, 3, first=True), [(37, 33)]),
    "features": (lambda: Features((5, 9, 3), 24, 7), [(41, 5), (41, 9), (41, 3)]),
    "features_rows": (lambda: Features((16, 1, 20), 33, 1), [(3, 7, 16), (3, 7, 1), (3, 7, 20)]),
    "dense": (lambda: Dense(10, 7, 4), [(60, 10)]),
    "gated": (lambda: Gated(20, 33), [(37, 20)]),
    "residual": (lambda: Residual(20, 72, 33), [(37, 20)]),
    "tokens": (lambda: TokenSkips(3, 20, 33), [(37, 3, 20)]),
}


def fused_chain(module: nn.Module, *args: Tensor) -> Compiled:
    fused = megafuse.fuse(module, *args, target="interpret")
    compiled = compiled_of(fused)
    assert compiled.cover.chains, compiled.cover.decisions
    check_few(module, *args, fused=fused)
    return compiled


@pytest.mark.usefixtures("whatever_they_cost")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_one_launch_forward_and_one_chain_back(name: str, dtype: str) -> None:
    make, shapes = CASES[name]
    torch.manual_seed(0)
    module = make().to(DTYPES[dtype])
    compiled = fused_chain(module, *(torch.randn(*s, dtype=DTYPES[dtype], requires_grad=True) for s in shapes))
    if name != "dense":  # whose concat of a concat is an output too
        assert [c.forward for c in compiled.cover.chains] == [True, False]
        assert sum(isinstance(c, Launch) for c in compiled.step.forward) == 1
        assert not any(isinstance(c, DotCall) for c in compiled.step.forward)


@pytest.mark.usefixtures("whatever_they_cost")
def test_a_concat_has_no_memory() -> None:
    module, x = Radiance(12, 20, 7), torch.randn(50, 12)
    compiled = fused_chain(module.requires_grad_(False), x)
    shapes = [b.shape for b in compiled.step.buffers if b.kind not in ("param", "input")]
    assert all(32 not in shape for shape in shapes), shapes


@pytest.mark.usefixtures("whatever_they_cost")
def test_products_and_flops_are_counted_once() -> None:
    """A product whose columns are read apart is made in cuts."""
    module, x = Gated(16, 24), torch.randn(40, 16)
    (plan,) = megafuse.explain(megafuse.fuse(module.requires_grad_(False), x, target="interpret")).plans
    (call,) = plan.calls
    assert call.product == "40 rows by matrices 16 -> 48, 24 -> 16"
    assert call.flops == 2 * 40 * (16 * 48 + 24 * 16)


def test_a_concat_of_rows_is_none_for_a_chain() -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(torch.cat([x, y], 0))))

    module = Stacked()
    x, y = torch.randn(20, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    check_few(module, x, y, fused=megafuse.fuse(module, x, y, target="interpret"))


@pytest.mark.usefixtures("whatever_they_cost")
def test_columns_that_overlap_are_read_from_memory() -> None:
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 24), nn.Linear(16, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.c(torch.tanh(self.b(h[:, :16]) * h[:, 8:] + h[:, 4:20]))

    torch.manual_seed(1)
    fused_chain(Overlapping(), torch.randn(40, 8, requires_grad=True))


class Drawn(nn.Module):
    """Random layers; what each reads is drawn from all values before: sums of two, concats, halves."""

    def __init__(self, plan: list[tuple[str, int, int, int]], dim: int) -> None:
        super().__init__()
        self.plan, self.layers = plan, nn.ModuleList()
        widths = [dim]
        for kind, i, j, width in plan:
            a, b = widths[i % len(widths)], widths[j % len(widths)]
            inner = a + b if kind == "cat" else (a + 1) // 2 if kind == "half" else a
            self.layers.append(nn.Linear(inner, width))
            widths.append(width)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, (kind, i, j, _) in zip(self.layers, self.plan, strict=True):
            a, b = values[i % len(values)], values[j % len(values)]
            if kind == "cat":
                a = torch.cat([a, b], -1)
            elif kind == "half":
                a = a[..., : (a.shape[-1] + 1) // 2]
            elif kind == "add" and a.shape == b.shape:
                a = a + b
            values.append(F.silu(layer(a)))
        return values[-1]


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    layer = st.tuples(
        st.sampled_from(["cat", "add", "half", "plain"]), st.integers(0, 5), st.integers(0, 5), st.integers(2, 40)
    )
    plan, dim, rows = draw(st.lists(layer, min_size=2, max_size=5)), draw(st.integers(2, 40)), draw(st.integers(3, 50))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    note(f"{plan=} {dim=} {rows=} {dtype=}")
    torch.manual_seed(draw(st.integers(0, 9)))
    return Drawn(plan, dim).to(dtype), torch.randn(rows, dim, dtype=dtype, requires_grad=True)


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
def test_random_networks(made: tuple[nn.Module, Tensor]) -> None:
    module, x = made
    check_few(module, x, fused=megafuse.fuse(module, x, target="interpret"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("rows", [300, 4096])
@pytest.mark.parametrize("train", [False, True])
def test_they_compile_without_spills(rows: int, train: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megafuse.fusion.planner.WORTH_CHAINING", -math.inf)
    with torch.device("meta"):
        module = Radiance(32, 64, 16).to(DTYPES[dtype]).requires_grad_(train)
        x = torch.empty(rows, 32, dtype=DTYPES[dtype], requires_grad=train)
    compiled = compile_call(module, (x,), {}, device_spec(90), dots=DotRule(chain=True))
    made = [s for s, k in zip(compiled.artifact("triton").kernels, compiled.step.kernels, strict=True) if k.chain]
    assert made
    for report in compile_offline(made):
        assert not report.error and report.spills == 0 and report.shared <= 227 * 1024
