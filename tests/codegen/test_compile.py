"""Printed Triton kernels compile for sm_90 with no GPU, without spills and with vector accesses."""

from __future__ import annotations

import json

import pytest

from codegen_running import worker


@pytest.mark.timeout(1800)  # hundreds of texts
def test_triton_texts_compile_for_hopper():
    every_case = pytest.importorskip("codegen_compile", reason="needs triton").every_case
    versions = pytest.importorskip("codegen_versions")
    printed = [line for line in worker("codegen_compile.py", MEGAFUSE_NO_PDL="0").split("\n") if line.startswith("{")]
    found = {record["name"]: record for record in map(json.loads, printed)}
    assert set(found) == {case.name for case in every_case()}
    # The programs of all functions have local arrays of their own (argument reduction of sin and cos).
    spilled = [name for name, record in found.items() if record["stack"] and name not in ("maps_f32", "maps_f64")]
    assert not spilled
    assert not {name: record["fault"] for name, record in found.items() if record["fault"]}
    assert found["layer_norm_backward_bf16_1280_1"]["registers"] <= 96
    assert not found["chain_one_f32"]["started_sums"], "a bias is added after the product, rounded once"
    state = (True, "1 times, first", "1 times, first") if versions.LAUNCHES_EARLY else (False, "0 times", "0 times")
    assert not {name for name, record in found.items() if (record["early"], *record["waits"]) != state}
    production = {name: r for name, r in found.items() if name.startswith("production_")}
    assert len(production) == (9 if versions.HAS_DESCRIPTORS else 0)
    for name, record in production.items():
        assert record["shared"] <= 227 * 1024 and record["registers"] <= 200, name
        assert record["wgmma"], f"{name} uses the tensor cores"
        assert record["tma"], f"{name} uses the copy engine"
    wide = ["layer_norm_bf16_1280", "layer_norm_backward_bf16_1280_1"]
    wide += ["mixing_bf16_16"] if versions.READS_SMALL_TILES_IN_VECTORS else []
    for name in wide:
        assert "v4.b32" in found[name]["vectors"], f"{name} reads 16 bytes at a time"
