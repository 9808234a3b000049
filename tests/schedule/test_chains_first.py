"""What programs of one tile load before they work, of real networks: what is counted is what is loaded, and fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from megafuse.codegen.chain_loads import first_loads
from megafuse.codegen.chain_program import ChainProgram
from megafuse.codegen.triton.chain import print_chain
from megafuse.compiler.driver import Compiled, compile_call
from megafuse.core.device import DeviceSpec, device_spec
from megafuse.fusion.epilogue import DotRule
from megafuse.runtime.device import target_spec
from megafuse.runtime.offline import compile_offline
from megafuse.schedule import chains
from megafuse.schedule.chain_tile import ChainTile
from megafuse.schedule.chain_tiling import Beside, ChainRequest, choose_chain_tile

AT_ONCE = replace(device_spec(90), stores_at_once=True)
FIVE, MIXED = [128] * 6, [64, 128, 128, 64, 128, 64]


class Tied(nn.Module):
    """A matrix, its transpose, its halves side by side, and another."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.last = nn.Parameter(torch.empty(128, 128)), nn.Parameter(torch.empty(64, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(torch.relu(x @ self.tied) @ self.tied.t())
        return torch.relu(torch.relu(h @ self.tied[:, :64]) @ self.last) + torch.relu(h @ self.tied[:, 64:]) @ self.last


def planned(
    module: nn.Module, rows: int, width: int, device: DeviceSpec = AT_ONCE, *, train: bool = True
) -> list[tuple[ChainProgram, Compiled]]:
    """The chains of a network in fp16, of forward first."""
    module = module.to("meta", torch.float16).requires_grad_(train)
    x = torch.empty(rows, width, dtype=torch.float16, device="meta", requires_grad=train)
    compiled = compile_call(module, (x,), {}, device, dots=DotRule(chain=True))
    return [(p, compiled) for p in compiled.programs if isinstance(p, ChainProgram)]


def mlp(widths: list[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*[layer for k, n in pairs for layer in (nn.Linear(k, n), activation())][:-1])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ChainRequest]:
    """For what tiles were chosen."""
    found: list[ChainRequest] = []

    def choose(request: ChainRequest, device: DeviceSpec) -> ChainTile:
        found.append(request)
        return choose_chain_tile(request, device)

    monkeypatch.setattr(chains, "choose_chain_tile", choose)
    return found


def loaded(program: ChainProgram) -> int:
    """Bytes of a row that are loaded first."""
    return sum(row.load.dtype.size * row.phase.pieces[0] for row in first_loads(program)[0])


def test_what_lies_beside_matrices_in_a_backward_chain(asked: list[ChainRequest]) -> None:
    """Of ReLU: the gradient and an activation, then one more with each layer; a sum's operand is spent."""
    planned(mlp(FIVE), 1024, 128)
    assert asked[-1].beside == tuple(Beside(128 * n, 128 * (n - 1), 256 * n) for n in (2, 3, 4, 5, 6))
    planned(mlp(FIVE, nn.Softplus), 1024, 128)
    four = Beside(640, 512, 256 * 5 + 256 * 4)  # what is loaded for derivatives, and activations made of it
    assert asked[-1].beside == (four, four, four, four, Beside(768, 640, four.rows + 256))


@pytest.mark.parametrize("widths", [FIVE, MIXED], ids=["equal", "mixed"])
def test_the_rows_that_are_loaded_first_are_those_counted(widths: list[int], asked: list[ChainRequest]) -> None:
    _, (backward, _) = planned(mlp(widths), 1024, widths[0])
    for first, there in enumerate(asked[-1].beside, start=1):
        program = replace(backward, first=first)
        rows, products = first_loads(program)
        assert (loaded(program), len(products)) == (there.rows, first)
        text = print_chain(program).text
        before = text[text.rindex("def ") : text.index("tl.dot(", text.rindex("def "))]
        assert before.count("= tl.load(") == len(rows) + len(products)
    assert first_loads(replace(backward, first=0)) == ([], [])


def test_a_matrix_and_its_transpose_are_one_and_parts_of_one_are_several(asked: list[ChainRequest]) -> None:
    ((program, _),) = planned(Tied(), 1024, 128, train=False)
    assert len(asked[-1].matrices) == 4
    for first in range(1, 5):
        _, products = first_loads(replace(program, first=first))
        assert [p.held[0].shape for p in products] == list(asked[-1].matrices[:first])
    text = print_chain(replace(program, first=4)).text
    assert text[: text.index("tl.dot(")].count("= tl.load(") == text.count("= tl.load(") == 5, "each once, and the rows"


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU, nn.Softplus])
@pytest.mark.parametrize(("rows", "first"), [(256, 4), (600, 4), (1024, 4), (4096, 3)])
def test_five_layers_fit(rows: int, first: int, activation: Callable[[], nn.Module], asked: list[ChainRequest]) -> None:
    (forward, _), (backward, _) = planned(mlp(FIVE, activation), rows, 128)
    assert (forward.first, backward.first) == (5, first)
    there, tile = asked[-1].beside[first - 1], 2 * backward.row_tile
    need = first * 2 * 128 * 128 + max(tile * there.most, tile * there.after + 4 * 128 * 128)
    assert need <= AT_ONCE.shared_per_block


@pytest.mark.parametrize(("rows", "narrow"), [(600, True), (1024, True), (4096, False)])
def test_what_is_loaded_first_compiles_to_what_fits(rows: int, narrow: bool) -> None:
    pytest.importorskip("triton")
    device = replace(target_spec(90), narrow_tiles=narrow)
    found = planned(mlp(FIVE), rows, 128, device)
    sources = [compiled.artifact("triton").kernels[compiled.programs.index(p)] for p, compiled in found if p.first]
    assert sources
    for report in compile_offline(sources):
        assert (report.error, report.spills) == ("", 0)
        assert report.shared <= device.shared_per_block


@pytest.mark.parametrize("device", [replace(AT_ONCE, loads_first=False), device_spec(80)], ids=["faulty", "sm_80"])
def test_nothing_is_loaded_first_where_that_is_faulty_or_registers_are_full(device: DeviceSpec) -> None:
    assert [p.first for p, _ in planned(mlp([128] * 4), 4096, 128, device)] == [0, 0, 0][: 2 + (device.arch < 90)]


def test_tiles_of_few_rows_that_are_not_turned_load_nothing_first() -> None:
    forward, backward = planned(mlp([128] * 4), 4096, 128, replace(AT_ONCE, narrow_tiles=False))
    assert (forward[0].turned, forward[0].row_tile, forward[0].first) == (False, 32, 0)
    assert (backward[0].turned, backward[0].first) == (True, 3)
