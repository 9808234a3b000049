from __future__ import annotations

import numpy as np
import pytest
import torch

from megafuse.codegen.artifact import Artifact, HostSource, KernelSource
from megafuse.core.dtypes import DType
from megafuse.core.errors import LaunchError, TargetError, VerifyError
from megafuse.runtime import dots, tensors
from megafuse.runtime.numpy_kernels import flat_array
from megafuse.runtime.step import LoadedStep
from runtime_examples import SQUARE, square_artifact, square_inputs, square_step

CPU = torch.device("cpu")


def loaded(text: str, needs: tuple[str, ...] = (), **options: object) -> LoadedStep:
    return LoadedStep(Artifact((), HostSource(text, needs)), "interpret", "cpu", **options)


def test_lists_are_emptied_and_constants_read() -> None:
    step = LoadedStep(square_artifact(square_step(4, 3, 5)), "interpret", "cpu")
    assert (step.saved_inputs, step.overwritten, step.has_backward) == ((0, 1, -1), (), True)
    inputs = [t.detach() for t in square_inputs(4, 3, 5)]
    x, w, b = inputs
    (y,), saved = step.forward(inputs)
    assert inputs == []
    torch.testing.assert_close(y, (x @ w) ** 2 + b)
    tangents = [torch.ones_like(y)]
    grads = step.backward(saved, tangents)
    assert saved == [] and tangents == [] and len(grads) == 3


def test_poison_fills_every_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    made = "empty((3,), (1,), f32), empty((3,), (1,), i32), empty((2,), (1,), bool_)"
    text = f"def forward(inputs):\n    return [{made}], []\n"
    given = loaded(text, poison=True)
    monkeypatch.setenv("MEGAFUSE_POISON", "1")
    for step in (given, loaded(text)):
        (f, i, b), _ = step.forward([])
        assert f.isnan().all()
        assert (i == 0x7F7F7F7F).all()
        assert b.all()


def test_opaque_results_never_share_memory_with_arguments() -> None:
    text = """
def forward(inputs):
    x = inputs[0]
    a, _, b = opaque(4, (x,))
    return [a, b], []
"""
    seen = []

    def table(call, args):
        seen.append(call)
        return args[0].t(), None, args[0] + 1

    x = torch.randn(2, 3)
    (a, _), _ = loaded(text, opaque=table).forward([x])
    assert seen == [4]
    assert a.data_ptr() != x.data_ptr()
    torch.testing.assert_close(a, x.t())
    with pytest.raises(VerifyError, match="without a table"):
        loaded(text).forward([x])


def test_errors_of_loading() -> None:
    host = HostSource("def forward(inputs): return [], []\n", ())
    kernel = KernelSource("square_bias", "numpy", SQUARE, (), (1, 1), 4, 1)
    other = KernelSource("square_bias", "numpy", SQUARE + "\n", (), (1, 1), 4, 1)
    triton = KernelSource("k", "triton", "", (), (1, 1), 4, 1)
    with pytest.raises(TargetError, match="unknown target"):
        LoadedStep(Artifact((), host), "tpu", "cpu")
    with pytest.raises(TargetError, match="CPU tensors"):
        LoadedStep(Artifact((), host), "interpret", "cuda")
    with pytest.raises(TargetError, match="CUDA device"):
        LoadedStep(Artifact((), host), "cuda", "cpu")
    with pytest.raises(TargetError, match="TRITON_INTERPRET"):
        LoadedStep(Artifact((triton,), host), "interpret", "cpu")
    with pytest.raises(VerifyError, match="two different kernels"):
        LoadedStep(Artifact((kernel, other), host), "interpret", "cpu")
    LoadedStep(Artifact((kernel, kernel), host), "interpret", "cpu")
    with pytest.raises(VerifyError, match="needs nowhere"):
        LoadedStep(Artifact((), HostSource(host.text, ("nowhere",))), "interpret", "cpu")
    with pytest.raises(VerifyError, match="no backward"):
        LoadedStep(Artifact((), host), "interpret", "cpu").backward([], [])


