"""Steps by graphs, with a recorder that runs the work again and writes its results over the first ones."""

from __future__ import annotations

import gc
import threading
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graph_fakes import FakeRecorder
from megafuse.runtime import graphs
from megafuse.runtime.autograd import StepSpec, apply
from megafuse.runtime.graphs import Budget, GraphedStep, graphed
from runtime_examples import host_spec, original, square_inputs, square_spec


def graphed_square(**options: Any) -> tuple[StepSpec, FakeRecorder, GraphedStep]:
    spec, recorder = square_spec(4, 3, 5, **options), FakeRecorder()
    step = GraphedStep(spec.step, recorder, Budget())
    return replace(spec, step=step), recorder, step


def gradients(spec: StepSpec, inputs: list[Tensor], g: Tensor) -> tuple[Tensor, ...]:
    (y,) = apply(spec, *inputs)
    return (y.detach(), *torch.autograd.grad(y, inputs, g))


def expected(inputs: list[Tensor], g: Tensor) -> tuple[Tensor, ...]:
    (y,) = original(*inputs)
    return (y.detach(), *torch.autograd.grad(y, inputs, g))


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def test_steps_are_recorded_after_the_warm_up_and_replayed_on_new_inputs() -> None:
    spec, recorder, step = graphed_square()
    _, w, b = square_inputs(4, 3, 5)
    for number in range(6):
        x, g = torch.randn(4, 3, requires_grad=True), torch.randn(4, 5)
        assert same(gradients(spec, [x, w, b], g), expected([x, w, b], g))
        assert recorder.recorded == (2 if number >= graphs.WARM_UP else 0)
        del x
    assert recorder.replays == 8
    assert [n for n, _ in step.recorded.fixed] == [1, 2]


def test_what_the_caller_holds_is_never_written_again() -> None:
    spec, recorder, step = graphed_square()
    inputs = square_inputs(4, 3, 5)
    held = []
    for number in range(6):
        g = torch.full((4, 5), float(number + 1))
        held.append((gradients(spec, inputs, g), expected(inputs, g)))
        with torch.no_grad():
            inputs[1].add_(0.5)  # parameters are read where they are
    assert recorder.replays > 0
    assert all(same(found, wanted) for found, wanted in held)
    assert step.recorded.copied == []


def test_a_backward_still_to_come_keeps_what_its_forward_saved() -> None:
    spec, recorder, _ = graphed_square()
    inputs, other = square_inputs(4, 3, 5), square_inputs(4, 3, 5)
    g = torch.randn(4, 5)
    for _ in range(4):
        gradients(spec, inputs, g)
    before = recorder.replays
    with torch.no_grad():
        other[0].mul_(3)
    (first,) = apply(spec, *inputs)
    second = [apply(spec, *inputs)[0] for _ in range(2)]
    assert recorder.replays == before + 1, "only the first is a replay"
    for y in (*second, first):
        assert same(torch.autograd.grad(y, inputs, g), expected(inputs, g)[1:])
    assert recorder.replays == before + 2
    gradients(spec, inputs, g)
    assert recorder.replays == before + 4


def test_a_kept_graph_gives_its_gradients_twice() -> None:
    spec, recorder, _ = graphed_square()
    inputs, g = square_inputs(4, 3, 5), torch.randn(4, 5)
    for _ in range(4):
        gradients(spec, inputs, g)
    (y,) = apply(spec, *inputs)
    before = recorder.replays
    for scale in (1.0, 2.0):
        found = torch.autograd.grad(y, inputs, scale * g, retain_graph=True)
        apply(spec, *inputs)  # must not write over what y still needs
        assert same(found, expected(inputs, scale * g)[1:])
    assert recorder.replays == before + 2
    del y, found
    gc.collect()
    gradients(spec, inputs, g)
    assert recorder.replays == before + 4


def test_a_forward_that_is_dropped_lets_the_next_one_replay() -> None:
    spec, recorder, _ = graphed_square()
    inputs = square_inputs(4, 3, 5)
    for _ in range(3):
        gradients(spec, inputs, torch.ones(4, 5))
    before = recorder.replays
    for _ in range(3):
        apply(spec, *inputs)
    assert recorder.replays == before + 3


def test_calls_without_gradients_are_replayed_too() -> None:
    spec, recorder, _ = graphed_square()
    inputs = square_inputs(4, 3, 5)
    with torch.no_grad():
        found = [apply(spec, *inputs)[0] for _ in range(6)]
    assert recorder.replays == 4
    assert len({t.data_ptr() for t in found}) == 6
    assert all(torch.allclose(t, original(*inputs)[0], atol=1e-5) for t in found)


def test_an_input_that_moves_is_copied_from_then_on() -> None:
    spec, recorder, step = graphed_square()
    x, w, b = square_inputs(4, 3, 5)
    g = torch.ones(4, 5)
    for _ in range(4):
        gradients(spec, [x, w, b], g)
    assert len(step.recorded.fixed) == 3
    for _ in range(3):
        new = torch.randn(4, 3, requires_grad=True)
        assert same(gradients(spec, [new, w, b], g), expected([new, w, b], g))
    assert recorder.recorded == 4
    assert [n for n, _ in step.recorded.copied] == [0]
    moved = [t.detach().clone().requires_grad_() for t in (w, b)]
    for _ in range(2):
        assert same(gradients(spec, [x, *moved], g), expected([x, *moved], g))
    assert recorder.recorded == 6
    assert step.recorded.fixed == []


