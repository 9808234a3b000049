"""Launch code without checks: when it runs, and what it runs."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megafuse.runtime import direct, shim, tensors
from megafuse.runtime.direct import Direct, aligned
from megafuse.runtime.loading import load_host

TEXT = """
def forward(inputs):
    x = inputs[0]
    inputs.clear()
    stream = current_stream()
    y = empty((4,), (1,), x.dtype)
    k0(stream, address(x), address(y))
    return [y], []
"""


class Kernel:
    """Launches are logged; the direct launch is known after the first checked one on aligned addresses."""

    def __init__(self, log: list) -> None:
        self.log, self.hooks, self.bound = log, [], None

    def launch(self, stream, *pointers):
        self.log.append("checked")
        if all(p % 16 == 0 for p in pointers):
            self.bound = lambda *_: self.log.append("direct")

    def direct(self, device):
        assert device == 0
        return self.bound


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch):
    """``(function, kernel, log, state)`` on CPU tensors; ``state.device`` is the current CUDA device."""
    state, log = SimpleNamespace(device=0, listening=False, entered=[]), []

    @contextlib.contextmanager
    def device(index):
        state.entered.append(index)
        yield

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state.device, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(shim, "listening", lambda: state.listening)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k))
    kernel = Kernel(log)
    names = {"k0": kernel.launch, "address": torch.Tensor.data_ptr, "current_stream": lambda: 7}
    cpu = torch.device("cpu")
    checked = load_host(TEXT, {**names, "empty": tensors.allocator(cpu)})["forward"]
    unchecked = load_host(TEXT, {**names, **tensors.short_cuts(cpu)})["forward"]
    return Direct(checked, unchecked, {"k0": kernel, "k1": Kernel([])}, torch.device("cuda", 0)), kernel, log, state


def test_the_first_call_checks_and_later_ones_do_not(made):
    code, _, log, state = made
    x = torch.zeros(4)
    inputs = [x]
    code.run(inputs)
    assert inputs == []
    (y,), saved = code.run([x])
    assert log == ["checked", "direct"]
    assert y.shape == (4,) and saved == []
    assert state.entered == [0]


def test_what_is_not_aligned_is_checked(made):
    code, _, log, _ = made
    base = torch.zeros(8)
    code.run([base[1:5]])
    assert not code.ready
    code.run([base[:4]])
    code.run([base[1:5]])
    code.run([base[:4]])
    assert log == ["checked", "checked", "checked", "direct"]


def test_alignment_that_is_known_is_not_looked_at(made, monkeypatch: pytest.MonkeyPatch):
    code, _, log, _ = made
    code.is_aligned = True
    code.run([torch.zeros(4)])
    monkeypatch.setattr(direct, "aligned", lambda *lists: pytest.fail("looked at"))
    code.run([torch.zeros(4)])
    assert log == ["checked", "direct"]


def test_whoever_listens_is_heard(made):
    code, kernel, log, state = made
    x = torch.zeros(4)
    code.run([x])
    state.listening = True
    code.run([x])
    state.listening = False
    kernel.hooks.append(print)
    code.run([x])
    kernel.hooks.clear()

    class Mode(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Mode.seen += 1
            return func(*args, **(kwargs or {}))

    with Mode():
        code.run([x])
    assert Mode.seen == 1, "the mode sees the allocation"
    code.run([x])
    assert log == ["checked"] * 4 + ["direct"]


def test_another_device_or_thread_is_entered_first(made):
    code, _, log, state = made
    x = torch.zeros(4)
    code.run([x])
    state.device = 1
    code.run([x])
    assert (log, state.entered) == (["checked", "checked"], [0, 0])
    state.device = 0
    for _ in range(2):
        thread = threading.Thread(target=code.run, args=([x],))
        thread.start()
        thread.join()
    assert state.entered == [0, 0, 0, 0]
    code.run([x])
    assert log[-1] == "direct"


def test_kernels_without_a_direct_launch_stay_checked(made):
    code, kernel, log, _ = made
    kernel.direct = lambda device: None
    for _ in range(3):
        code.run([torch.zeros(4)])
    assert log == ["checked"] * 3


def test_alignment_of_lists():
    base = torch.zeros(8)
    assert aligned([base], [base[4:], torch.zeros(0)])
    assert not aligned([base], [base[1:]])
    assert not aligned([base, None])


def test_short_cuts_are_the_plain_helpers():
    cpu = torch.device("cpu")
    short = tensors.short_cuts(cpu)
    if not short:
        pytest.skip("this PyTorch has none")
    y = short["empty"]((3, 4), (1, 3), torch.bfloat16)
    assert (y.shape, y.stride(), y.dtype) == ((3, 4), (1, 3), torch.bfloat16)
    x = torch.arange(24.0, requires_grad=True)[2:]
    for part in (short["part"], tensors.view):
        piece = part(x, (2, 3), (1, 4), 5)
        assert torch.equal(piece, x.as_strided((2, 3), (1, 4), 7))
        assert piece.data_ptr() == x.data_ptr() + 20
    assert direct.stream_reader(torch.device("cuda", 0)) is not None
