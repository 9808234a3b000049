"""The ready MLPs on a GPU: the quick start, the acceptance rule, life around the module, and the benchmark."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import megafuse
from megafuse.api import plain
from megafuse.bench.measure import Settings, measure_case
from megafuse.bench.mlp_case import mlp_case
from megafuse.nn import MLP, FusedMLPSoftplus, FusedMLPSoftplusWN
from megafuse.validate import CheckOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
QUICK = CheckOptions(seeds=2, small_seeds=0, repeats=1)
STEP = {
    "kind": "mlp", "rows": 256, "widths": [64, 64, 64], "activation": "softplus", "bias": False, "weight_norm": False,
    "seed": 3, "dtype": "float16", "mode": "training",
}  # fmt: skip


@pytest.mark.parametrize("make", [FusedMLPSoftplus, FusedMLPSoftplusWN])
def test_the_quick_start(make: type[MLP]) -> None:
    torch.manual_seed(0)
    model = make(D=128, H=128, out_features=128).cuda().half()
    x = torch.randn(300, 128, device="cuda", dtype=torch.half)
    out = model(x)
    out.sum().backward()
    plan = next(iter(megafuse.explain(model)))
    print(plan.title, [k.name for k in plan.kernels])
    assert plan.kernels
    assert not plan.opaque
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    report = megafuse.check(model, x.requires_grad_(), options=QUICK)
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("widths", "activation", "norm"),
    [([37, 100, 60, 3], "silu", False), ([48, 64, 40, 24], "relu", False), ([5, 17, 1, 9], "gelu_tanh", True)],
)
def test_ragged_widths(widths: list[int], activation: str, norm: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = MLP(widths, activation, weight_norm=norm, device="cuda", dtype=dtype, strict=True)
    x = torch.randn(77, widths[0], device="cuda", dtype=dtype, requires_grad=True)
    report = megafuse.check(model, x, options=QUICK)
    assert report.ok, str(report)


def test_from_the_cpu_to_the_gpu_and_to_another_type() -> None:
    torch.manual_seed(2)
    model = MLP([16, 32, 8], target="auto")
    reference = copy.deepcopy(plain(model)).cuda()
    model.cuda()
    x = torch.randn(40, 16, device="cuda")
    assert torch.allclose(model(x), reference(x), atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(model.half()(x.half()).float(), reference(x), atol=1e-2)
    again = copy.deepcopy(model)
    assert torch.equal(again(x.half()), model(x.half()))
    assert model(x.half()[:0]).shape == (0, 8)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_graphed_callables_take_a_ready_module() -> None:
    model = FusedMLPSoftplus(D=32, H=64, out_features=16).cuda().half()
    x = torch.randn(64, 32, device="cuda", dtype=torch.half, requires_grad=True)
    expected = model(x).detach().clone()
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    out = graphed(x)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # eager's backward, in a thread that has no context yet
@pytest.mark.parametrize("mode", ["forward", "training"])
def test_the_benchmark_times_single_calls_and_graphs_of_calls(mode: str, tmp_path: Path) -> None:
    case = mlp_case({k: v for k, v in STEP.items() if k != "kind"} | {"mode": mode, "rows": 65536})
    settings = Settings(sections=("call", "rotated", "host"), check="quick", rounds=5, host_steps=5, host_rounds=1)
    result = measure_case(case, settings)
    print(result)
    assert result.errors == []
    for rival in result.rivals.values():
        assert rival.checked["ok"], rival.error or rival.checked
        assert rival.rotated["calls"] >= 2
        assert rival.rotated["input_bytes"] > rival.rotated["l2_bytes"]
        assert rival.call["median"] > rival.rotated["median"] > 1.0
        assert rival.host["median"] > 1.0