def test_view_counts_from_the_tensors_own_first_element() -> None:
    base = torch.arange(24.0)
    part = base[4:].view(4, 5)
    torch.testing.assert_close(tensors.view(part, (2, 3), (5, 1), 6), base[10:].as_strided((2, 3), (5, 1), 10))


def test_arrange_keeps_copies_or_makes_zeros() -> None:
    arrange = tensors.arranger(tensors.allocator(CPU, poison=True))
    t = torch.randn(2, 3)
    assert arrange(t, (2, 3), (3, 1), torch.float32) is t
    assert arrange(t[:1], (1, 3), (99, 1), torch.float32).data_ptr() == t.data_ptr()
    other = arrange(t, (2, 3), (1, 2), torch.bfloat16)
    assert other.stride() == (1, 2) and other.dtype is torch.bfloat16
    torch.testing.assert_close(other, t.bfloat16(), check_stride=False)
    assert arrange(None, (2, 3), (1, 2), torch.float32).eq(0).all()
    with pytest.raises(LaunchError, match="shape"):
        arrange(t, (3, 2), (2, 1), torch.float32)


def test_restore_after_a_hook_changed_the_layout() -> None:
    t = torch.randn(3, 4)
    back = tensors.restore(t, (1, 3))
    assert back.stride() == (1, 3)
    torch.testing.assert_close(back, t)
    assert tensors.restore(t, (4, 1)) is t
    expanded = torch.randn(4).expand(3, 4)
    back = tensors.restore(expanded.contiguous(), (0, 1))
    assert back.stride() == (0, 1)
    torch.testing.assert_close(back, expanded)


@pytest.mark.parametrize("dtype", list(DType))
def test_flat_array_shares_memory(dtype: DType) -> None:
    t = torch.zeros(12, dtype=tensors.TORCH_DTYPES[dtype])
    part = t[2:].view(2, 5).t()
    array = flat_array(part)
    assert array.shape == (10,)
    assert array.dtype.itemsize == t.element_size()
    array[3] = 1
    assert t[5] == 1 and t.sum() == 1


def test_flat_array_of_bf16_is_bfloat16_and_of_nothing_is_empty() -> None:
    t = torch.tensor([1.5, -2.0], dtype=torch.bfloat16, requires_grad=True)
    assert flat_array(t).astype(np.float32).tolist() == [1.5, -2.0]
    assert flat_array(torch.empty(0, 4)).shape == (0,)


def reference(fn, *operands: torch.Tensor) -> torch.Tensor:
    return fn(*[t.double() for t in operands])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, None])
def test_products_round_once(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    out_dtype = out_dtype or dtype
    table = dots.products(CPU, [])
    a3, b3, bias = torch.randn(3, 4, 8).to(dtype), torch.randn(3, 8, 6).to(dtype), torch.randn(6).to(dtype)
    cases = {"bmm": (a3, b3), "baddbmm": (bias, a3, b3), "mm": (a3[0], b3[0]), "addmm": (bias, a3[1], b3[1])}
    for name, operands in cases.items():
        exact = reference(getattr(torch, name), *operands)
        # strided result: written as [N, M] in memory
        out = torch.full(exact.mT.shape, float("nan"), dtype=out_dtype).mT
        product = table[name if out_dtype is dtype else f"mixed_{name}"]
        assert product(*operands, out=out).data_ptr() == out.data_ptr()
        wide = exact.float() if out_dtype is not torch.float64 else exact
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(out_dtype, 2.0**-8)
        torch.testing.assert_close(out.double(), wide.double(), rtol=tolerance, atol=1e-5)


def test_cpu_products_of_halves_are_not_rounded_twice() -> None:
    a = torch.full((1, 512), 1.0, dtype=torch.bfloat16)
    b = torch.full((512, 1), 1.0078125, dtype=torch.bfloat16)
    out = torch.empty(1, 1, dtype=torch.float32)
    dots.products(CPU, [])["mixed_mm"](a, b, out=out)
    assert out.item() == 516.0
