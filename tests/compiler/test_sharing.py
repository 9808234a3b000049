"""Calls of many sizes share programs: how many are made, that they are right, and what happens where they cannot."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafuse
from megafuse.api import engine_of
from megafuse.compiler import NotFusedWarning, sharing
from megafuse.core.errors import CaptureError, InputError, UnsupportedError
from sharing_modules import BatchLoss, NormGate, TokenMix, check_few, differences, distance, engine, rooted

NEAR = 2e-5  # fp32 results of two orders of summation, of their largest; the rule judges some of the sizes besides
EXACT = 1e-12  # fp64 results
MOST = 3  # generations of code for any number of sizes
TABLE = torch.arange(20.0)


def inputs(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(s, requires_grad=True) for s in shapes)


Make = Callable[[int], tuple[Tensor, ...]]
CASES: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    "norm_gate": (lambda: NormGate(6), lambda n: inputs((n, 3, 6))),
    "token_mix": (lambda: TokenMix(3, 5), lambda n: inputs((n, 3, 5))),
    "batch_loss": (lambda: BatchLoss(6), lambda n: inputs((n, 6), (n,))),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("token_mix", 200), ("norm_gate", 60), ("batch_loss", 60)])
def test_many_sizes_take_three_generations(name: str, count: int) -> None:
    """Outputs and gradients are held against eager ones in fp64."""
    build, make = CASES[name]
    torch.manual_seed(0)
    rng = random.Random(name)
    module, sizes = build().double(), rng.sample(range(1, 600), count)
    calls = {n: [t.detach().double().requires_grad_() for t in make(n)] for n in sizes}
    fused = megafuse.fuse(module, *calls[sizes[0]], target="interpret")
    worst = {n: differences(module, fused, args) for n, args in calls.items()}
    assert {n: d for n, d in worst.items() if d > EXACT} == {}
    assert engine_of(fused).generations <= MOST


@pytest.mark.parametrize("name", list(CASES))
def test_sizes_share_a_program(name: str) -> None:
    build, make = CASES[name]
    torch.manual_seed(1)
    module = build()
    fused, found = engine(module, *make(9))
    for n in (9, 13, 2, 64, 31, 257):
        assert differences(module, fused, make(n)) < NEAR, n
    assert found.generations == 2 and len(found.bindings) == 2
    assert differences(module, fused, make(1)) < NEAR
    assert found.generations == 3  # one is a size of its own
    for n in (77, 300):
        check_few(module, *make(n), fused=fused)
    assert found.generations == 3


def test_a_new_size_generates_nothing_and_a_known_one_is_found() -> None:
    module = NormGate(6)
    fused, found = engine(module, *inputs((9, 3, 6)))
    fused(*inputs((13, 3, 6)))
    for n in range(20, 40):
        args = inputs((n, 3, 6))
        bound = found.bound(args, {})
        assert found.bound(args, {}) is bound
    assert found.generations == 2


def test_several_leading_dims() -> None:
    module = NormGate(6)
    fused, found = engine(module, *inputs((4, 9, 6)))
    for shape in ((7, 5), (2, 2), (30, 11), (3, 64), (17, 9)):
        assert differences(module, fused, inputs((*shape, 6))) < NEAR, shape
    assert found.generations == 2
    assert differences(module, fused, inputs((12, 6))) < NEAR  # another rank is another program
    assert found.generations == 3


def test_sizes_in_which_only_an_inner_dim_differs() -> None:
    module = NormGate(6)
    fused, found = engine(module, *inputs((4, 9, 6)))
    for size in (5, 33, 12):
        assert differences(module, fused, inputs((4, size, 6))) < NEAR
    assert found.generations == 2


def test_strided_arguments() -> None:
    fused, found = engine(torch.relu, torch.randn(5, 9, requires_grad=True).t())
    for n in (7, 20, 33):
        x = torch.randn(5, n, requires_grad=True)
        assert torch.equal(fused(x.t()), torch.relu(x.t()))
    assert found.generations == 2


def test_large_and_small_sizes_have_plans_of_their_own() -> None:
    fused, found = engine(nn.SiLU(), torch.randn(9, 1024))
    for n in (17, 40, 4096, 6000, 5000, 100):
        x = torch.randn(n, 1024)
        assert distance(fused(x), nn.functional.silu(x)) < NEAR
    assert found.generations == MOST


def test_sizes_past_32_bit_indices_have_a_program_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The border is moved to where tensors are small."""
    monkeypatch.setattr(sharing, "WIDE", 1000)
    module = NormGate(6)
    fused, found = engine(module, *inputs((9, 3, 6)))
    for n in (13, 20, 60, 500, 5):
        assert differences(module, fused, inputs((n, 3, 6))) < NEAR, n
    assert found.generations == 3
    _, narrow, wide = (b.compiled for b in found.bindings)
    assert narrow is not None and wide is not None
    texts = ["".join(k.text for k in c.artifact("triton").kernels) for c in (narrow, wide)]
    assert "int64" not in texts[0] and "n = n.to(tl.int64)" in texts[1]


