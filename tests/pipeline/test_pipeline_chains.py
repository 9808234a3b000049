"""Chains of products through the whole pipeline, right by the rule; what splits them."""

from __future__ import annotations

import itertools
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
from megafuse.fusion.chain_cost import chain_seconds
from megafuse.fusion.epilogue import DotRule
from megafuse.ir.chain import SumDot, only_sums
from megafuse.runtime.device import target_spec
from megafuse.runtime.offline import compile_offline
from megafuse.runtime.shim import triton_version
from megafuse.schedule.types import DotCall, Launch
from pipeline_helpers import check_few, compiled_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.square(torch.relu(x))


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30.0 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "softplus": nn.Softplus,
    "softplus_beta": lambda: nn.Softplus(beta=3.0, threshold=5.0),
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "squared_relu": SquaredReLU,
    "sine": Sine,
    "identity": nn.Identity,
}


def mlp(widths: list[int], bias: bool, *between: Callable[[], nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for k, n in itertools.pairwise(widths):
        layers += [nn.Linear(k, n, bias=bias), *(make() for make in between)]
    return nn.Sequential(*layers[: -len(between)])


def fused_chain(module: nn.Module, *args: Tensor, least: int = 2) -> Compiled:
    """Fuse, check by the rule; the plan, which has at least so many chains."""
    fused = megafuse.fuse(module, *args, target="interpret")
    compiled = compiled_of(fused)
    assert sum(k.chain is not None for k in compiled.step.kernels) >= least, compiled.cover.decisions
    check_few(module, *args, fused=fused)
    return compiled


def on_meta(make: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = torch.float16) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return make().to(dtype), torch.empty(shape, dtype=dtype, requires_grad=True)


def planned(module: nn.Module, x: Tensor) -> Compiled:
    return compile_call(module, (x,), {}, target_spec(90), dots=DotRule(chain=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: str) -> None:
    torch.manual_seed(1)
    module = mlp([12, 20, 7], True, ACTIVATIONS[activation]).to(DTYPES[dtype])
    x = torch.randn(50, 12, dtype=DTYPES[dtype], requires_grad=True)
    fused_chain(module, x, least=1 if activation == "identity" else 2)  # its backward has nothing between products


@pytest.mark.parametrize("seed", range(6))
def test_random_networks(seed: int) -> None:
    """Widths from 1 to 256, rows from 2 on, depths, biases, leading dims, types."""
    draw = random.Random(seed)
    widths = [draw.choice([1, 3, 16, 37, 64, 100, 128, draw.randint(1, 256)]) for _ in range(draw.randint(3, 6))]
    rows = draw.choice([(2,), (19,), (64,), (3, 7), (2, 5, 11), (300,)])
    dtype = draw.choice(list(DTYPES.values()))
    bias, activation = draw.random() < 0.5, draw.choice(list(ACTIVATIONS))
    print(f"{seed=} {widths=} {rows=} {dtype=} {bias=} {activation=}")
    torch.manual_seed(seed)
    module = mlp(widths, bias, ACTIVATIONS[activation]).to(dtype)
    x = torch.randn(*rows, widths[0], dtype=dtype, requires_grad=draw.random() < 0.7)
    fused = megafuse.fuse(module, x, target="interpret")
    assert any(k.chain is not None for k in compiled_of(fused).step.kernels)
    check_few(module, x, fused=fused)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_between_layers(norm: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(2)
    module = mlp([24, 40, 40, 10], True, lambda: norm(40), nn.SiLU)
    compiled = fused_chain(module, torch.randn(70, 24, requires_grad=True))
    assert not any(isinstance(c, DotCall) for c in compiled.step.forward)


class Skips(nn.Module):
    """Every layer's input is added to its output; the last one also gets the first's."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = h + F.silu(layer(h))
        return h * x


def test_skip_connections() -> None:
    torch.manual_seed(3)
    fused_chain(Skips(20), torch.randn(33, 20, requires_grad=True))


class Transposed(nn.Module):
    """Weights as ``[in, out]``, several outputs, one of a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(9, 17) / 3), nn.Parameter(torch.randn(17, 5) / 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(x @ self.w1)
        return hidden, hidden @ self.w2


def test_weights_by_columns_and_hidden_outputs() -> None:
    torch.manual_seed(4)
    fused_chain(Transposed(), torch.randn(21, 9, requires_grad=True))


def test_as_many_rows_as_columns() -> None:
    """Rows and widths are told apart by how values lie, where their sizes do not tell."""
    torch.manual_seed(5)
    module = mlp([32, 32, 32, 32], False, nn.Softplus)
    fused_chain(module, torch.randn(32, 32, requires_grad=True))


def test_a_wide_layer_splits_the_chain() -> None:
    torch.manual_seed(6)
    module = mlp([16, 24, 20, 300, 12, 14], True, nn.ReLU)
    fused = megafuse.fuse(module, torch.randn(40, 16, requires_grad=True), target="interpret")
    compiled = compiled_of(fused)
    assert any(k.chain is not None for k in compiled.step.kernels)
    assert any(isinstance(c, DotCall) for c in compiled.step.forward), "the wide layer is the library's"
    text = str(megafuse.explain(fused))
    assert "run as a chain" in text and "40 rows by matrices" in text
    assert "its matrix of 20 x 300 is wider than 256" in text
    check_few(module, torch.randn(40, 16, requires_grad=True), fused=fused)


class Batched(nn.Module):
    """A norm over the batch between layers: complete only when all rows are walked."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(n, m) for n, m in ((8, 12), (12, 12), (12, 10), (10, 6)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(torch.relu(self.a(x)))
        h = h - h.mean(0, keepdim=True)
        return self.d(torch.relu(self.c(h)))


def test_sums_over_the_rows_split_the_chain() -> None:
    torch.manual_seed(7)
    compiled = fused_chain(Batched(), torch.randn(45, 8, requires_grad=True))
    dots = {c.forward: len(c.dots) for c in compiled.cover.chains}
    assert dots[True] == 2, "the first two layers, or the last two, or each for itself"


def test_thirty_layers() -> None:
    torch.manual_seed(8)
    compiled = fused_chain(mlp([8] * 31, True, nn.Tanh), torch.randn(30, 8, requires_grad=True))
    launches = [c for c in compiled.step.forward if isinstance(c, Launch)]
    assert len(launches) == 1 and len(compiled.step.forward) <= 40


def test_tiles_of_chains_are_subjects_of_the_tuner() -> None:
    step = planned(*on_meta(lambda: mlp([64] * 4, True, nn.Softplus), 4096, 64)).step
    chains = {k.name for k in step.kernels if k.chain is not None}
    assert chains and chains == {s.name for s in subjects(step) if s.chain is not None}


def test_chains_are_left_out_on_request() -> None:
    module, x = mlp([8, 8, 8], False, nn.ReLU), torch.randn(9, 8, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret", chains=False)
    assert not any(k.chain is not None for k in compiled_of(fused).step.kernels)


def softplus_layers(rows: int, train: bool) -> Compiled:
    """What the constants of the cost model were measured on."""
    module, x = on_meta(lambda: mlp([128] * 4, False, nn.Softplus), rows, 128)
    return planned(module.requires_grad_(train), x.requires_grad_(train))


@pytest.mark.parametrize(("rows", "measured"), [(64, 4.79), (1024, 5.12), (8192, 7.41), (65536, 36.2), (1 << 20, 478)])
def test_forward_chains_are_predicted_as_measured(rows: int, measured: float) -> None:
    cover = softplus_layers(rows, False).cover
    (chain,) = cover.chains
    price = chain_seconds(chain, cover.materialised, device_spec(90), {chain.dots[-1].node}) * 1e6
    assert price == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("rows", [256, 4096])
def test_few_rows_are_trained_in_chains_that_sum_on_chip(rows: int) -> None:
    """Timed on an H200 (no record), 4096 rows: 31 us with two sums on chip, 36 with none, 50 without chains."""
    compiled = softplus_layers(rows, True)
    forward, backward = compiled.cover.chains
    assert forward.forward and not backward.forward
    kept = sum(isinstance(s, SumDot) for s in backward.stages)
    assert kept >= 2
    assert kept + sum(isinstance(c, DotCall) for c in compiled.step.backward) == 3, "the others are the library's"


@pytest.mark.parametrize("rows", [65536, 1 << 20])
def test_many_rows_are_trained_in_chains_that_compute_forward_again(rows: int) -> None:
    """Times of these are in docs/results/mlp.md."""
    compiled = softplus_layers(rows, True)
    forward, backward, last = compiled.cover.chains
    assert forward.forward and backward.again & {s.node for s in forward.dots}
    assert only_sums(last) and len(last.dots) == 1, "the sum that is ready last"
    assert not any(isinstance(c, DotCall) for c in compiled.step.backward)
    tiles = [k.chain.tile for k in compiled.step.kernels if k.chain is not None]
    kinds = [(t.rows, t.num_warps, t.turned, t.early) for t in tiles]
    assert kinds == [(64, 4, False, True), (64, 8, True, True), (64, 8, False, False)]
    (said,) = [d for d in compiled.cover.decisions if "chain" in d]
    assert "with the chain of forward" in said


class Interrupted(nn.Module):
    """MLPs of the same rows with an op outside between each two."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlp([128] * 4, False, nn.Softplus) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(torch.cumsum(x, 1))
        return x


def test_each_backward_computes_its_own_forward_again() -> None:
    compiled = planned(*on_meta(lambda: Interrupted(3), 65536, 128))
    dots = [frozenset(s.node for s in c.dots) for c in compiled.cover.chains if c.forward]
    again = [c.again for c in compiled.cover.chains if not c.forward and not only_sums(c)]
    assert len(dots) == len(again) == len(set(dots)) == 3
    assert all(sum(not made.isdisjoint(values) for values in again) == 1 for made in dots)
    assert all("with the chain of forward" in d for d in compiled.cover.decisions if "chain" in d)


def test_rows_that_are_not_aligned_are_trained_in_chains() -> None:
    """Timed on an H200 (no record): 177 us in chains, 317 without, for the library is slow there."""
    module, x = on_meta(lambda: mlp([37, 100, 60, 3], True, nn.SiLU), 65536, 37, dtype=torch.bfloat16)
    assert [c.forward for c in planned(module, x).cover.chains][:2] == [True, False]


def test_matrices_that_do_not_fit_are_read_for_each_tile() -> None:
    module, x = on_meta(lambda: mlp([256] * 12, False, nn.ReLU), 65536, 256)
    compiled = planned(module.requires_grad_(False), x.requires_grad_(False))
    tiles = [k.chain.tile for k in compiled.step.kernels if k.chain is not None]
    assert tiles and not any(t.held for t in tiles)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("layers", [2, 5, 8])
@pytest.mark.parametrize(("rows", "train"), [(4096, True), (4096, False), (65536, False)])
def test_chains_compile_without_spills(
    rows: int, train: bool, layers: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16-bit chains of width 128, whatever they cost; in training, forward also stores what backward reads."""
    if layers > 2 and triton_version() < (3, 4):
        pytest.skip("Triton before 3.4 spills some registers in chains of five layers and more")
    monkeypatch.setattr("megafuse.fusion.planner.WORTH_CHAINING", -float("inf"))
    widths = [128] * (layers + 1)
    module, x = on_meta(lambda: mlp(widths, False, nn.Softplus), rows, 128, dtype=DTYPES[dtype])
    compiled = planned(module.requires_grad_(train), x.requires_grad_(train))
    chains = [s for s, k in zip(compiled.artifact("triton").kernels, compiled.step.kernels, strict=True) if k.chain]
    assert chains
    for report in compile_offline(chains):
        assert not report.error and report.spills == 0 and report.shared <= 227 * 1024


class Parts(nn.Module):
    """Two layers whose biases are parts of one parameter: their gradients are parts of one value."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)
        self.biases = nn.Parameter(torch.randn(hidden + dim))
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.silu(self.first(x) + self.biases[: self.hidden])
        return self.second(h) + self.biases[self.hidden :]


@pytest.mark.parametrize("rows", [5, 300])
def test_gradients_that_are_parts_of_one_value(rows: int) -> None:
    torch.manual_seed(0)
    module, x = Parts(24, 32), torch.randn(rows, 24, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret")
    megafuse.check(module, x, fused=fused, seeds=2).raise_if_failed()


@pytest.mark.parametrize("rows", [3, 77])
def test_layers_of_one_column(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over all rows of single values stand beside longer ones in one finisher."""
    monkeypatch.setattr("megafuse.fusion.planner.WORTH_CHAINING", -float("inf"))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 1), nn.Tanh(), nn.Linear(1, 9), nn.Tanh(), nn.Linear(9, 1))
    x = torch.randn(rows, 5, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret")
    assert any(k.chain is not None for k in compiled_of(fused).step.kernels)
    check_few(module, x, fused=fused)


def test_finishers_of_two_chains_share_a_launch() -> None:
    towers = nn.ModuleList(mlp([64] * 4, False, nn.ReLU) for _ in range(2)).to("meta", torch.bfloat16)
    xs = [torch.empty(2048, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in towers]
    both = compile_call(
        lambda a, b, towers: (towers[0](a), towers[1](b)), (*xs, towers), {}, device_spec(90), dots=DotRule(chain=True)
    )
    one = planned(towers[0], xs[0])
    chains = [sum(k.chain is not None for k in c.step.kernels) for c in (one, both)]
    assert chains[1] == 2 * chains[0] > 0
    assert len(both.step.kernels) == 2 * len(one.step.kernels) - 1
    shared = [k for k in both.step.kernels if k.apart]
    assert len(shared) == 1 and not shared[0].key
    assert all(k.key for k in both.step.kernels if k.chain is not None), "chains are tuned all the same"


EXPANDED = {
    "columns": lambda x: x[:, :1].expand(-1, 8),
    "rows": lambda x: x[:1].expand(20, -1),
    "both": lambda x: x[:1, :1].expand(20, 8),
}


@pytest.mark.parametrize("strides", EXPANDED)
@pytest.mark.parametrize("grad", [False, True])
def test_inputs_that_are_expanded(strides: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megafuse.fusion.planner.WORTH_CHAINING", -float("inf"))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = EXPANDED[strides](torch.randn(20, 8)).detach().requires_grad_(grad)
    fused = megafuse.fuse(module, x, target="interpret")
    megafuse.check(module, x, fused=fused, seeds=2).raise_if_failed()


class Tied(nn.Module):
    """Layers with one weight around what sums over all rows: its gradient waits for another sum of the same kernel."""

    def __init__(self, between: nn.Module, width: int, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)
        self.second.weight = self.first.weight
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.between(self.first(x))))


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("between", [nn.BatchNorm1d, lambda width: Centred()], ids=["batch norm", "centred"])
def test_one_weight_around_a_sum_over_all_rows(between: Callable[[int], nn.Module], width: int, bias: bool) -> None:
    torch.manual_seed(0)
    module, x = Tied(between(width), width, bias), torch.randn(24, width, requires_grad=True)
    fused = megafuse.fuse(module, x, target="interpret")
    megafuse.check(module, x, fused=fused, seeds=2).raise_if_failed()
