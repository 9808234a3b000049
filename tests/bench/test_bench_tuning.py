"""The record of a tuning benchmark, from entries as the tuner keeps them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafuse.bench import tuning
from megafuse.bench.record import CaseResult, Record, RivalResult, read_record
from megafuse.runtime.plan_store import Entry

TILE = {"row_tile": 2, "rows_per_chunk": 8, "pieces": [64], "num_stages": 1}
ENTRY = Entry("key", "k0_x", (TILE,), 4, 8e-6, 2e-5, {"tuned_seconds": 1e-5, "dram_bytes": 16_000_000, "registers": 40})


def record_of(*cases):
    return Record("tuning", "2026-01-01T00:00:00", "command", "commit", {}, {}, {}, cases)


def test_a_kernels_line_has_both_times_and_its_share_of_the_copy_rate():
    facts = tuning.kernel_facts(ENTRY, 4e12)
    assert facts["heuristic_us"] == pytest.approx(20.0)
    assert facts["us"] == pytest.approx(10.0)
    assert facts["own_us"] == pytest.approx(8.0)
    assert facts["share_of_copy"] == pytest.approx(0.5)
    assert facts["registers"] == 40


def test_the_record_is_read_back_and_shown(tmp_path):
    tuned = RivalResult(
        "tuned", checked={"ok": True}, step={"median": 90.0}, kernels=[tuning.kernel_facts(ENTRY, 4e12)]
    )
    plain = RivalResult("heuristic", checked={"ok": True}, step={"median": 100.0})
    case = CaseResult("block", {"tried": 7, "tuning_seconds": 12.0}, {"heuristic": plain, "tuned": tuned})
    record = record_of(case)
    assert read_record(record.write(tmp_path)).cases[0].rivals["tuned"].kernels == tuned.kernels
    text = tuning.table(record)
    for part in ("7 tiles tried in 12 s", "k0_x", "20.0 ->      10.0 us  2.00x", "tuned tiles: 90 us, validated"):
        assert part in text
    wrong = replace(case, rivals={"tuned": replace(tuned, checked={"ok": False})}, errors=["tuning: it broke"])
    assert "WRONG" in tuning.table(record_of(wrong))
    assert "it broke" in tuning.table(record_of(wrong))


def test_options_that_are_not_usable_end_with_status_2(capsys):
    assert tuning.main(["--shapes", "1,2"]) == 2
    assert "B,T,D,k" in capsys.readouterr().out
