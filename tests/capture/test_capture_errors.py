"""What capture refuses, how it says so, and the source lines it reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megafuse
from capture_helpers import seeded
from megafuse.capture.api import capture
from megafuse.core.errors import CaptureError, InputError, NotFusableError, UnsupportedError
from megafuse.workloads.rank_mixer_block import RankMixerBlock

X = seeded(3, 4, dtype=torch.float32)


def test_strict_lists_each_op_with_its_line() -> None:
    def fn(x: Tensor) -> Tensor:
        y = torch.cumsum(x, 0)
        return torch.sort(y)[0]

    with pytest.raises(UnsupportedError) as caught:
        capture(fn, (X,), strict=True)
    text = str(caught.value)
    assert "aten.cumsum.default: scan at test_capture_errors.py:" in text
    assert "y = torch.cumsum(x, 0)" in text
    assert "return torch.sort(y)[0]" in text


def test_source_lines_of_forward_and_backward() -> None:
    def fn(x: Tensor) -> Tensor:
        y = torch.sin(x)  # first
        return y.exp()  # second

    captured = capture(fn, (X,))
    lines = [n.origin.code for n in captured.graph.nodes if n.origin is not None]
    first = [code for code in lines if "# first" in code]
    assert len(first) >= 2  # sin, and cos of its backward
    assert all("# first" in c or "# second" in c for c in lines)
    assert {n.origin.file for n in captured.graph.nodes if n.origin} == {"test_capture_errors.py"}


def test_every_backward_node_has_a_line() -> None:
    block = RankMixerBlock(4, 16, 2)
    captured = capture(block, (torch.randn(2, 4, 16, requires_grad=True),))
    assert all(n.origin is not None for n in captured.graph.nodes if n.args)


def test_random_numbers_are_opaque() -> None:
    captured = capture(lambda x: F.dropout(x, 0.5), (X,))
    assert captured.support.opaque[0].reason == "draws random numbers"
    assert captured.calls[0].random


def test_the_users_own_error_passes() -> None:
    with pytest.raises(ValueError, match="multiple of tokens"):
        RankMixerBlock(4, 18, 2)

    def fn(x: Tensor) -> Tensor:
        if x.shape[1] % 3:
            raise RuntimeError("D % T != 0")
        return x

    with pytest.raises(RuntimeError, match=r"^D % T != 0(\n|$)"):
        capture(fn, (X,))


def test_control_flow_on_values() -> None:
    def fn(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(CaptureError) as caught:
        capture(fn, (X,))
    assert "depends on a tensor's values" in str(caught.value)
    assert "if x.sum() > 0:" in str(caught.value)
    with pytest.raises(CaptureError, match="depends on a tensor's values"):
        capture(lambda x: x * x.sum().item(), (X,))
    with pytest.raises(CaptureError, match="depends on a tensor's values"):
        capture(lambda x: x[x > 0], (X,))
    for asks in (lambda x: x[x > 0], lambda x: x.masked_select(x > 0), torch.nonzero):
        with pytest.raises(CaptureError, match="values: how many elements a mask selects"):
            capture(asks, (X,))
    with pytest.raises(CaptureError, match=r"depends on a tensor's values: Tensor\.numpy"):
        capture(lambda x: x + float(x.detach().numpy().sum()), (X,))


def test_shapes_and_types_that_pytorch_refuses() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    with pytest.raises(CaptureError) as caught:
        capture(fn, (X, X))
    assert "return x @ w" in str(caught.value)
    assert "argument w is float32[3, 4]" in str(caught.value)
    with pytest.raises(CaptureError, match="one of them: argument x is float32, argument w is bfloat16"):
        capture(fn, (X, torch.zeros(4, 3, dtype=torch.bfloat16)))


def test_integer_input_is_named() -> None:
    block = RankMixerBlock(4, 16, 2)
    with pytest.raises((InputError, CaptureError), match="argument x"):
        capture(block, (torch.ones(2, 4, 16, dtype=torch.int64),))
    with pytest.raises(InputError, match="argument x"):
        capture(lambda x: x + 1, (torch.ones(3, dtype=torch.int64),))


def test_mixed_devices_are_named() -> None:
    with pytest.raises(InputError, match="argument a is on cpu, but argument b is on meta"):
        capture(lambda a, b: a + b, (X, torch.empty(3, 4, device="meta")))


def test_a_number_on_the_cpu_beside_tensors_of_another_device() -> None:
    """PyTorch takes it; kernels cannot read it."""
    with pytest.raises(NotFusableError, match="argument b is a number on the CPU, while argument a is on meta"):
        capture(lambda a, b: a * b, (torch.empty(3, 4, device="meta"), torch.tensor(2.0)))
    assert capture(lambda a, b: a * b, (X, torch.tensor(2.0))).graph.num_forward == 1


BEYOND: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "checks": (lambda x: torch.linalg.inv(x @ x.T + torch.eye(3)) * 2, "linalg_(check_errors|inv_ex)"),
    "complex": (lambda x: torch.view_as_complex(x.view(3, 2, 2)).abs() * 2, "view_as_complex.*type torch.complex64"),
    "fourier": (lambda x: torch.fft.rfft(x).abs() * 2, "_fft_r2c.*type torch.complex64"),
    "no stand-in": (lambda x: F.ctc_loss(x.log_softmax(-1)[:, None], torch.tensor([[1, 2]]), torch.tensor([3]),
                                         torch.tensor([2])), "no kernel for tensors without data: aten::_ctc_loss"),
    "generator": (lambda x: x * torch.randint(0, 6, (3, 4), generator=torch.Generator().manual_seed(1)),
                  "randint draws from a generator"),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_ops_that_no_plan_can_hold_run_with_the_original(name: str) -> None:
    """Not an error, but a warning that names the op and the user's line; an error under ``strict``."""
    fn, said = BEYOND[name]
    x = seeded(3, 4, dtype=torch.float32)
    with pytest.warns(megafuse.NotFusedWarning, match=rf"{said}.* at test_capture_errors.py:\d+.*original ops run"):
        fused = megafuse.fuse(fn, x, target="interpret")
    assert torch.equal(fused(x), fn(x))
    with pytest.raises(NotFusableError, match=said):
        megafuse.fuse(fn, x, target="interpret", strict=True)


