"""The backend by name: options, shapes, graph breaks, grad modes, outputs that are no tensors."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megafuse
from dynamo_helpers import INTERPRET, check_compiled, compilations, compiled, graphs_made
from megafuse import NotFusedWarning
from megafuse.api import FUSE_OPTIONS
from megafuse.dynamo.backend import MAX_SCALARS

# PyTorch's own, raised when Dynamo looks at the result of an earlier graph
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def mlp(d: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))


def data(*shape: int, grad: bool = True, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


# --- the name and the options -----------------------------------------------------------------------------------------


def test_the_name_is_found_without_importing_megafuse() -> None:
    """The installed entry point."""
    code = "import torch; print('megafuse' in torch._dynamo.list_backends())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


def test_options_are_those_of_fuse() -> None:
    assert {"target", "strict"} <= set(FUSE_OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tarjet": "interpret"}, r"unknown option 'tarjet' of backend 'megafuse'\n.*use one of target"),
        ({"target": "tpu"}, "unknown target 'tpu'"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        compiled(torch.sin, options=options)(data(4))


def test_a_mode_is_refused() -> None:
    with pytest.raises(Exception, match="no mode 'reduce-overhead'"):
        torch.compile(torch.sin, backend="megafuse", mode="reduce-overhead")(data(4))


def test_cpu_tensors_run_the_original_and_say_so() -> None:
    module, x = mlp(), data(4, 8)
    with pytest.warns(NotFusedWarning, match="the tensors are on the CPU") as said, graphs_made() as made:
        out = torch.compile(module, backend="megafuse")(x)
    assert torch.equal(out, module(x))
    assert len(said) == 1
    assert not made


def test_cpu_tensors_are_refused_for_cuda() -> None:
    with pytest.raises(megafuse.TargetError, match="target='cuda' asked for"):
        compiled(mlp(), options={"target": "cuda"})(data(4, 8))


def test_strict_refuses_ops_without_a_converter() -> None:
    with pytest.raises(megafuse.UnsupportedError, match=r"test_dynamo_backend\.py.*cumsum"):
        compiled(lambda x: torch.cumsum(x.sin(), 1).exp(), options=INTERPRET | {"strict": True})(data(4, 8))


# --- shapes and numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, None])
def test_shapes_compile_when_called(dynamic: bool | None) -> None:
    """One Dynamo graph with symbolic sizes serves all of them; its sizes are read from the tensors."""

    def fn(x: Tensor) -> tuple[Tensor, int]:
        y = (x.sin() * x.shape[0]).reshape(-1, 2)
        return y / y.shape[0], x.shape[0] * 3

    fused = compiled(fn, dynamic=dynamic)
    with graphs_made() as made:
        for rows in (3, 5, 6, 5):
            x = data(rows, 4)
            out, number = fused(x)
            assert number == 3 * rows
            torch.testing.assert_close(out, fn(x)[0])
            torch.testing.assert_close(*(torch.autograd.grad((f(x)[0] ** 2).sum(), x)[0] for f in (fused, fn)))
    assert len(made) == (1 if dynamic else 2)
    assert not any(g.region.scalars or g.unfused for g in made)


def test_dynamic_module_by_the_rule() -> None:
    check_compiled(mlp(), data(5, 8), dynamic=True)


def test_a_changing_number_compiles_a_few_times_then_runs_as_it_is() -> None:
    fused = compiled(lambda x, s: (x * s).sin() + s, dynamic=True)
    x = data(4, 4)
    with graphs_made() as made, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(MAX_SCALARS + 2):
            torch.testing.assert_close(fused(x, 0.5 + i), (x * (0.5 + i)).sin() + 0.5 + i)
    gave_up = [g.unfused for g in made if g.region.scalars]
    assert len(gave_up) == 1
    assert gave_up[0].startswith("a number among its inputs took more than 16 values")
    assert sum("pass it as a tensor" in str(w.message) for w in said) == 1


def test_graphs_of_one_function_at_each_break() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(), mlp()

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            torch._dynamo.graph_break()
            return self.second(h) + h

    check_compiled(Broken(), data(4, 8), graphs=2)


# --- grad modes -------------------------------------------------------------------------------------------------------


def test_without_gradients_nothing_is_saved() -> None:
    module, x = mlp(), data(4, 8)
    fused = compiled(module)
    with graphs_made() as made, torch.no_grad():
        out = fused(x)
    assert not out.requires_grad
    torch.testing.assert_close(out, module(x).detach())
    (compilation,) = compilations(made)
    assert not compilation.step.backward
    assert not compilation.step.saved


def test_one_module_with_and_without_gradients() -> None:
    module, x = mlp(), data(4, 8)
    fused = compiled(module)
    with torch.no_grad():
        fused(x)
    fused(x).sum().backward()
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(grads, [p.grad for p in module.parameters()])


def test_inputs_without_gradients_get_none() -> None:
    check_compiled(lambda x, y, n: (x * y.detach() + n, n + 1), data(4, 8), data(4, 8, grad=False), torch.arange(8))


def test_grad_mode_inside() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.exp().sum()
        return y.sin() * scale

    check_compiled(fn, data(4, 8), data(4, 8))


def test_second_derivatives() -> None:
    """Through the original ops, as for fused modules."""

    def fn(x: Tensor) -> Tensor:
        return x.sin() * x

    x = data(5)
    for f in (compiled(fn), fn):
        (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second, 2 * x.cos() - x * x.sin())


def test_a_graph_that_is_kept_can_run_backward_again() -> None:
    x = data(4, 8)
    out = compiled(mlp())(x).sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_nothing_keeps_inputs_or_saved_values_alive() -> None:
    fused = compiled(lambda x: (x * 2).sin().exp())
    fused(data(4, 8))
    x = data(4, 8) * 1
    refs = [weakref.ref(x)]
    out = fused(x)
    refs.append(weakref.ref(out.grad_fn))
    out.sum().backward()
    del x, out
    gc.collect()
    assert [r() for r in refs] == [None, None]


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_generated_code_names_the_users_lines() -> None:
    with graphs_made() as made:
        compiled(mlp())(data(4, 8))
        compiled(lambda x: x.sin().exp())(data(3, 3))
    first, second = compilations(made)
    assert {n.origin.file for n in second.graph.nodes if n.origin} == {"test_dynamo_backend.py"}
    assert not {n.origin.file for n in first.graph.nodes if n.origin} & {"recorded.py", "interpreter.py"}


def test_outputs_that_are_no_tensors() -> None:
    def fn(x: Tensor) -> dict[str, Any]:
        return {"y": x.sin(), "n": x.shape[0], "none": None, "name": "f", "deep": (x.cos(), [1.5])}

    x = data(3, 4)
    out, wanted = compiled(fn)(x), fn(x)
    assert (out.pop("name"), out["n"], out["none"]) == (wanted.pop("name"), 3, None)
    for tensors in (out, wanted):
        del tensors["none"]
    torch.testing.assert_close(out, wanted)


def test_integer_graphs_run_as_they_are() -> None:
    with pytest.warns(NotFusedWarning, match="integer type"):
        assert torch.equal(compiled(lambda i: i * 2 + 1)(torch.arange(4)), torch.arange(4) * 2 + 1)
    torch._dynamo.reset()
    with pytest.raises(megafuse.InputError, match="integer type"):
        compiled(lambda i: i * 2 + 1, options=INTERPRET | {"strict": True})(torch.arange(4))


def test_reset_compiles_anew() -> None:
    module, x = mlp(), data(4, 8)
    fused = compiled(module)
    with graphs_made() as made:
        first = fused(x)
        torch._dynamo.reset()
        assert torch.equal(fused(x), first)
    assert len(made) == 2


def test_a_parameter_swapped_later_is_read_anew() -> None:
    module, x = nn.Linear(8, 8), data(4, 8)
    fused = compiled(module)
    fused(x)
    with torch.no_grad():
        module.weight.mul_(2)
    torch.testing.assert_close(fused(x), F.linear(x, module.weight, module.bias))
