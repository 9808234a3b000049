from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megafuse.core.dtypes import DType
from megafuse.core.errors import LaunchError
from megafuse.runtime.autograd import apply
from runtime_examples import host_spec, original, square_inputs, square_spec

SHAPE = (6, 5, 3)


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def reference(inputs: list[torch.Tensor], tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    (y,) = original(*inputs)
    return y, *torch.autograd.grad(y, inputs, tangent.to(y.dtype))


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64, DType.F16, DType.BF16])
def test_forward_and_backward_agree_with_eager(dtype: DType) -> None:
    torch_dtype = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}[
        dtype.value
    ]
    inputs = square_inputs(*SHAPE, torch_dtype)
    (y,) = apply(square_spec(*SHAPE, dtype), *inputs)
    tangent = torch.randn(y.shape).to(torch_dtype)
    y.backward(tangent)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = reference(wide, tangent.double())
    tolerance = {"f64": 1e-6, "f32": 1e-5, "f16": 1e-2, "bf16": 1e-1}[dtype.value]
    for found, wanted in zip((y, *(t.grad for t in inputs)), expected, strict=True):
        assert found.dtype is torch_dtype
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_gradients_are_taken_over_without_a_copy() -> None:
    spec, inputs = square_spec(*SHAPE), square_inputs(*SHAPE)
    returned: list[int] = []
    inner = spec.step.backward

    def spy(saved, tangents):
        grads = inner(saved, tangents)
        returned.extend(g.data_ptr() for g in grads)
        return grads

    spec.step.backward = spy
    (y,) = apply(spec, *inputs)
    with Log() as log:
        y.backward(torch.ones_like(y))
    assert [t.grad.data_ptr() for t in inputs] == returned
    assert not {"clone", "copy_", "_to_copy"} & set(log.ops)
    assert [t.grad.stride() for t in inputs] == [t.stride() for t in inputs]


def test_in_place_change_of_a_saved_input_raises_as_in_eager() -> None:
    inputs = square_inputs(*SHAPE)
    (y,) = apply(square_spec(*SHAPE), *inputs)
    with torch.no_grad():
        inputs[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_change_of_an_input_that_is_not_saved_is_allowed() -> None:
    inputs = square_inputs(*SHAPE)
    (y,) = apply(square_spec(*SHAPE), *inputs)
    with torch.no_grad():
        inputs[2].mul_(2)
    y.sum().backward()


@pytest.mark.parametrize("in_place", [False, True])
def test_retain_graph(in_place: bool) -> None:
    inputs = square_inputs(*SHAPE)
    (y,) = apply(square_spec(*SHAPE, in_place=in_place), *inputs)
    tangent = torch.randn(y.shape)
    runs = [torch.autograd.grad(y, inputs, tangent, retain_graph=keep) for keep in (True, True, False)]
    expected = reference(inputs, tangent)[1:]
    for grads in runs:
        for found, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, inputs, tangent)


@pytest.mark.parametrize("keep_inputs", [False, True])
def test_double_backward(keep_inputs: bool) -> None:
    spec = square_spec(*SHAPE, DType.F64, keep_inputs=keep_inputs)
    inputs = square_inputs(*SHAPE, torch.float64)
    assert torch.autograd.gradcheck(lambda *t: apply(spec, *t), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: apply(spec, *t), inputs)


def test_double_backward_when_one_input_comes_from_another() -> None:
    spec, (_, w, b) = square_spec(5, 5, 5, DType.F64), square_inputs(5, 5, 5, torch.float64)

    def penalty(step) -> tuple[torch.Tensor, ...]:
        h = torch.tanh(w)
        (y,) = step(h, w, b)
        grads = torch.autograd.grad(y.sin().sum(), (h, w, b), create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in grads), (w, b))

    for found, wanted in zip(penalty(lambda *t: apply(spec, *t)), penalty(original), strict=True):
        torch.testing.assert_close(found, wanted)


