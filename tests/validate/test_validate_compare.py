"""The comparison and the rule on tensors with known errors."""

from __future__ import annotations

import pytest
import torch

from megafuse.validate import RULE, compare, judge, measure, same_bits
from megafuse.validate.tolerance import PRECISIONS, ulp


def rounded(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """An oracle and its correctly rounded value."""
    exact = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return exact.to(dtype), exact


def ok(sample, **options) -> bool:
    return all(v.ok for v in judge([sample], **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_one_more_rounding_passes_where_the_reference_is_exact_and_three_do_not(dtype: torch.dtype) -> None:
    near, exact = rounded((64, 128), dtype)
    assert ok(measure("x", "output", near, exact.to(dtype), exact))
    unfused_is_exact = near.double()  # the oracle is representable: the unfused error is exactly 0
    eps = PRECISIONS[dtype].eps
    one = (unfused_is_exact * (1 + eps * (torch.rand(near.shape, dtype=torch.float64) - 0.5) * 0.7)).to(dtype)
    assert ok(measure("x", "output", one, near, unfused_is_exact))
    three = unfused_is_exact + 3 * eps * (torch.rand(near.shape, dtype=torch.float64) - 0.5) * 2
    assert not ok(measure("x", "output", three.to(dtype), near, unfused_is_exact))


def test_verdict_does_not_depend_on_units() -> None:
    near, exact = rounded((64, 128), torch.float32)
    fused = near * (1 + 2e-7)
    for scale in (1.0, 1.9, 2.1, 1e-3, 1e6):
        sample = measure("x", "output", fused * scale, near * scale, exact * scale)
        assert not ok(sample)
        assert ok(measure("x", "output", near * scale, near * scale, exact * scale))
        assert ulp(sample.oracle_rms, torch.float32) == pytest.approx(2.0**-23 * sample.oracle_rms)


def test_gain_sees_a_small_systematic_error_that_rounding_hides() -> None:
    near, exact = rounded((256, 128), torch.bfloat16)
    off = (exact * 1.0008).to(torch.bfloat16)
    (verdict,) = judge([measure("x", "output", off, near, exact)])
    assert verdict.fused_rms < verdict.rms_limit
    assert "systematic" in verdict.reasons[0]
    per_row = exact * (1 + 2.0**-9 * torch.randn(256, 1, dtype=torch.float64))  # rounded row statistics: no bias
    assert ok(measure("x", "output", per_row.to(torch.bfloat16), near, exact))


def test_one_wrong_element_is_found_and_located() -> None:
    near, exact = rounded((3, 40, 50), torch.bfloat16)
    fused = near.clone()
    fused[2, 7, 11] += 0.5
    (verdict,) = judge([compare("x", [(near, near, exact), (fused, near, exact)])])
    assert not verdict.ok
    assert verdict.witnesses[0].coords == (2, 7, 11)
    assert verdict.witnesses[0].seed == 1
    assert "seed 1 [2, 7, 11]" in str(verdict)


def test_masks_and_skipped_elements() -> None:
    near, exact = rounded((10, 10), torch.float32)
    reference, fused = near.clone(), near.clone()
    reference[0, 0], fused[0, 0] = float("inf"), float("-inf")
    reference[1, 1] = fused[1, 1] = float("nan")
    sample = measure("x", "output", fused, reference, exact)
    assert (sample.mask_errors, sample.skipped, sample.elements) == (1, 2, 98)
    assert judge([sample])[0].witnesses[0].coords == (0, 0)
    fused[0, 0] = float("inf")
    sample = measure("x", "output", fused, reference, exact)
    assert ok(sample)
    assert not ok(sample, require_finite=True)


def test_short_tensors_are_pooled_whatever_their_units() -> None:
    samples, bad = [], None
    for index, scale in enumerate((1e-6, 1.0, 1e5)):
        near, exact = rounded((300,), torch.float32, index)
        sample = measure(f"g{index}", "grad", near * scale, (exact * scale).float(), exact * scale)
        noisy = near.double() * scale * (1 + 4e-7 * torch.randn(300, dtype=torch.float64))
        bad = bad or measure("g0", "grad", noisy.float(), (exact * scale).float(), exact * scale)
        samples.append(sample)
    *_, pool = judge(samples)
    assert pool.ok
    assert pool.elements == 900
    *_, pool = judge([bad, *samples[1:]])
    assert not pool.ok
    assert "g0" in pool.reasons[-1]


def test_cancelling_tensor_does_not_blind_the_pool() -> None:
    near, exact = rounded((300,), torch.float32)
    noise = 1e-8 * torch.randn(300)
    zero = measure("zero", "grad", noise, noise.flip(0), torch.zeros(300, dtype=torch.float64))
    wrong = measure("g", "grad", near * (1 + 3e-6), near, exact)
    assert all(v.ok for v in judge([zero, measure("g", "grad", near, near, exact)]))
    assert not judge([zero, wrong])[-1].ok


def test_fp64_is_judged_by_its_fp32_surrogate() -> None:
    a = torch.randn(4096, 60, dtype=torch.float64)
    exact, other = sum(a.unbind(-1)), sum(a.flip(-1).unbind(-1))
    narrow = sum(a.float().unbind(-1))
    assert not ok(measure("x", "output", other, exact, exact))
    assert ok(measure("x", "output", other, exact, exact, surrogate=narrow))
    assert not ok(measure("x", "output", a.float().sum(-1).double(), exact, exact, surrogate=narrow))


def test_chunks_empty_tensors_scalars_and_bad_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    near, exact = rounded((50, 9), torch.bfloat16)
    whole = measure("x", "output", near, near, exact)
    monkeypatch.setitem(measure.__globals__, "_CHUNK", 40)
    parts = measure("x", "output", near, near, exact)
    assert parts.fused_square == pytest.approx(whole.fused_square)
    assert parts.gain_error == pytest.approx(whole.gain_error)
    assert ok(measure("x", "output", near[:0], near[:0], exact[:0]))
    assert ok(measure("x", "output", near[0, 0], near[0, 0], exact[0, 0]))
    with pytest.raises(ValueError, match="shapes differ"):
        measure("x", "output", near, near[:1], exact)
    with pytest.raises(KeyError, match="no tolerance"):
        measure("x", "output", near.to(torch.float8_e4m3fn), near.to(torch.float8_e4m3fn), exact)
    with pytest.raises(KeyError, match="no tolerance"):
        measure("x", "output", near.to(torch.complex64), near.to(torch.complex64), exact)
    with pytest.raises(ValueError, match="nothing to compare"):
        compare("x", [])


def test_rule_widens_smoothly_below_the_full_sample() -> None:
    assert RULE.widen(4096) == RULE.widen(10**6) == 1.0
    assert RULE.widen(4095) == pytest.approx(1.0, abs=1e-4)
    assert RULE.widen(40) == pytest.approx(1 + 4 * (40**-0.5 - 1 / 64))


def test_same_bits() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert same_bits(nan, nan.clone())
    assert same_bits(None, None)
    assert not same_bits(nan, None)
    assert not same_bits(nan, torch.tensor([2.0, float("nan")]))
    assert not same_bits(torch.tensor([1]), torch.tensor([2]))