def test_the_graphs_own_buffer_is_not_copied_onto_itself() -> None:
    spec, _, step = graphed_square()
    _, w, b = square_inputs(4, 3, 5)
    for _ in range(4):
        x = torch.randn(4, 3, requires_grad=True)
        gradients(spec, [x, w, b], torch.ones(4, 5))
    ((_, buffer),) = step.recorded.copied
    version = buffer._version
    with torch.no_grad():
        apply(spec, buffer, w, b)
        assert buffer._version == version
        apply(spec, x, w, b)
    assert buffer._version == version + 1


class _Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_other_streams_captures_and_modes_run_without_the_graph() -> None:
    spec, recorder, _ = graphed_square()
    inputs, g = square_inputs(4, 3, 5), torch.ones(4, 5)
    for _ in range(4):
        gradients(spec, inputs, g)
    before = recorder.replays
    recorder.current = 1
    assert same(gradients(spec, inputs, g), expected(inputs, g))
    recorder.current, recorder.capturing = 0, True
    assert same(gradients(spec, inputs, g), expected(inputs, g))
    recorder.capturing = False
    with _Looking():
        gradients(spec, inputs, g)
    assert recorder.replays == before
    gradients(spec, inputs, g)
    assert recorder.replays == before + 2


def test_threads_do_not_share_what_is_saved() -> None:
    spec, _, _ = graphed_square()
    inputs, g = square_inputs(4, 3, 5), torch.ones(4, 5)
    for _ in range(4):
        gradients(spec, inputs, g)
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        mine = [x, *(t.detach().clone().requires_grad_() for t in inputs[1:])]
        wanted = expected(mine, g)
        wrong.extend(seed for _ in range(20) if not same(gradients(spec, mine, g), wanted))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_cannot_be_recorded_says_so_once_and_runs() -> None:
    spec, recorder, step = graphed_square()
    inputs, g = square_inputs(4, 3, 5), torch.ones(4, 5)

    def record(work: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    recorder.record = record
    for _ in range(2):
        gradients(spec, inputs, g)
    with pytest.warns(UserWarning, match="cannot be recorded: RuntimeError: operation not permitted") as caught:
        found = gradients(spec, inputs, g)
    assert same(found, expected(inputs, g))
    assert "more" not in str(caught[0].message)
    assert same(gradients(spec, inputs, g), expected(inputs, g))  # a second warning would be an error
    assert step.recorded is None


def test_outputs_that_are_memory_of_an_input_are_left_alone() -> None:
    text = "def forward(inputs):\n    x = inputs[0]\n    return [x.t()], []\n"
    spec = host_spec(text, num_inputs=1, differentiable=(True,))
    spec = replace(spec, step=GraphedStep(spec.step, FakeRecorder(), Budget()))
    x = torch.randn(2, 3)
    with pytest.warns(UserWarning, match="memory of an input"):
        found = [apply(spec, x)[0] for _ in range(4)]
    assert all(t.data_ptr() == x.data_ptr() for t in found)


def test_memory_that_backward_writes_over_gets_no_graph() -> None:
    spec, recorder, _ = graphed_square(in_place=True)
    inputs, g = square_inputs(4, 3, 5), torch.ones(4, 5)
    for _ in range(5):
        assert same(gradients(spec, inputs, g), expected(inputs, g))
    assert recorder.recorded == 0


def test_a_missing_tangent_is_zero() -> None:
    spec, _, step = graphed_square()
    inputs, g = square_inputs(4, 3, 5), torch.ones(4, 5)
    for _ in range(4):
        gradients(spec, inputs, g)
    with torch.no_grad():
        _, saved = step.forward([*inputs])
        assert all(t.eq(0).all() for t in step.backward(saved, [None]))


def test_the_number_of_graphs_has_a_limit() -> None:
    budget = Budget(1)
    inputs = square_inputs(4, 3, 5)
    recorders = [FakeRecorder() for _ in range(3)]
    specs = [square_spec(4, 3, 5) for _ in recorders]
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for spec, recorder in zip(specs, recorders, strict=True):
            made = replace(spec, step=GraphedStep(spec.step, recorder, budget))
            for _ in range(4):
                apply(made, *inputs)
    assert [r.recorded for r in recorders] == [2, 0, 0]
    assert len(caught) == 1 and "graphs were recorded" in str(caught[0].message)


def test_on_the_cpu_there_are_no_graphs() -> None:
    step = square_spec(4, 3, 5).step
    with pytest.warns(UserWarning, match="on the CPU"):
        assert graphed(step, Budget()) is step


def test_copies_keep_what_is_one_tensor_and_what_is_none() -> None:
    a, b = torch.randn(3, 4).t(), torch.ones(2, dtype=torch.bfloat16)
    one, none, two, again = graphs.Copier([a, None, b, a])()
    assert none is None and one is again
    assert one.stride() == a.stride() and torch.equal(one, a) and torch.equal(two, b)
    assert one.data_ptr() != a.data_ptr()
    wide = a[:1].expand(5, 3)
    (found,) = graphs.Copier([wide])()
    assert torch.equal(found, wide) and found.is_contiguous()
    assert graphs.Copier()() == []