def test_double_backward_says_which_input_is_gone() -> None:
    spec, (x, w, b) = square_spec(*SHAPE), square_inputs(*SHAPE)
    (y,) = apply(spec, x, w, b * 2)
    with pytest.raises(LaunchError, match="input 2 of the fused step, which no longer exists"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    (y,) = apply(square_spec(*SHAPE, keep_inputs=True), x, w, b * 2)
    assert torch.autograd.grad(y.sum(), x, create_graph=True)[0].requires_grad


def test_no_grad_and_inference_mode_keep_nothing() -> None:
    spec, inputs = square_spec(*SHAPE), square_inputs(*SHAPE)
    kept: list[weakref.ref] = []
    inner = spec.step.forward

    def spy(given):
        outputs, saved = inner(given)
        kept.append(weakref.ref(saved[2]))
        return outputs, saved

    spec.step.forward = spy
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            (y,) = apply(spec, *inputs)
        assert not y.requires_grad
    gc.collect()
    assert all(ref() is None for ref in kept)
    torch.testing.assert_close(y.clone(), original(*inputs)[0].detach())


def test_saved_tensors_die_in_backward_unless_the_graph_is_kept() -> None:
    spec, inputs = square_spec(*SHAPE), square_inputs(*SHAPE)
    died: list[bool] = []
    inner = spec.step.backward

    def spy(saved, tangents):
        ref = weakref.ref(saved[2])
        grads = inner(saved, tangents)
        died.append(ref() is None)
        return grads

    spec.step.backward = spy
    (y,) = apply(spec, *inputs)
    y.sum().backward()
    assert died == [True]


def test_only_the_wanted_outputs_require_grad_and_missing_tangents_are_zeros() -> None:
    text = """
def forward(inputs):
    x = inputs[0]
    inputs.clear()
    return [x * 2, x + 1, x * 5], [x]

def backward(saved, tangents):
    dy = arrange(tangents[0], (3,), (1,), f32)
    dz = arrange(tangents[1], (3,), (1,), f32)
    saved.clear()
    tangents.clear()
    return [2 * dy + dz, None]
"""
    spec = host_spec(text, num_inputs=2, differentiable=(True, False, True), tangent_of=(0, 2), grad_of=(0, 1))
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    y, n, z = apply(spec, x, w)
    assert [t.requires_grad for t in (y, n, z)] == [True, False, True]
    y.sum().backward(retain_graph=True)
    torch.testing.assert_close(x.grad, torch.full((3,), 2.0))
    assert w.grad is None
    z.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 3.0))


def test_tangents_are_brought_to_the_expected_strides() -> None:
    inputs = square_inputs(*SHAPE)
    (y,) = apply(square_spec(*SHAPE), *inputs)
    odd = torch.randn(SHAPE[2], SHAPE[0]).t()
    found = torch.autograd.grad(y, inputs, odd, retain_graph=True)
    for a, b in zip(found, reference(inputs, odd)[1:], strict=True):
        torch.testing.assert_close(a, b)
    expanded = torch.autograd.grad(y.sum(), inputs)
    for a, b in zip(expanded, reference(inputs, torch.ones_like(y))[1:], strict=True):
        torch.testing.assert_close(a, b)


def test_outputs_may_be_changed_in_place_like_any_tensor() -> None:
    text = """
def forward(inputs):
    x = inputs[0]
    inputs.clear()
    y = empty((2, 3), (3, 1), f32)
    y.copy_(x)
    return [detached(view(y, (3, 2), (1, 3), 0))], []

def backward(saved, tangents):
    return [arrange(tangents[0], (3, 2), (1, 3), f32).t()]
"""
    spec = host_spec(text, num_inputs=1, differentiable=(True,), tangent_of=(0,), grad_of=(0,))
    x = torch.randn(2, 3, requires_grad=True)
    (y,) = apply(spec, x)
    assert y.stride() == (1, 3)
    y += 1
    y.mul_(2)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 3), 2.0))


def test_mutated_inputs_get_their_new_values() -> None:
    text = """
def forward(inputs):
    x, running = inputs
    inputs.clear()
    return [x * 2, running + 1], []

def backward(saved, tangents):
    return [2 * tangents[0]]
"""
    spec = host_spec(text, num_inputs=2, differentiable=(True,), tangent_of=(0,), grad_of=(0,), mutations=((1, 1),))
    x, running = torch.randn(3, requires_grad=True), torch.zeros(3)
    outputs = apply(spec, x, running)
    assert len(outputs) == 1
    torch.testing.assert_close(running, torch.ones(3))
    outputs[0].sum().backward()
    assert not running.requires_grad


