"""Random modules: the same everywhere, of every kind that they promise, runnable as text, and reduced well."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafuse.workloads import random_steps
from megafuse.workloads.random_modules import DTYPES, LAYOUTS, Leaf, Line, ModuleProgram
from megafuse.workloads.random_reduce import reduce_program, runs
from megafuse.workloads.random_steps import random_program

SRC = Path(__file__).resolve().parents[2] / "src"
MANY = 60


def outputs(program: ModuleProgram) -> list[Tensor]:
    module, inputs = program.make()
    made = module(*inputs)
    return list(made) if isinstance(made, tuple) else [made]


def digest(count: int) -> str:
    texts = "".join(random_program(seed, dtype).source() for seed in range(count) for dtype in DTYPES)
    return hashlib.sha256(texts.encode()).hexdigest()


def test_a_number_is_the_same_module_in_every_process() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_random_modules as t; "
    for hashing in ("1", "2"):
        env = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONHASHSEED": hashing}
        command = [sys.executable, "-c", code + "print(t.digest(12))"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
        assert done.stdout.strip() == digest(12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_modules_run_forward_and_backward(dtype: str) -> None:
    for seed in range(MANY // 2):
        made = outputs(random_program(seed, dtype))
        assert all(bool(torch.isfinite(t).all()) for t in made), seed
        torch.autograd.backward([t.float().sum() for t in made if t.requires_grad])


def test_the_text_stands_alone() -> None:
    for seed in range(10):
        program = random_program(seed, "bf16")
        names: dict[str, object] = {}
        exec(program.source(), names)
        module, inputs = names["module"], names["inputs"]
        again, same_inputs = program.make()
        assert module is not again
        for ours, theirs in zip(inputs, same_inputs, strict=True):  # type: ignore[call-overload]
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()
            assert ours.requires_grad == theirs.requires_grad
        assert [n for n, _ in module.named_parameters()] == [n for n, _ in again.named_parameters()]  # type: ignore[attr-defined]


def test_making_a_module_leaves_the_random_state() -> None:
    before = torch.random.get_rng_state()
    random_program(3).make()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_there_is_something_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Counter[str] = Counter()

    def counted(step: random_steps.Step) -> random_steps.Step:
        def run(w: random_steps.Writer, x: str) -> str | None:
            name = step(w, x)
            taken[step.__name__] += name is not None
            return name

        return run

    steps = random_steps.STEPS
    monkeypatch.setattr(random_steps, "STEPS", tuple(map(counted, steps)))
    programs = [random_program(seed, dtype) for seed in range(MANY) for dtype in DTYPES]
    assert min(taken[step.__name__] for step in steps) >= 5, taken
    leaves = [(leaf.name.removeprefix("self.")[0], leaf) for p in programs for leaf in p.leaves]
    for kind, layout in [*(("x", name) for name in LAYOUTS), ("w", "transposed")]:
        assert sum(k == kind and leaf.layout == layout for k, leaf in leaves) >= 5, (kind, layout)
    assert sum(k == "b" for k, _ in leaves) >= 10
    assert sum(k == "w" and not leaf.requires_grad for k, leaf in leaves) >= 10
    assert sum(len(p.inputs) > 1 for p in programs) >= 30
    assert sum(len(p.results) > 1 for p in programs) >= 30
    assert sum(any(c.frozen for c in p.children) for p in programs) >= 5
    assert sum(any(c.shares_weight_of for c in p.children) for p in programs) >= 1
    used = [sum(c.name in line.reads for line in p.lines) for p in programs for c in p.children]
    assert sum(n > 1 for n in used) >= 2


def test_16_bit_modules_decide_no_branch_on_rounded_values() -> None:
    """In fp32 a relu of anything is drawn; in 16-bit types only of what was not computed."""
    for seed in range(MANY):
        program = random_program(seed, "bf16")
        computed = {line.name for line in program.lines if not line.expression.startswith(("x", "self.b", "self.w"))}
        for line in program.lines:
            assert not ("F.relu" in line.expression and computed.intersection(line.reads)), program.source()
    assert any("F.relu(v" in random_program(seed).source() for seed in range(500))


# --- reduction --------------------------------------------------------------------------------------------------------


def with_a(text: str) -> ModuleProgram:
    """A module with many lines of which one holds ``text``."""
    found = (random_program(seed) for seed in range(1000))
    return next(p for p in found if len(p.lines) > 7 and any(text in line.expression for line in p.lines[2:-1]))


@pytest.mark.parametrize("text", ["F.softmax", "nn.LayerNorm", "torch.cat", "F.linear", ".transpose(-3, -2)"])
def test_reduction_ends_at_the_one_line_that_matters(text: str) -> None:
    program = with_a(text) if not text.startswith("nn.") else with_a("self.m")

    def fails(candidate: ModuleProgram) -> bool:
        return text in candidate.source()

    reduced = reduce_program(program if fails(program) else with_norm(), fails, seconds=100)
    assert fails(reduced)
    assert runs(reduced)
    assert len(reduced.lines) == 1, reduced.source()
    assert all(leaf.layout == "plain" for leaf in reduced.leaves)
    assert max((n for leaf in reduced.leaves for n in leaf.shape), default=1) <= 4


def with_norm() -> ModuleProgram:
    found = (random_program(seed) for seed in range(1000))
    return next(p for p in found if len(p.lines) > 7 and any("nn.LayerNorm" in c.text for c in p.children))


def test_reduction_keeps_what_does_not_get_smaller() -> None:
    leaf = Leaf("x0", (2,))
    program = ModuleProgram("fp32", 0, (leaf,), (), (Line("v0", "x0 * 2"),), ("v0",))
    assert reduce_program(program, lambda p: p == program, seconds=10) == program


def test_reduction_stops_when_its_time_is_over() -> None:
    program = with_a("F.softmax")
    assert reduce_program(program, lambda p: True, seconds=0.0) == program


def test_numbers_in_names_are_not_taken_for_sizes() -> None:
    lines = (Line("v3", "x3 @ self.w3 * 3.5 + 0.3"), Line("v4", "v3.reshape((3, 1))"))
    leaves = (Leaf("x3", (3, 3)), Leaf("self.w3", (3, 1)))
    program = ModuleProgram("fp32", 0, leaves, (), lines, ("v4",))
    reduced = reduce_program(program, lambda p: "@" in p.source() and "reshape" in p.source(), seconds=30)
    assert [line.expression for line in reduced.lines] == ["x3 @ self.w3 * 3.5 + 0.3", "v3.reshape((1, 1))"]
