"""Faults planted in the generated text of the RankMixer step: each turns the check red, and without one it is green."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megafuse
from megafuse.codegen.artifact import Artifact
from megafuse.compiler import Compiled
from megafuse.validate import REQUIRED_FAULTS, CheckOptions, CheckReport, Fault, check, plant, require_complete

RANK_MIXER = Path(__file__).resolve().parents[2] / "rank_mixer"
if str(RANK_MIXER) not in sys.path:
    sys.path.insert(0, str(RANK_MIXER))

from rank_mixer_src.block import RankMixerBlock  # noqa: E402

SHAPE = (150, 4, 16)  # rows enough for several partials of each column sum
OPTIONS = CheckOptions(seeds=2, small_seeds=1, repeats=1)


def edit_kernels(artifact: Artifact, change: Callable[[str], str]) -> Artifact:
    """All kernel texts changed."""
    return replace(artifact, kernels=tuple(replace(k, text=change(k.text)) for k in artifact.kernels))


def edit_host(artifact: Artifact, change: Callable[[str], str]) -> Artifact:
    """The launch code changed."""
    return replace(artifact, host=replace(artifact.host, text=change(artifact.host.text)))


def dropped_bias(artifact: Artifact) -> Artifact:
    """Loads of b1 give zero."""
    return edit_kernels(
        artifact, lambda t: re.sub(r"^( +ffn_b1_v\d+ = )(.*)$", r"\g<1>0 * (\2)", t, flags=re.MULTILINE)
    )


def swapped_halves(artifact: Artifact) -> Artifact:
    """The projection's halves trade places, in the product and in its bias."""

    def swap(text: str) -> str:
        halves = re.compile(r"^( +(?:dot|ffn_b1)_v\d+ = \w+\[.*?\bcol)( \+ 32)?(.*\])$", re.MULTILINE)
        return halves.sub(lambda m: m[1] + ("" if m[2] else " + 32") + m[3], text)

    return edit_kernels(artifact, swap)


def missing_partial(artifact: Artifact) -> Artifact:
    """The first program's partials of norm2's gradients are zero when the finisher reads them."""
    text = artifact.host.text
    finisher = r"^    k\d+_d_\w+\(\s*stream,\s+(partial_\d+),\s+(partial_\d+),"
    launch = re.search(finisher, text, re.MULTILINE)
    assert launch is not None  # its first line, or lines
    lines = []
    for name in launch.groups():
        row = re.search(rf"^    {name} = workspace .*# f32\[\d+, \d+, (\d+)\]$", text, re.MULTILINE)
        assert row is not None
        lines.append(f"    {name}.tensor(f32)[:{row[1]}].zero_()")
    return edit_host(artifact, lambda t: t.replace(launch[0], "\n".join([*lines, launch[0]]), 1))


def stale_workspace(artifact: Artifact) -> Artifact:
    """The first product of a step is computed once and read again in every later call."""

    def keep(text: str) -> str:
        product = re.search(r"^    (bmm\(.*, out=(\w+)\)).*$", text, re.MULTILINE)
        assert product is not None
        line = f"    {product[1]}\n    {product[2]}.copy_(_OLD.setdefault('z', {product[2]}.clone()))"
        return text.replace("\n\ndef forward", "\n_OLD = {}\n\n\ndef forward", 1).replace(product[0], line, 1)

    return edit_host(artifact, keep)


def wrong_eps(artifact: Artifact) -> Artifact:
    """The outer norms use 1e-5 instead of 1e-3."""
    return edit_kernels(artifact, lambda t: re.sub(r"\+ 0\.001\b", "+ 1e-05", t))


FUNCTIONS = {
    "dropped_bias": dropped_bias,
    "swapped_halves": swapped_halves,
    "missing_dgamma_partial": missing_partial,
    "stale_workspace": stale_workspace,
    "wrong_eps": wrong_eps,
}
FAULTS = require_complete(Fault(name, REQUIRED_FAULTS[name], fn) for name, fn in FUNCTIONS.items())
SUSPECTS = {
    "dropped_bias": "output",
    "swapped_halves": "output",
    "missing_dgamma_partial": "grad norm2.gamma",
    "stale_workspace": "output",
    "wrong_eps": "output",
}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def compiled_block(request: pytest.FixtureRequest) -> tuple[Any, torch.Tensor, Any]:
    """The block, an input, and its fused twin."""
    torch.manual_seed(0)
    batch, tokens, dim = SHAPE
    block = RankMixerBlock(tokens, dim, 2, dtype=request.param)
    x = torch.randn(batch, tokens, dim, dtype=request.param, requires_grad=True)
    return block, x, megafuse.fuse(block, x, target="interpret")


def report_of(block: Any, x: torch.Tensor, fused: Any) -> CheckReport:
    return check(block, x, fused=fused, options=OPTIONS)


def test_the_unmodified_step_passes(compiled_block: tuple[Any, torch.Tensor, Any]) -> None:
    report_of(*compiled_block).raise_if_failed()


@pytest.mark.parametrize("name", REQUIRED_FAULTS)
def test_fault_is_found(
    name: str, compiled_block: tuple[Any, torch.Tensor, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is loaded anew from the faulty artifact; nothing is compiled again."""
    block, x, fused = compiled_block
    compiled = megafuse.api.engine_of(fused).bindings[0].compiled
    assert compiled is not None
    faulty = plant(FAULTS[name], compiled.artifact("numpy"))
    monkeypatch.setattr(Compiled, "artifact", lambda *_, **__: faulty)
    monkeypatch.setattr(megafuse.compiler.engine, "compile_captured", lambda *_, **__: compiled)
    broken = megafuse.fuse(block, x, target="interpret")
    report = report_of(block, x, broken)
    assert not report.ok
    assert any(SUSPECTS[name] in failure for failure in report.failures), report.failures
