"""Strides told by the dry run are those of real tensors, whatever the operands' layouts and types."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megafuse.capture.api import capture

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda a, b: a * b,
    "sub": lambda a, b: b - a,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, a),
    "maximum": torch.maximum,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "tanh": lambda a, b: torch.tanh(a) + 0 * b.sum(),
    "reshape": lambda a, b: a.reshape(-1) * b.sum(),
    "turned": lambda a, b: (a * b).transpose(0, -1).reshape(-1, 2),
}


def drawn(rng: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor of ``shape`` whose axes lie in some order, some of them expanded or with gaps."""
    order = list(range(len(shape)))
    rng.shuffle(order)
    sizes = [n if rng.random() < 0.7 else 1 for n in shape]
    made = torch.randn([sizes[i] for i in order]).to(dtype)
    if rng.random() < 0.3:
        made = torch.randn([*made.shape[:-1], 2 * made.shape[-1] + 1]).to(dtype)[..., 1::2]
    return made.permute([order.index(i) for i in range(len(shape))]).expand(shape)


def significant(tensor_strides: tuple[int, ...], shape: torch.Size) -> list[int]:
    return [s for s, n in zip(tensor_strides, shape, strict=True) if n > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", OPS)
def test_out_strides_are_those_of_real_tensors(name: str, dtype: torch.dtype) -> None:
    rng = random.Random(f"{name} {dtype}")
    for _ in range(5):
        shape = [rng.choice([2, 4, 6]) for _ in range(rng.choice([2, 3, 4]))]
        a, b = drawn(rng, shape, dtype), drawn(rng, shape, dtype).requires_grad_()
        want = OPS[name](a, b)
        (strides,) = capture(OPS[name], (a, b)).out_strides
        assert significant(strides, want.shape) == significant(want.stride(), want.shape), (a.stride(), b.stride())


SUBSCRIPTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "first": lambda x, i, j: x[i],
    "middle": lambda x, i, j: x[:, i].sin(),
    "last": lambda x, i, j: x[..., j] * 2,
    "neighbours": lambda x, i, j: x[:, i, j].sin(),
    "broadcast": lambda x, i, j: x[i[..., None], j[..., None, :]].sin(),
    "apart": lambda x, i, j: x[i, :, j].sin(),
    "turned": lambda x, i, j: x.mT[i, j] * 2,
}


@pytest.mark.parametrize("name", SUBSCRIPTS)
def test_out_strides_of_subscripts_follow_table_and_indices(name: str) -> None:
    rng = random.Random(name)
    for _ in range(12):
        x = drawn(rng, [rng.choice([2, 4, 6]) for _ in range(3)], torch.float32).requires_grad_()
        shape = [rng.choice([2, 3, 5]) for _ in range(rng.choice([2, 3]))]
        i, j = (drawn(rng, shape, torch.float32).gt(0).long() for _ in range(2))
        want = SUBSCRIPTS[name](x, i, j)
        (strides,) = capture(SUBSCRIPTS[name], (x, i, j)).out_strides
        assert significant(strides, want.shape) == significant(want.stride(), want.shape), (x.stride(), i.stride())


def test_indices_that_lie_differently_are_copied_on_cuda_alone() -> None:
    x = torch.empty(7, 9, 4, device="meta", requires_grad=True)
    i, j = (torch.empty(5, 3, dtype=torch.int64, device="meta") for _ in range(2))

    def strides(device: str, first: Tensor, second: Tensor) -> tuple[int, ...]:
        found = capture(lambda x, i, j: x[i, j], (x, first, second), device=torch.device(device)).out_strides[0]
        return tuple(found)  # type: ignore[arg-type]

    assert strides("cuda", i.t(), j.t()) == strides("cpu", i.t(), j.t()) == (4, 12, 1)
    assert strides("cuda", i.t(), j.reshape(3, 5)) == (20, 4, 1) != strides("cpu", i.t(), j.reshape(3, 5))
