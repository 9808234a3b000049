"""Kernels whose programs share blocks, run on a pretended GPU with a tiny cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import megafuse
from megafuse.api import engine_of
from megafuse.core import device
from megafuse.workloads import get


@pytest.mark.parametrize("tokens", [4, 6])
def test_shared_walks_are_right(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(device.DEVICES[90], l2_bytes=1024)
    monkeypatch.setitem(device.DEVICES, 90, tiny)
    sizes = {"batch": 130, "tokens": tokens, "dim": 8 * tokens, "k": 2}
    module, inputs = get("rank_mixer_block").make(sizes, dtype=torch.float32)
    fused = megafuse.fuse(module, *inputs, target="interpret")
    phases = [p for k in engine_of(fused).bindings[0].compiled.step.kernels for p in k.phases]
    shared = [p for p in phases if len(p.loop) > 1 and any(1 < a.size <= tokens for a in p.fixed)]
    assert shared and any(r.by_rows for p in shared for r in p.trace.nest.roots)
    megafuse.check(module, *inputs, fused=fused, seeds=2).raise_if_failed()
