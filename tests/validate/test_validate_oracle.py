"""The oracle equals the module computed in fp64 throughout, whatever casts the module's code makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megafuse.validate import OracleError, oracle


def test_equals_the_module_in_fp64() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 3)).bfloat16()
    x = torch.randn(5, 6, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(5, 3, dtype=torch.bfloat16)
    run = oracle(model, (x,), cotangents={"out": g})
    double = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 3)).double()
    double.load_state_dict(model.state_dict())
    x64 = x.detach().double().requires_grad_()
    out = double(x64)
    out.backward(g.double())
    torch.testing.assert_close(run.outputs["out"], out, rtol=1e-13, atol=1e-13)
    expected = {"input": x64.grad} | {n: p.grad for n, p in double.named_parameters()}
    for name, grad in expected.items():
        torch.testing.assert_close(run.grads[name], grad, rtol=1e-12, atol=1e-12)
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in model.parameters())
    assert x.grad is None


CONSTANT = torch.linspace(0.5, 1.5, 7)  # neither argument, parameter nor buffer
CASTS = {
    "to": lambda x: x.float().to(torch.bfloat16).half() * 3,
    "softmax dtype": lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype),
    "sum dtype": lambda x: x.sum(-1, dtype=torch.float32),
    "type_as": lambda x: x * torch.ones(7).type_as(x) + torch.ones(7).to(torch.float16),
    "constant": lambda x: x @ CONSTANT + (x * CONSTANT).sum(),
    "factory": lambda x: torch.zeros(x.shape, dtype=torch.bfloat16).add_(x) + torch.full((7,), 0.5),
    "int division": lambda x: x * (torch.arange(7) / 3),
    "rms norm": lambda x: F.rms_norm(x.bfloat16(), (7,)),
    "in place": lambda x: torch.empty(x.shape).copy_(x).mul_(x.float()),
    "mean of cast": lambda x: (x.half() - x.half().mean(-1, keepdim=True, dtype=torch.float32)).square(),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_and_dtype_arguments_stay_wide(name: str) -> None:
    fn = CASTS[name]
    x = torch.randn(4, 7, requires_grad=True)
    out = oracle(fn, (x,)).outputs["out"]
    assert out.dtype == torch.float64
    grads = oracle(fn, (x,), cotangents={"out": torch.ones(out.shape)}).grads
    assert grads["x"].dtype == torch.float64
    # fp64 by finite differences: only possible if no step of the computation is narrower
    step = 1e-6 * torch.randn(4, 7, dtype=torch.float64)
    wide = x.detach().double()
    ahead, behind = (oracle(fn, ((wide + s * step),)).outputs["out"].sum() for s in (1, -1))
    torch.testing.assert_close((ahead - behind) / 2, (grads["x"] * step).sum(), rtol=1e-5, atol=1e-14)


def test_int_division_is_exact() -> None:
    out = oracle(CASTS["int division"], (torch.ones(7),)).outputs["out"]
    assert torch.equal(out, torch.arange(7, dtype=torch.float64) / 3)


def test_shared_parameters_buffers_and_integer_inputs() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.head = nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.head(torch.tanh(self.embed(ids)))

    model, ids = Tied(), torch.randint(9, (5,))
    run = oracle(model, (ids,), cotangents={"out": torch.ones(5, 9)})
    assert list(run.grads) == ["embed.weight"]
    assert run.after["calls"].item() == 1
    assert model.calls.item() == 0
    model(ids).sum().backward()
    torch.testing.assert_close(run.grads["embed.weight"].float(), model.embed.weight.grad)


def test_closures_and_bound_methods_and_autocast() -> None:
    linear = nn.Linear(4, 4)
    x = torch.randn(3, 4)

    def closure(x: torch.Tensor) -> torch.Tensor:
        return linear(x)

    for fn in (closure, linear.forward):
        grads = oracle(fn, (x,), cotangents={"out": torch.ones(3, 4)}).grads
        assert all(g is not None and g.dtype == torch.float64 for g in grads.values())
        assert len(grads) == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = oracle(linear, (x,)).outputs["out"]
    torch.testing.assert_close(out, F.linear(x.double(), linear.weight.double(), linear.bias.double()))


def test_what_cannot_be_promoted_is_refused() -> None:
    x = torch.randn(4)
    with pytest.raises(OracleError, match="reinterprets"):
        oracle(lambda x: x.float().view(torch.int32), (x,))
    held = torch.zeros(4)
    with pytest.raises(OracleError, match="buffer"):
        oracle(lambda x: held.add_(x) + 1, (x,))