@pytest.mark.parametrize("name", list(CASES))
def test_no_samples(name: str) -> None:
    """Empty outputs, and zero gradients of what is summed over the batch."""
    build, make = CASES[name]
    module = build()
    fused, found = engine(module, *make(4))
    made = found.generations
    args = make(0)
    out, want = fused(*args), module(*args)
    assert out.shape == want.shape and torch.equal(out.isnan(), want.isnan())
    got = torch.autograd.grad(out.sum(), [*args, *module.parameters()], allow_unused=True)
    expected = torch.autograd.grad(want.sum(), [*args, *module.parameters()], allow_unused=True)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None) and (a is None or (b is not None and torch.equal(a.isnan(), b.isnan())))
        assert a is None or a.isnan().any() or not a.any()
    assert found.generations == made  # nothing is generated, so nothing is launched on an empty grid


def test_other_settings_are_other_programs() -> None:
    """Calls without gradients, and of another element type, share among themselves."""
    module = NormGate(6)
    fused, found = engine(module, *inputs((9, 3, 6)))
    fused(*inputs((13, 3, 6)))
    made = found.generations
    with torch.no_grad():
        for n in (9, 20, 31):
            x = torch.randn(n, 3, 6)
            assert distance(fused(x), module(x)) < NEAR
    with torch.inference_mode():
        for n in (9, 20, 31):
            x = torch.randn(n, 3, 6)
            assert distance(fused(x), module(x)) < NEAR
    assert found.generations == made + 4


def test_double_backward_and_a_second_call_of_a_shared_size() -> None:
    module = BatchLoss(6)
    fused, _ = engine(module, *inputs((9, 6), (9,)))
    fused(*inputs((13, 6), (13,)))
    x, w = inputs((21, 6), (21,))
    (g,) = torch.autograd.grad(fused(x, w), x, create_graph=True)
    (h,) = torch.autograd.grad(module(x, w), x, create_graph=True)
    assert distance(g, h) < NEAR
    assert distance(torch.autograd.grad(g.square().sum(), w)[0], torch.autograd.grad(h.square().sum(), w)[0]) < NEAR


def test_results_that_depend_on_the_size() -> None:
    fused, found = engine(lambda x: (x * 2, x.shape[0] * 3), torch.randn(4, 5))
    for n in (6, 7, 50):
        assert fused(torch.randn(n, 5))[1] == n * 3
    assert found.generations == 2


def test_threads() -> None:
    module = NormGate(6)
    fused, found = engine(module, *inputs((9, 3, 6)))
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(8):
            n = rng.randrange(2, 90)
            x = torch.randn(n, 3, 6)
            try:
                with torch.no_grad():
                    difference = distance(fused(x), module(x))
                wrong.extend([(n, difference)] * (difference > NEAR))
            except Exception as error:
                wrong.append((n, error))

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == [] and found.generations <= 1 + 2


# --- what cannot be shared --------------------------------------------------------------------------------------------


def test_sizes_that_cannot_share_take_programs_of_their_own_up_to_a_limit() -> None:
    w = torch.rand(5)
    fused, found = engine(rooted, torch.randn(4, 5), w, max_specializations=3)
    for n in (6, 7):
        x = torch.randn(n, 5)
        assert distance(fused(x, w), rooted(x, w)) < NEAR
    assert found.generations == 3
    x = torch.randn(11, 5)
    with pytest.warns(
        NotFusedWarning, match=r"argument x has size 11 in dim 0, where it had 7; 3 programs .*no simple rule"
    ):
        assert torch.equal(fused(x, w), rooted(x, w))
    assert torch.equal(fused(x, w), rooted(x, w))  # said once
    assert found.generations == 3
    assert found.bindings[-1].reason.startswith("argument x has size 11")
    x = torch.randn(4, 5)
    assert distance(fused(x, w), rooted(x, w)) < NEAR  # known sizes keep their programs


