"""check(): green for right candidates, red for every planted fault, in every dtype; structure, determinism, poison."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megafuse.core.errors import CheckError, InputError
from megafuse.validate import REQUIRED_FAULTS, CheckOptions, check
from validate_candidates import Candidate, GatedBlock, make_block, rounds_like_reference

FAST = CheckOptions(repeats=1)
DTYPES = [torch.float32, torch.bfloat16]


def example(dtype: torch.dtype, batch: int = 33) -> torch.Tensor:
    return torch.randn(batch, 2, 24).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64], ids=str)
def test_right_candidates_pass(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    block = GatedBlock().to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    candidates = [rounds_like_reference(block), block] if dtype == torch.float64 else [rounds_like_reference(block)]
    if dtype != torch.float64:  # the hand-written norm keeps fp32 statistics: not an fp64 candidate
        candidates.append(Candidate(block, wide))
    for candidate in candidates:
        check(block, example(dtype), fused=candidate, options=FAST).raise_if_failed()


@pytest.mark.parametrize("fault", REQUIRED_FAULTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_planted_faults_fail(dtype: torch.dtype, fault: str) -> None:
    block = make_block(dtype)
    report = check(block, example(dtype), fused=Candidate(block, fault=fault), options=FAST)
    assert not report.ok
    numeric = [v for v in report.verdicts if not v.ok]
    assert numeric, "a fault must show in the numbers, not only as a difference of structure"
    with pytest.raises(CheckError, match="FAILED"):
        report.raise_if_failed()


def test_inner_eps_is_seen_in_bf16_by_its_gain() -> None:
    block = make_block(torch.bfloat16)

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return rounds_like_reference(block, eps_inner=2e-3)(x)

    report = check(block, example(torch.bfloat16, 128), fused=wrong, options=FAST)
    assert any("systematic" in reason for reason in report.failures), report


def test_module_state_is_untouched() -> None:
    block = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU())
    before = {n: t.clone() for n, t in block.state_dict().items()}
    report = check(block, torch.randn(20, 8), fused=block, options=FAST)
    assert report.ok, report
    assert any(v.name == "state 1.running_mean" for v in report.verdicts)
    assert all(torch.equal(t, before[n]) for n, t in block.state_dict().items())
    assert all(p.grad is None for p in block.parameters())


def ffn(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, norm: nn.Module, scale: float) -> torch.Tensor:
    return norm(torch.tanh(x @ w1 + b1)) * scale


def test_functions_with_modules_plain_values_and_expanded_inputs() -> None:
    w1, norm = nn.Parameter(torch.randn(6, 10)), nn.LayerNorm(10)
    x, b1 = torch.randn(9, 6, requires_grad=True), torch.randn(1, 10).expand(9, 10).requires_grad_()
    report = check(ffn, x, w1, b1, norm, scale=0.5, fused=ffn, options=FAST)
    names = {v.name for v in report.verdicts}
    assert {"output out", "grad x", "grad w1", "grad b1", "grad norm.weight", "grad norm.bias"} <= names
    assert report.raise_if_failed() is report

    def no_scale(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, norm: nn.Module, scale: float) -> torch.Tensor:
        return ffn(x, w1, b1, norm, 1.0)

    assert not check(ffn, x, w1, b1, norm, scale=0.5, fused=no_scale, options=FAST).ok


def test_structure_is_compared() -> None:
    linear = nn.Linear(4, 4)
    x = torch.randn(5, 4, requires_grad=True)
    wrong = {
        "strides": lambda x: linear(x).t().contiguous().t(),
        "shape": lambda x: linear(x)[:-1],
        "dtype": lambda x: linear(x).double(),
        "requires_grad": lambda x: linear(x).detach(),
        "grad weight: missing": lambda x: F.linear(x, linear.weight.detach(), linear.bias),
        "instead of": lambda x: 3,
        "missing from the fused result": lambda x: (linear(x),),
    }
    for text, fused in wrong.items():
        assert text in " ".join(check(linear, x, fused=fused, options=FAST).structure), text


def test_unused_parameters_must_stay_without_gradient() -> None:
    class Half(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    half, x = Half(4, 4), torch.randn(5, 4)
    report = check(half, x, fused=lambda x: half(x) + 0.0 * half.bias, options=FAST)
    assert report.structure == ("grad bias: given, but the reference has none",)


def test_a_report_is_true_where_all_is_well() -> None:
    x = torch.randn(64, 4)
    assert check(torch.sin, x, fused=torch.sin, options=FAST)
    assert not check(torch.sin, x, fused=lambda x: 1.01 * torch.sin(x), options=FAST)


def test_nan_and_inf_must_be_where_the_reference_has_them() -> None:
    x = torch.randn(64, 4).abs() + 0.1
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    assert check(torch.exp, x, fused=torch.exp, options=FAST).ok
    report = check(torch.exp, x, fused=lambda x: torch.exp(x).nan_to_num(), options=FAST)
    assert any("NaN or Inf" in reason for reason in report.failures)
    assert not check(torch.exp, x, fused=torch.exp, options=CheckOptions(require_finite=True)).ok


def test_integer_outputs_are_exact() -> None:
    x = torch.randn(50, 3)
    assert check(lambda x: (x, x.argmax(-1)), x, fused=lambda x: (x + 0, x.argmax(-1)), options=FAST).ok
    report = check(lambda x: x.argmax(-1), x, fused=lambda x: x.argmin(-1), options=FAST)
    assert "integers must be equal" in " ".join(report.failures)


def test_nondeterministic_results_fail() -> None:
    calls = iter(range(1000))
    report = check(torch.sin, torch.randn(9), fused=lambda x: torch.sin(x) + 1e-6 * next(calls), options=FAST)
    assert "differs bitwise" in " ".join(report.determinism)


def test_results_in_reused_memory_fail() -> None:
    class Reusing(torch.autograd.Function):
        grad = torch.empty(6, 2)

        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x * 2

        @staticmethod
        def backward(ctx, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.mul(g, 2, out=Reusing.grad)

    x = torch.randn(6, 2, requires_grad=True)
    report = check(lambda x: x * 2, x, fused=Reusing.apply, options=FAST)
    assert "lies in memory of an earlier run" in " ".join(report.determinism)


def test_unwritten_elements_are_seen() -> None:
    def forgets_the_end(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[:-1] = x[:-1] * 2
        return out

    report = check(lambda x: x * 2, torch.randn(7, 3), fused=forgets_the_end, options=CheckOptions(seeds=2))
    assert report.poisoned
    assert any("NaN or Inf" in reason for reason in report.failures)


def test_bad_questions_are_refused() -> None:
    x = torch.randn(4, 4)
    with pytest.raises(InputError, match="random"):
        check(nn.Dropout(0.5), x, fused=nn.Dropout(0.5))
    with pytest.raises(InputError, match="module_or_fn"):
        check(3, x, fused=torch.sin)  # type: ignore[arg-type]
    for seeds in (0, 2.5, None, True, torch.tensor([1, 2])):
        with pytest.raises(InputError, match="seeds"):
            check(torch.sin, x, fused=torch.sin, seeds=seeds)
    for wrong in (True, torch.nn.ReLU):
        with pytest.raises(InputError, match="argument 'fused' is"):
            check(torch.sin, x, fused=wrong)
    other = nn.Linear(4, 4)
    with pytest.raises(InputError, match="differs in value"):
        check(nn.Linear(4, 4), x, fused=other)


def test_the_compiler_makes_the_candidate_when_none_is_given() -> None:
    seen = []

    def fuse(fn, *args, **kwargs):
        seen.append((args, kwargs))
        return fn

    x = torch.randn(4)
    assert check(torch.add, x, x, alpha=2, fuse=fuse).ok
    assert seen == [((x, x), {"alpha": 2})]
