"""The host's time: cases, tables and profiles, on the CPU with few steps."""

from __future__ import annotations

import pytest
import torch

from megafuse.api import fuse
from megafuse.bench import host
from megafuse.bench.host_profile import profile_host, time_calls
from megafuse.bench.record import Record, read_record
from megafuse.core.errors import InputError
from megafuse.report.markdown import render

LOOP = host.Loop(rounds=1, steps=2, sync=lambda: None)


def small_case():
    return host.mlp_case(5, device="cpu", dtype="float32", width=8)


def test_training_and_inference_are_timed_once_validated(tmp_path):
    result, rivals = host.measure_host(small_case(), ["eager", "megafuse"], "quick", LOOP)
    assert result.errors == []
    assert [r.usable for r in rivals] == [True, True]
    assert all(len(result.rivals[name].host["raw"]) == 2 for name in ("eager", "megafuse"))
    assert list(result.facts["inference"]) == [host.LIBRARY_CALL, "eager", "megafuse"]
    record = Record("host", "2026-01-01T00:00:00", "command", "commit", {}, {}, {}, (result,))
    again = read_record(record.write(tmp_path))
    rows = host.rows_of(again)
    alone = ["eager step, one thread", "megafuse step, one thread"]
    calls = ["mm(out=) call", "eager call", "megafuse call"]
    assert [row[1] for row in rows] == ["eager step", "megafuse step", *alone, *calls]
    assert rows[0][2:3] + rows[0][4:] == ("yes", "1.00", "")
    assert rows[4][5] == "1.00"
    text = render([("host_1.json", again)])
    assert "x mm(out=)" in text and "| megafuse call |" in text


def test_a_rival_that_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setitem(host.make_rivals.__globals__["MAKERS"], "compile", lambda case: lambda x: 2 * case.module(x))
    result, _ = host.measure_host(small_case(), ["eager", "compile"], "quick", LOOP)
    assert not result.rivals["compile"].checked["ok"]
    assert result.rivals["compile"].host == {}
    assert "compile" not in result.facts["inference"]


def test_the_profile_has_every_call_of_the_launch_code():
    case = small_case()
    fused = fuse(case.module, *case.args, target="interpret")
    facts, text = profile_host(case, fused, 2)
    calls = facts["calls"]
    for direction in ("forward", "backward"):
        assert calls[direction]["current_stream"]["calls"] == 1
        launches = [facts["calls"] for name, facts in calls[direction].items() if name.startswith("k")]
        assert launches and set(launches) == {1}
    assert all(us > 0 for us in facts["parts"].values())
    for part in ("step", "finding the binding", "calls of the backward's launch code", "profile of forward, 2 times"):
        assert part in text
    assert all(p.grad is None for p in case.module.parameters())


def test_calls_are_counted_and_the_functions_put_back():
    names = {"add": lambda a, b: a + b, "forward": lambda: None, "seven": 7, "__loader__": print}
    before = dict(names)
    found = time_calls(names, lambda: names["add"](names["add"](1, 2), names["seven"]), 4, lambda: None)
    assert found["add"]["calls"] == 2
    assert list(found) == ["add"]
    assert names == before


def test_a_case_that_the_original_serves_has_no_profile():
    case = small_case()
    with pytest.warns(UserWarning, match="on the CPU"):
        fused = fuse(case.module, *case.args)
    with pytest.raises(InputError, match="the original ops serve it"):
        profile_host(case, fused, 2)


def test_options_that_are_not_usable_end_with_status_2(capsys):
    assert host.main(["--shapes", "1,2"]) == 2
    assert "B,T,D,k" in capsys.readouterr().out
    assert host.main(["--rivals", "nobody"]) == 2
    assert len(host.cases("1,8,64,2;4,16,128,2", "256,16")) == 4
    assert torch.is_grad_enabled()
