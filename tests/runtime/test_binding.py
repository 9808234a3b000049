from __future__ import annotations

import pytest
import torch

from megafuse.core.errors import LaunchError
from megafuse.runtime import binding
from megafuse.runtime.binding import Binder, BindingKey, ProgramKey


class Recorder:
    def __init__(self) -> None:
        self.keys: list[BindingKey] = []

    def __call__(self, key: BindingKey, tensors: list[torch.Tensor]) -> int:
        self.keys.append(key)
        return len(self.keys)


@pytest.fixture(params=[True, False], ids=["native check", "exact key"])
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    if not request.param:
        monkeypatch.setattr(binding, "native_check", lambda tensors: binding._never)
    return Recorder()


def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return list(tensors)


def test_equal_calls_share_a_binding_and_different_ones_do_not(recorder: Recorder) -> None:
    binder = Binder(recorder)
    x = torch.randn(4, 4)
    base = torch.randn(40)
    variants = [
        (x,), (x, x), (torch.randn(4, 5),), (x.t(),), (x.double(),), (torch.randn(4, 4, requires_grad=True),),
        (base[1:17].view(4, 4),), (torch.randn(4, 4, 1),), (torch.nn.Parameter(x),), (),
    ]  # fmt: skip
    found = [binder.find(call(*v)) for v in variants]
    # A parameter is bound as a tensor that requires grad.
    assert found == [1, 2, 3, 4, 5, 6, 7, 8, 6, 9]
    again = [
        binder.find(call(*[t.detach().as_strided(t.shape, t.stride()).requires_grad_(t.requires_grad) for t in v]))
        for v in variants
    ]
    assert again[:6] == found[:6]
    assert len(binder) == 9


def test_settings_are_part_of_the_key(recorder: Recorder) -> None:
    binder = Binder(recorder)
    x = call(torch.randn(4, 4))
    plain = binder.find(x)
    with torch.no_grad():
        assert binder.find(x) != plain
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = binder.find(x)
    assert half != plain and recorder.keys[-1].flags.autocast is torch.bfloat16
    assert binder.find(x, extra=("train", 3)) not in (plain, half)
    assert binder.find(x) == plain


def test_tf32_setting_is_part_of_the_key(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    binder = Binder(recorder)
    x = call(torch.randn(4))
    first = binder.find(x)
    monkeypatch.setattr(binding, "_tf32", lambda: True)
    assert binder.find(x) != first
    assert recorder.keys[-1].flags.tf32


def test_tf32_reader_follows_pytorch() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision, wanted in (("highest", False), ("high", True), ("highest", False)):
            torch.set_float32_matmul_precision(precision)
            assert binding._tf32() is wanted
    finally:
        torch.set_float32_matmul_precision(before)


def test_describes_the_call(recorder: Recorder) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    Binder(recorder).find(call(x, torch.zeros(5, dtype=torch.int64)[1:]), extra="eval")
    (key,) = recorder.keys
    first, second = key.tensors
    assert (first.shape, first.strides, first.dtype, first.requires_grad, first.aligned) == (
        (3, 4), (4, 1), torch.float32, True, True,
    )  # fmt: skip
    assert not second.aligned
    assert key.trains and key.extra == "eval" and key.device == torch.device("cpu")


def test_clear_errors(recorder: Recorder) -> None:
    binder = Binder(recorder)
    x = torch.randn(2)
    cases = {
        "input 1 is int": [x, 3],
        "several devices: cpu, meta": [x, torch.empty(2, device="meta")],
        "layout torch.sparse_coo": [torch.eye(2).to_sparse()],
        "pending conjugation": [torch.randn(2, dtype=torch.complex64).conj()],
    }
    for text, tensors in cases.items():
        with pytest.raises(LaunchError, match=text):
            binder.find(tensors)
    with pytest.raises(LaunchError, match="plain argument"):
        binder.find([x], extra=[1])


def test_errors_of_compilation_pass_through_and_are_not_kept() -> None:
    def fail(key, tensors):
        raise ValueError("nope")

    binder = Binder(fail)
    with pytest.raises(ValueError, match="nope"):
        binder.find([torch.randn(2)])
    assert len(binder) == 0


def test_the_oldest_binding_makes_room(recorder: Recorder) -> None:
    binder = Binder(recorder, limit=2)
    for n in (1, 2, 3):
        binder.find([torch.randn(n)])
    assert len(binder) == 2
    assert binder.find([torch.randn(3)]) == 3
    assert binder.find([torch.randn(1)]) == 4


def test_program_keys_depend_on_what_code_assumed_and_on_nothing_else(recorder: Recorder) -> None:
    binder = Binder(recorder)
    x = torch.randn(4, 4)
    for t, extra in ((x, 0), (x.t(), 0), (x, 1)):
        binder.find([t], extra)
    keys = [k.program_key("graph", "sm_90", [("casts", "reference")]) for k in recorder.keys]
    assert keys[0] == keys[2] != keys[1]
    assert keys[0].digest == keys[2].digest != keys[1].digest
    assert keys[0].digest != recorder.keys[0].program_key("graph", "sm_80", [("casts", "reference")]).digest
    assert ProgramKey("g", "t", (((2,), (1,), "float32", False, True),)).digest == "c3859072a11ca3d9a8e30dcd"
