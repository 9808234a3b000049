"""Structures of arguments and outputs, state of modules, gradients asked for, in-place changes."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from capture_helpers import compare, double, seeded
from megafuse.capture.api import capture, leaf_getter
from megafuse.core.errors import InputError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.lin = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.full((4,), 1.5))

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return self.lin(F.silu(self.norm(x))) * self.scale * gain + x


def test_module_with_unused_parameter_and_buffer() -> None:
    c = compare(double(Block()), seeded(3, 4), gain=0.5).captured
    assert [leaf.kind for leaf in c.leaves].count("param") == 5
    assert {leaf.label for leaf in c.leaves} >= {"argument x", "parameter unused", "buffer scale"}


def test_module_arguments_and_constants() -> None:
    def ffn(x: Tensor, w: Tensor, norm: nn.Module, act: str, k: int) -> Tensor:
        return getattr(F, act)(norm(x) @ w) * k

    c = compare(ffn, seeded(3, 4), seeded(4, 4), double(nn.LayerNorm(4)), "silu", 3).captured
    assert "parameter weight of argument norm" in {leaf.label for leaf in c.leaves}


def test_structured_arguments_and_outputs() -> None:
    def fn(batch: dict[str, Tensor], pair: tuple[Tensor, list[Tensor]]) -> dict[str, object]:
        a, (b, _) = pair
        return {"s": batch["x"] * a + b, "views": (batch["x"], a.t(), a.detach()), "n": 3, "none": None}

    args = ({"x": seeded(3, 4)}, (seeded(3, 4, seed=1), [seeded(4), seeded(2)]))
    c = compare(fn, *args).captured
    out = c.out_spec.build(list("abcd"))
    assert out == {"s": "a", "views": ("b", "c", "d"), "n": 3, "none": None}
    assert c.out_requires_grad == (True, True, True, False)
    assert c.tangent_of == (0, 1, 2)
    assert c.out_strides[2] == (1, 4)
    assert [c.leaves[i].label if i is not None else None for i in c.out_alias] == [
        None, "argument batch['x']", "argument pair[0]", "argument pair[0]"
    ]  # fmt: skip


def test_no_grad_and_no_requires_grad() -> None:
    block = double(Block())
    with torch.no_grad():
        c = compare(block, seeded(3, 4)).captured
    assert not c.graph.grad_of
    assert c.out_requires_grad == (False,)
    frozen = double(Block()).requires_grad_(False)
    assert not compare(frozen, seeded(3, 4, grad=False)).captured.graph.grad_of
    assert compare(lambda x: x.detach() * 2, seeded(3, 4)).captured.tangent_of == ()


def test_requires_grad_pattern() -> None:
    block = double(Block())
    block.lin.requires_grad_(False)
    c = compare(block, seeded(3, 4, grad=False)).captured
    assert [c.leaves[i].label for i in c.graph.grad_of] == [
        "parameter unused", "parameter norm.weight", "parameter norm.bias"
    ]  # fmt: skip


def test_shared_parameters_once() -> None:
    first = nn.Linear(4, 4)
    both = double(nn.Sequential(first, nn.Tanh(), first))
    c = compare(both, seeded(3, 4)).captured
    assert [leaf.label for leaf in c.leaves if leaf.kind == "param"] == ["parameter 0.weight", "parameter 0.bias"]


def test_same_tensor_twice() -> None:
    x = seeded(3, 4)
    c = capture(lambda a, b: a * b.sin(), (x, x))
    assert c.leaves[1].alias == 0
    assert c.graph.grad_of == (0, 1)


def test_expanded_and_strided_inputs() -> None:
    a = seeded(4, 3).detach().t().requires_grad_()
    b = seeded(1, 4).detach().expand(3, 4).requires_grad_()
    c = compare(lambda x, y: F.gelu(x) * y, a, b).captured
    assert [leaf.strides for leaf in c.leaves] == [(1, 3), (0, 1)]


def test_batch_norm_mutates_its_buffers() -> None:
    module = double(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()))
    before = copy.deepcopy(module.state_dict())
    captured = capture(module, (seeded(5, 4),))
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert {captured.leaves[leaf].label for leaf, _ in captured.mutations} == {
        "buffer 1.running_mean", "buffer 1.running_var", "buffer 1.num_batches_tracked"
    }  # fmt: skip
    compare(module, seeded(5, 4))
    assert not compare(module.eval(), seeded(5, 4)).captured.mutations


def test_statistics_among_the_arguments_are_changed() -> None:
    """Stand-ins do not show that a batch norm changes them."""
    x, mean, var = seeded(5, 4), torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    captured = capture(lambda x, m, v: nn.functional.batch_norm(x, m, v, training=True), (x, mean, var))
    assert [captured.leaves[leaf].label for leaf, _ in captured.mutations] == ["argument m", "argument v"]
    assert not capture(lambda x, m, v: nn.functional.batch_norm(x, m, v), (x, mean, var)).mutations
    assert not capture(lambda x, m: (x * m, m), (x, mean)).mutations


def test_rebound_buffer_is_a_mutation() -> None:
    class Ema(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    module = Ema()
    captured = capture(module, (seeded(3, 4),))
    assert len(captured.mutations) == 1
    assert float(module.mean.abs().sum()) == 0


def test_parametrized_and_weight_norm_modules() -> None:
    lin = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    compare(double(lin), seeded(2, 4))
    compare(double(nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))).requires_grad_(False), seeded(2, 3))


def test_closures_methods_partials_and_globals() -> None:
    block, w = double(Block()), seeded(4)
    compare(lambda x: block(x) * w, seeded(3, 4))
    compare(block.forward, seeded(3, 4))
    compare(functools.partial(block, gain=2.0), seeded(3, 4))
    c = capture(lambda x: block(x) * w, (seeded(3, 4),))
    assert [leaf.kind for leaf in c.leaves][-1] == "outer"
    assert c.leaves[-1].label.startswith("closure variable w of ")
    assert c.leaves[-1].requires_grad


def test_plain_tensor_attributes_and_made_constants() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.linspace(0, 1, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            made = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype, device=x.device)
            return x * self.table + made * torch.tensor(0.5, dtype=x.dtype)

    c = compare(Plain(), seeded(3, 4)).captured
    assert [leaf.kind for leaf in c.leaves] == ["arg", "outer", "const", "const"]
    assert c.leaves[1].label == "attribute table of module 0"
    assert [t.dim() for t in c.constants] == [1, 0]


def test_integer_and_bool_outputs() -> None:
    c = compare(lambda x: (x > 0, x * 2, torch.arange(3)), seeded(3, 4)).captured
    assert c.tangent_of == (1,)


def test_library_modules_and_composites() -> None:
    x = seeded(2, 5, 8)
    compare(double(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)), x)
    compare(lambda x, i: x * F.one_hot(i, 8).to(x.dtype), x, torch.arange(10).view(2, 5) % 8)
    lin = double(nn.Linear(8, 8))
    compare(lambda x: checkpoint(lambda y: F.silu(lin(y)).sin(), x, use_reentrant=False), x)


def test_several_results_of_an_opaque_call() -> None:
    compare(lambda x: torch.sort(x * 2, dim=-1)[0] * 3, seeded(3, 4))
    compare(lambda x: torch.topk(x, 2, dim=-1).values, seeded(3, 4))


@pytest.mark.parametrize("kwargs", [{}, {"gain": 2.0}])
def test_leaf_getter(kwargs: dict[str, float]) -> None:
    block, x, y = double(Block()), seeded(3, 4), seeded(3, 4, seed=5)
    captured = capture(block, (x,), kwargs)
    get = leaf_getter(block, (x,), kwargs, captured)
    found = get((y,), kwargs)
    assert found[0] is y
    assert all(a is b for a, b in zip(found[1:], [*block.parameters(), block.scale], strict=True))
    with pytest.raises(InputError, match="argument x is missing"):
        get((), kwargs)
    with pytest.raises(InputError, match="argument x: expected a tensor, got float"):
        get((1.0,), kwargs)
    with pytest.raises(InputError, match="2 positional arguments, but 1"):
        get((y, y), kwargs)
    with pytest.raises(InputError, match="keyword argument scale"):
        get((y,), {**kwargs, "scale": 1})


def test_leaf_getter_with_another_module() -> None:
    def fn(x: Tensor, norm: nn.Module, k: int) -> Tensor:
        return norm(x) * k

    one, two, x = nn.LayerNorm(4), nn.LayerNorm(4), torch.randn(3, 4)
    get = leaf_getter(fn, (x, one, 2), {}, capture(fn, (x, one, 2)))
    assert get((x, two, 2), {})[1] is two.weight
    with pytest.raises(InputError, match="argument norm: expected a module LayerNorm, got Linear"):
        get((x, nn.Linear(4, 4), 2), {})
    with pytest.raises(InputError, match="argument k: the captured value is 2, got 3"):
        get((x, one, 3), {})
