"""The report says what it is about."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import megafuse
from megafuse.validate import CheckOptions

FEW = CheckOptions(seeds=1, small_seeds=0, repeats=1)


def test_a_check_of_the_original_says_so() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    with pytest.warns(megafuse.NotFusedWarning):
        fused = megafuse.fuse(module, x)
    report = megafuse.check(module, x, fused=fused, options=FEW)
    assert report.ok and "compared with itself" in str(report) and "CPU" in report.notes[0]
    assert report.nothing_fused and "check of Sequential: nothing was fused" in str(report)
    other = megafuse.check(module, x, fused=copy.deepcopy(module), options=FEW)
    assert "did not come from megafuse.fuse()" in str(other)


def test_a_check_of_generated_kernels_has_no_note() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", megafuse.NotFusedWarning)
        fused = megafuse.fuse(module, x, target="interpret")
    report = megafuse.check(module, x, fused=fused, options=FEW)
    assert report.ok and not report.notes and "NOTE" not in str(report)


@pytest.mark.filterwarnings("error::megafuse.NotFusedWarning")
def test_a_check_that_fuses_for_itself_runs_generated_code_on_the_cpu() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    for report in (megafuse.check(module, x, options=FEW), megafuse.check(torch.tanh, x, options=FEW)):
        assert report.ok and not report.nothing_fused and not report.notes
    with pytest.warns(megafuse.NotFusedWarning):
        report = megafuse.check(module, x, target="auto", options=FEW)
    assert report.nothing_fused


def test_the_note_is_about_the_call_that_was_checked() -> None:
    """Not about others that the same fused module served."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fused = megafuse.fuse(module, torch.randn(3, 4, requires_grad=True), target="interpret")
    empty = megafuse.check(module, torch.randn(0, 4, requires_grad=True), fused=fused, options=FEW)
    assert empty.nothing_fused and "empty" in empty.notes[0]
    full = megafuse.check(module, torch.randn(3, 4, requires_grad=True), fused=fused, options=FEW)
    assert not full.nothing_fused and not full.notes