def test_other_refusals() -> None:
    class Sub(torch.Tensor):
        pass

    with pytest.raises(InputError, match="argument x is a Sub"):
        capture(lambda x: x, (torch.zeros(3).as_subclass(Sub),))
    with pytest.raises(InputError, match=r"argument x has .*complex64(.|\n)*convert it to one of float64"):
        capture(lambda x: x, (torch.zeros(3, dtype=torch.complex64),))
    with pytest.raises(InputError, match="layout"):
        capture(lambda x: x, (torch.zeros(3, 3).to_sparse(),))
    with pytest.raises(InputError, match="module or function"):
        capture(3, (X,))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="leaf"):
        capture(lambda x: x.add_(1), (X,))


def test_in_place_change_of_shared_memory() -> None:
    base = torch.zeros(4)
    with pytest.raises(CaptureError, match="changed in place and shares memory"):
        capture(lambda a, b: (a.add_(1), b), (base, base[:2]))


def test_in_place_change_that_takes_part_in_gradients() -> None:
    weight = torch.ones(4, requires_grad=True)
    with pytest.raises(CaptureError, match="argument a is changed in place by values that take part in gradients"):
        capture(lambda a, w: a.mul_(w).sum(), (torch.zeros(4), weight))
    with torch.no_grad():
        assert capture(lambda a, w: a.mul_(w).sum(), (torch.zeros(4), weight)).mutations


def test_class_that_hides_tensors() -> None:
    class Out:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    with pytest.raises(CaptureError, match="inside a Out"):
        capture(lambda x: Out(x * 2), (X,))


def linear_of(ids: Tensor, x: Tensor, weight: Tensor, extra: dict[str, list[Tensor]] | None = None) -> Tensor:
    found = x[ids] if extra is None else extra["more"][0].t()
    return F.linear(found * 2.0, weight)  # product


IDS, HALF = torch.ones(3, dtype=torch.long), torch.randn(4, 4).half()
ODD = {
    "a view of an argument": (
        lambda ids, x: F.linear(x.t()[:2], torch.ones(5, 4)),
        (IDS, HALF),
        {},
        r"argument x is float16, the value computed at",
    ),
    "another argument than the integer one": (
        linear_of,
        (IDS, HALF, torch.randn(5, 4)),
        {},
        r"the value computed at \S+:\d+ from argument x is float16, argument weight is float32",
    ),
    "an argument by keyword": (
        linear_of,
        (IDS, torch.randn(4, 4)),
        {"weight": HALF},
        r"the value computed at \S+:\d+ from argument x is float32, argument weight is float16",
    ),
    "an argument inside another": (
        linear_of,
        (IDS, torch.randn(4, 4), torch.randn(5, 4)),
        {"extra": {"more": [HALF]}},
        r"the value computed at \S+:\d+ from argument extra\['more'\]\[0\] is float16, argument weight is float32",
    ),
    "an integer": (lambda a, b: a @ b, (HALF, torch.ones(4, 4, dtype=torch.int32)), {}, r"argument b is int32"),
}


@pytest.mark.parametrize("name", ODD)
def test_operands_that_do_not_fit_are_named_and_no_others(name: str) -> None:
    fn, args, kwargs, said = ODD[name]
    with pytest.raises(CaptureError, match=rf"what to do: convert one of them: .*{said}") as caught:
        capture(fn, args, kwargs)
    assert "ids" not in str(caught.value).partition("what to do")[2]


def test_shapes_that_do_not_fit_are_listed_without_advice_on_integers() -> None:
    with pytest.raises(CaptureError, match=r"argument ids is int64\[3\], argument x is float16\[4, 4\]") as caught:
        capture(lambda ids, x: x + ids, (IDS, HALF))
    assert "convert" not in str(caught.value)


def test_integers_alone_are_told_how_to_convert_the_argument() -> None:
    with pytest.raises(InputError, match=r"for instance batch\['a'\].float\(\)"):
        capture(lambda batch: batch["a"], ({"a": IDS},))
