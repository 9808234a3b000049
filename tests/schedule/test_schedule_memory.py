"""The memory that a step takes, counted from its calls."""

from __future__ import annotations

from megafuse.core.dtypes import DType
from megafuse.schedule.memory import MemoryUse, memory_use, nbytes
from megafuse.schedule.types import Alloc, Buffer, Free, OpaqueCall, Step, View

F32 = DType.F32
BUFFERS = tuple(
    Buffer(name, (size,), (1,), F32, kind)
    for name, size, kind in (
        ("x", 10, "input"), ("a", 100, "temp"), ("b", 40, "saved"), ("c", 7, "output"), ("dy", 7, "tangent"),
        ("d", 30, "temp"), ("g", 10, "grad"), ("r", 300, "temp"),
    )
)  # fmt: skip


def view(name: str) -> View:
    return View(name, (1,), (1,))


def step(forward: tuple[object, ...], backward: tuple[object, ...]) -> Step:
    return Step(BUFFERS, (), forward, backward, (view("c"),), (view("g"),), ("b", "x"))  # type: ignore[arg-type]


def test_temporaries_count_until_they_are_freed():
    made = step((Alloc("b"), Alloc("a"), Free("a"), Alloc("c")), (Alloc("d"), Free("b"), Alloc("g"), Free("d")))
    assert memory_use(made) == MemoryUse(saved=160, peak=4 * 140)


def test_outputs_and_saved_values_are_there_in_backward():
    made = step((Alloc("b"), Alloc("c")), (Alloc("d"), Alloc("g"), Free("b"), Free("d")))
    assert memory_use(made) == MemoryUse(saved=160, peak=4 * (40 + 7 + 30 + 10))


def test_results_of_calls_count():
    call = OpaqueCall(0, (view("x"),), ("r", None))
    assert memory_use(step((Alloc("c"), Alloc("b"), call, Free("r")), ())).peak == 4 * (7 + 40 + 300)


def test_a_buffer_takes_its_span():
    assert nbytes(Buffer("v", (2, 3), (8, 1), F32, "temp")) == 4 * 11
    assert nbytes(Buffer("v", (2, 0), (8, 1), F32, "temp")) == 0
