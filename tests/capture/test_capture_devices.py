"""What a function says and does about devices: its stand-ins answer for the tensors that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import megafuse
from megafuse.capture.api import capture
from megafuse.core.errors import NotFusableError

CUDA = torch.device("cuda", 0)
META = torch.empty(3, 4, device="meta", requires_grad=True)

ANSWERS: dict[str, tuple[Callable[[Tensor], Any], Any, Any]] = {  # on the CPU, on CUDA
    "device": (lambda x: x.device, torch.device("cpu"), CUDA),
    "type": (lambda x: x.device.type, "cpu", "cuda"),
    "is_cuda": (lambda x: x.is_cuda, False, True),
    "is_cpu": (lambda x: x.is_cpu, True, False),
    "is_meta": (lambda x: x.is_meta, False, False),
    "get_device": (lambda x: x.get_device(), -1, 0),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_functions_branch_on_the_real_device(name: str) -> None:
    ask, on_cpu, on_cuda = ANSWERS[name]

    def fn(x: Tensor, wanted: Any) -> Tensor:
        return torch.tanh(x * 2) if ask(x * 1) == wanted and ask(x) == wanted else torch.sin(x)

    def functions(captured: Any) -> str:
        return " ".join(str(node.attrs) for node in captured.graph.nodes)

    assert "tanh" in functions(capture(fn, (torch.zeros(3, 4), on_cpu)))
    assert "tanh" in functions(capture(fn, (META, on_cuda), device=CUDA))
    x = torch.randn(3, 4)
    torch.testing.assert_close(megafuse.fuse(fn, x, on_cpu, target="interpret")(x, on_cpu), torch.tanh(x * 2))


def test_autocast_for_the_tensors_device() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return x @ x.T

    assert megafuse.fuse(fn, torch.randn(3, 4), target="interpret")(torch.randn(3, 4)).dtype is torch.bfloat16


MOVED: dict[str, Callable[[Tensor], Any]] = {
    "cpu": lambda x: x.cpu() * 2,
    "to": lambda x: x.to("cpu") * 2,
    "to with a type": lambda x: x.to("cpu", torch.float16) * 2,
    "to by keyword": lambda x: x.to(device="cpu") * 2,
    "to another GPU": lambda x: x.to("cuda:1") * 2,
    "cuda by number": lambda x: x.cuda(1) * 2,
    "back again": lambda x: x.cpu().to(x.device) * 2,
}
MADE_ELSEWHERE: dict[str, Callable[[Tensor], Any]] = {
    "factory": lambda x: (x * 2, torch.zeros(3)),
    "named device": lambda x: (x * 2, torch.zeros(3, device="cpu")),
    "values": lambda x: (x * 2, torch.tensor([1.0, 2.0])),
    "what follows of one": lambda x: (x * 2, torch.arange(3).float().sin()[:2]),
    "filled": lambda x: torch.zeros(3, 4).copy_(x),
}
AT_HOME: dict[str, Callable[[Tensor], Any]] = {
    "to itself": lambda x: x.to(x.device) * 2,
    "to a type": lambda x: x.to(torch.float16) * 2,
    "named": lambda x: (x * 2, torch.zeros(3, device="cuda")),
    "of the input": lambda x: (x * 2, torch.zeros(3, device=x.device), torch.zeros_like(x), x.new_zeros(3)),
    "moved there": lambda x: (x * 2, torch.zeros(3).to(x.device)),
    "a number": lambda x: x * torch.tensor(2.0),
    "an index": lambda x: x[torch.tensor([0, 1])],
}


@pytest.mark.parametrize("name", MOVED)
def test_moves_to_another_device_are_refused(name: str) -> None:
    with pytest.raises(NotFusableError, match=r"moves a tensor to (cpu|cuda:1), while .* cuda:0\n.*devices.py:\d+"):
        capture(MOVED[name], (META,), device=CUDA)


@pytest.mark.parametrize("name", MADE_ELSEWHERE)
def test_outputs_made_on_another_device_are_refused(name: str) -> None:
    with pytest.raises(NotFusableError, match=r"output \d is made on cpu, while the call is on cuda"):
        capture(MADE_ELSEWHERE[name], (META,), device=CUDA)


@pytest.mark.parametrize("name", AT_HOME)
def test_what_stays_on_the_device_is_captured(name: str) -> None:
    assert capture(AT_HOME[name], (META,), device=CUDA).graph.num_forward


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what PyTorch says without a GPU")
def test_a_gpu_asked_for_inside_of_the_function() -> None:
    """The original runs, and says what it lacks."""
    with pytest.warns(megafuse.NotFusedWarning, match="moves a tensor to cuda"):
        fused = megafuse.fuse(lambda x: x.to("cuda") * 2, torch.zeros(3), target="interpret")
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        fused(torch.zeros(3))