def test_double_backward_mutates_nothing_again() -> None:
    text = """
def forward(inputs):
    x, running = inputs
    inputs.clear()
    return [x * x, running + 1], [x]

def backward(saved, tangents):
    x = saved[0]
    return [2 * x * tangents[0], None]

SAVED_INPUTS = (0,)
"""

    def again(x: torch.Tensor, running: torch.Tensor) -> tuple[torch.Tensor]:
        running.add_(1)
        return (x * x,)

    options = {"num_inputs": 2, "differentiable": (True,), "tangent_of": (0,), "grad_of": (0, 1)}
    spec = host_spec(text, mutations=((1, 1),), original=again, **options)
    x, running = torch.randn(3, requires_grad=True), torch.zeros(3)
    (y,) = apply(spec, x, running)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (g2,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(g2, torch.full((3,), 2.0))
    torch.testing.assert_close(running, torch.ones(3))


def test_offloaded_tensors_come_back_in_the_layout_that_kernels_rely_on() -> None:
    spec, (x, w, b) = square_spec(*SHAPE), square_inputs(*SHAPE)

    def pack(t: torch.Tensor) -> torch.Tensor:
        return t.t().contiguous() if t.dim() == 2 else t.clone()

    def unpack(t: torch.Tensor) -> torch.Tensor:
        return t.t() if t.dim() == 2 else t  # same values, other strides

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        (y,) = apply(spec, x, w, b)
    y.sum().backward()
    for t, wanted in zip((x, w, b), reference([x, w, b], torch.ones_like(y))[1:], strict=True):
        torch.testing.assert_close(t.grad, wanted)


def test_an_output_returned_twice_collects_both_gradients() -> None:
    text = """
def forward(inputs):
    x = inputs[0]
    inputs.clear()
    y = x * 2
    return [y, y], []

def backward(saved, tangents):
    a, b = (arrange(t, (3,), (1,), f32) for t in tangents)
    return [2 * (a + b)]
"""
    spec = host_spec(text, num_inputs=1, differentiable=(True, True), tangent_of=(0, 1), grad_of=(0,))
    x = torch.randn(3, requires_grad=True)
    y, z = apply(spec, x)
    (3 * y + z).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 8.0))


def test_an_input_returned_as_is() -> None:
    text = """
def forward(inputs):
    x = inputs[0]
    inputs.clear()
    return [x, view(x, (2,), (1,), 1)], []

def backward(saved, tangents):
    g = arrange(tangents[0], (3,), (1,), f32).clone()
    g[1:] += arrange(tangents[1], (2,), (1,), f32)
    return [g]
"""
    spec = host_spec(text, num_inputs=1, differentiable=(True, True), tangent_of=(0, 1), grad_of=(0,))
    x = torch.randn(3, requires_grad=True)
    y, z = apply(spec, x)
    (y.sum() + 2 * z.sum()).backward()
    torch.testing.assert_close(x.grad, torch.tensor([1.0, 3.0, 3.0]))


def test_works_under_activation_checkpointing() -> None:
    spec, inputs = square_spec(*SHAPE), square_inputs(*SHAPE)
    checkpoint(lambda *t: apply(spec, *t)[0], *inputs, use_reentrant=False).sum().backward()
    for t, wanted in zip(inputs, reference(inputs, torch.ones(SHAPE[0], SHAPE[2]))[1:], strict=True):
        torch.testing.assert_close(t.grad, wanted)


def test_a_second_step_accumulates() -> None:
    spec, inputs = square_spec(*SHAPE), square_inputs(*SHAPE)
    for _ in range(2):
        apply(spec, *inputs)[0].sum().backward()
    wanted = reference(inputs, torch.ones(SHAPE[0], SHAPE[2]))[1:]
    for t, w in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(t.grad, 2 * w)


def test_no_reference_cycle_keeps_the_step_alive() -> None:
    spec, inputs = square_spec(*SHAPE), square_inputs(*SHAPE)
    gc.collect()
    gc.disable()
    try:
        (y,) = apply(spec, *inputs)
        ref = weakref.ref(y)
        del y
        assert ref() is None
    finally:
        gc.enable()