def test_strict_refuses_where_the_limit_is_reached() -> None:
    fused, _ = engine(rooted, torch.randn(4, 5), torch.rand(5), max_specializations=1, strict=True)
    with pytest.raises(UnsupportedError, match="has size 6 in dim 0"):
        fused(torch.randn(6, 5), torch.rand(5))
    with pytest.raises(InputError, match="max_specializations"):
        megafuse.fuse(rooted, torch.randn(4, 5), torch.rand(5), target="interpret", max_specializations=0)


def branching(x: Tensor) -> Tensor:
    return torch.relu(x) * 2 if x.shape[0] > 400 else torch.tanh(x)


def test_a_branch_on_the_size_is_seen_when_sizes_go_past_it() -> None:
    """Sizes beyond those captured so far are captured before they are served by a shared program."""
    fused, found = engine(branching, torch.randn(12, 5))
    for n in (30, 50, 13, 350, 2, 500, 399):
        x = torch.randn(n, 5)
        assert distance(fused(x), branching(x)) < NEAR, n
    assert found.generations == 3


def test_a_function_that_takes_some_sizes_only() -> None:
    table = torch.randn(20, 5)
    fused, found = engine(lambda x: x + table[: x.shape[0]], torch.randn(8, 5))
    for n in (12, 19, 20, 3):
        x = torch.randn(n, 5)
        assert distance(fused(x), x + table[:n]) < NEAR
    made = found.generations
    with pytest.raises((RuntimeError, CaptureError), match="21"):  # the shared program is not for sizes past the table
        fused(torch.randn(21, 5))
    assert found.generations == made <= 4


def test_a_call_that_fails_is_no_reason_for_later_ones() -> None:
    def fn(x: Tensor) -> Tensor:
        if 20 < x.shape[0] < 30:
            raise ValueError(f"no size {x.shape[0]}")
        return torch.tanh(x) * x.shape[0] ** 0.5

    fused, _ = engine(fn, torch.randn(8, 5), max_specializations=2)
    fused(torch.randn(12, 5))
    for rows in (21, 25):
        with pytest.raises(ValueError, match=f"no size {rows}"):
            fused(torch.randn(rows, 5))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (31, 40, 47):
            x = torch.randn(rows, 5)
            assert distance(fused(x), fn(x)) < NEAR
    (message,) = [str(w.message) for w in said]
    assert "no simple rule" in message
    assert "captured at" not in message


def test_values_without_elements_inside_of_a_call_are_said() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x), torch.sin(x[:, 3:3])

    x = torch.randn(4, 5)
    with pytest.warns(NotFusedWarning, match=r"a value computed in the call .* is empty"):
        fused = megafuse.fuse(fn, x, target="interpret")
    assert torch.equal(fused(x)[0], fn(x)[0])
    with pytest.raises(UnsupportedError, match=r"a value computed in the call .* is empty"):
        megafuse.fuse(fn, x, target="interpret", strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert megafuse.fuse(torch.tanh, x, target="interpret", strict=True)(x[:0]).shape == (0, 5)


def test_a_slice_that_ends_with_its_source_at_some_sizes() -> None:
    """Python cuts slices short; a program for sizes up to the table's must not read past it."""
    fused, found = engine(lambda x: x.sum() + TABLE[: x.shape[0]], torch.randn(8))
    for n in (12, 19, 21, 25, 20, 5, 40):
        x = torch.randn(n)
        assert distance(fused(x), x.sum() + TABLE[:n]) < NEAR, n
    assert found.generations <= 6


@pytest.mark.parametrize("branch", [lambda n: n % 4 == 0, lambda n: n == 7, lambda n: 20 < n < 24, lambda n: n & 8])
def test_python_that_branches_on_a_size_is_seen_at_every_size(branch) -> None:
    def by_size(x: torch.Tensor) -> torch.Tensor:
        return x * 3 if branch(x.shape[0]) else x * 1

    fused = megafuse.fuse(by_size, torch.randn(3, 4), target="interpret", max_specializations=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotFusedWarning)
        for rows in (11, *range(2, 26)):
            x = torch.randn(rows, 4)
            assert torch.equal(fused(x), by_size(x)), rows


def test_the_limit_of_programs_is_said_once() -> None:
    fused = megafuse.fuse(
        lambda x: x * x.shape[0] ** 0.5 * (x.shape[0] % 7), torch.randn(3, 4), target="interpret", max_specializations=2
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in range(2, 12):
            fused(torch.randn(rows, 4))
    assert len([w for w in said if issubclass(w.category, NotFusedWarning)]) == 1
