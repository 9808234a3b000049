"""The benchmark of MLPs: its cases, the rotation of inputs, its tables, and what it says without a GPU."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench_fakes import FakeTimer, times
from megafuse.bench import measure, mlp, mlp_offline, rivals, rotation
from megafuse.bench.cases import make_case
from megafuse.bench.measure import SECTIONS, Settings, measure_case
from megafuse.bench.mlp_table import mlp_tables
from megafuse.bench.record import CaseResult, Record, RivalResult, command_line, read_record
from megafuse.bench.rivals import Rival, make_rival
from megafuse.bench.rotation import graphed_calls, rotate, single_calls
from megafuse.bench.run import settings_from
from megafuse.bench.step import make_step
from megafuse.bench.verify import Checked
from megafuse.core.errors import InputError
from megafuse.report.markdown import ROWS_INSIDE, render

SMALL = {
    "kind": "mlp", "rows": 48, "widths": [5, 9, 3], "activation": "silu", "bias": True, "weight_norm": False,
    "seed": 7, "dtype": "float32", "mode": "training",
}  # fmt: skip
NEEDS_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


def parsed(*argv: str, kind: str = "mlp") -> argparse.Namespace:
    return mlp.build_parser(kind).parse_args(argv)


def test_the_default_cases_are_the_sizes_of_the_tables() -> None:
    found = mlp.sources(parsed())
    assert [s["rows"] for s in found] == [2**n for n in range(6, 17)]
    assert all(s["widths"] == [128, 128, 128, 128] and s["mode"] == "forward" for s in found)
    assert not any(s["bias"] or s["weight_norm"] for s in found)
    normed = mlp.sources(parsed(kind="weightnorm"))
    assert all(s["weight_norm"] and s["mode"] == "training" for s in normed)


def test_lists_of_modes_depths_and_types_are_combined() -> None:
    found = mlp.sources(
        parsed("--sizes", "8,9", "--D", "4", "--H", "6", "--OUT", "2", "--layers", "3,5", "--mode", "forward,training",
               "--dtype", "float16,bfloat16", "--bias")
    )  # fmt: skip
    assert len(found) == 16
    assert found[0]["widths"] == [4, 6, 6, 2]
    assert found[-1] == {
        "kind": "mlp", "rows": 9, "widths": [4, 6, 6, 6, 6, 2], "activation": "softplus", "bias": True,
        "weight_norm": False, "seed": found[0]["seed"], "dtype": "bfloat16", "mode": "training",
    }  # fmt: skip
    assert mlp.sources(parsed("--widths", "48,64,40,24"))[0]["widths"] == [48, 64, 40, 24]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--sizes", "64,x"), "argument --sizes: '64,x'"),
        (("--sizes", "0"), "argument --sizes: '0'"),
        (("--layers", "0"), "argument --layers"),
        (("--widths", "5"), r"argument widths: \[5\]"),
        (("--D", "0"), r"argument widths: \[0, 128"),
        (("--dtype", "float8"), "argument --dtype: unknown element type 'float8'"),
        (("--mode", "backward"), "argument --mode: 'backward'"),
        (("--activation", "softmin"), "argument activation: unknown name"),
    ],
)
def test_unusable_options_are_named(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=message):
        mlp.sources(parsed(*argv))
    assert mlp.main(list(argv)) == 2
    assert "error: argument" in capsys.readouterr().out


def test_iters_and_warmup_reach_the_settings() -> None:
    settings = settings_from(parsed("--iters", "200", "--warmup", "50"))
    assert (settings.rounds, settings.warmup) == (200, 50)
    assert tuple(settings.sections) == ("call", "rotated", "host")
    assert set(settings.sections) <= set(SECTIONS)
    assert settings.rivals == ["eager", "compile", "max-autotune", "megafuse"]


def test_a_training_case_runs_forward_and_backward_and_a_forward_case_no_graph() -> None:
    training = make_case(SMALL, device="cpu")
    make_step(training, training.module)()
    assert training.args[0].grad is not None
    forward = make_case({**SMALL, "mode": "forward"}, device="cpu")
    assert forward.cotangents == ()
    out = make_step(forward, forward.module)()
    assert not out.requires_grad
    assert torch.equal(out, forward.module(forward.args[0]))
    seen = make_step(forward, lambda x: torch.tensor(torch.is_grad_enabled()))()
    assert not seen.item()
    assert make_case(training.source, device="cpu").name == training.name
    assert torch.equal(make_case(training.source, device="cpu").args[0], training.args[0])
    normed = make_case({**SMALL, "weight_norm": True}, device="cpu")
    assert "0.parametrizations.weight.original0" in normed.module.state_dict()
    with pytest.raises(InputError, match="unknown mode"):
        make_case({**SMALL, "mode": "both"}, device="cpu")


@pytest.mark.parametrize("mode", ["forward", "training"])
def test_ours_validates_and_a_wrong_rival_is_not_timed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case({**SMALL, "mode": mode}, device="cpu")
    wrong = nn.Sequential(*case.module[:1], nn.Tanh(), *case.module[2:])
    monkeypatch.setitem(rivals.MAKERS, "compile", lambda case: wrong)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    settings = Settings(rivals=("eager", "compile", "megafuse"), sections=("host",), check="quick", host_steps=2)
    result = measure_case(case, settings)
    checked = {name: rival.checked["ok"] for name, rival in result.rivals.items()}
    assert checked == {"eager": True, "compile": False, "megafuse": True}, result
    assert result.rivals["megafuse"].host
    assert result.rivals["compile"].host == {}
    assert result.errors == []


def test_a_forward_pass_is_validated_as_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients another program runs than in training: that one has to be right."""
    case = make_case({**SMALL, "mode": "forward"}, device="cpu")

    def wrong_without_gradients(x: torch.Tensor) -> torch.Tensor:
        return case.module(x) * (1.0 if torch.is_grad_enabled() else 1.01)

    monkeypatch.setitem(rivals.MAKERS, "compile", lambda case: wrong_without_gradients)
    assert not make_rival("compile", case).usable


def test_inputs_take_turns_until_they_exceed_the_cache() -> None:
    case = make_case(SMALL, device="cpu")
    each = case.args[0].nbytes + case.cotangents[0].nbytes
    found = rotate(case, 10 * each)
    assert len(found.cases) == 13
    assert found.as_dict() == {"calls": 13, "input_bytes": 13 * each, "l2_bytes": 10 * each}
    places = {c.args[0].data_ptr() for c in found.cases} | {c.cotangents[0].data_ptr() for c in found.cases}
    assert len(places) == 26
    assert all(c.args[0].requires_grad and c.args[0].is_leaf for c in found.cases)
    assert torch.equal(found.cases[3].args[0], case.args[0].roll(3, 0))
    assert not torch.equal(found.cases[3].args[0], case.args[0])
    assert len(rotate(case, 1).cases) == 2
    assert len(rotate(make_case({**SMALL, "rows": 1}, device="cpu"), 50 * 2**20).cases) == rotation.MOST_CALLS


def fake_step(timer: FakeTimer, name: str, milliseconds: float) -> Any:
    return lambda case: timer.work(f"{name}{int(case.args[0][0, 0])}", milliseconds)


def numbered(count: int) -> rotation.Rotation:
    case = make_case({**SMALL, "mode": "forward"}, device="cpu")
    cases = [rotation.replace(case, args=(torch.full((1, 1), float(n)),)) for n in range(count)]
    return rotation.Rotation(tuple(cases), 0, 0)


def test_single_calls_start_on_an_idle_device_with_the_next_inputs() -> None:
    timer, errors = FakeTimer(), list[str]()
    steps = {"a": fake_step(timer, "a", 2.0), "b": fake_step(timer, "b", 3.0)}
    found = single_calls(numbered(3), steps, 4, 1, timer, errors)
    assert errors == []
    assert found["a"].raw == (2000.0,) * 5
    assert found["b"].raw == (3000.0,) * 5
    assert timer.log[:2] == ["a0", "b0"]  # warm-up
    timed = timer.log[2:-1]
    assert timed[::2] == ["sync"] * 10
    assert "flush" not in timer.log
    assert [n for n in timed if n.startswith("a")] == ["a1", "a2", "a0", "a1", "a2"]
    assert timed[1::2][:4] == ["a1", "b1", "b2", "a2"]


def test_graphs_hold_all_calls_and_give_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def __init__(self, work: Any) -> None:
            self.replay = work

    monkeypatch.setattr(rotation, "capture", lambda work, warmup: Graph(work))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer, errors = FakeTimer(), list[str]()
    found = graphed_calls(numbered(4), {"a": fake_step(timer, "a", 2.0)}, 2, timer, errors)
    assert errors == []
    assert found["a"].raw == (2000.0,) * 3
    assert timer.log[:4] == ["a0", "a1", "a2", "a3"]
    assert timer.log.count("flush") == 3


def test_what_did_not_validate_cannot_be_rotated() -> None:
    timer, errors = FakeTimer(), list[str]()
    rival = Rival("compile", lambda x: x, 0.0, checked=Checked(False, "the rule", ("output out: too large",)))
    assert single_calls(numbered(2), {"compile": rival.step}, 2, 1, timer, errors) == {}
    assert graphed_calls(numbered(2), {"compile": rival.step}, 2, timer, errors) == {}
    assert len(errors) == 2
    assert all("compile is not timed: output out: too large" in e for e in errors)


def spread(median: float) -> dict[str, Any]:
    return {**times(median), "p20": median - 0.5, "p80": median + 0.5, "input_bytes": 9, "l2_bytes": 8}


def sample(rows: int, inside: bool = False) -> CaseResult:
    facts = {k: v for k, v in SMALL.items() if k != "kind"} | {"rows": rows}
    eager = RivalResult("eager", checked={"ok": True}, call=spread(40.0), rotated=spread(12.0), host=spread(50.0))
    ours = RivalResult("megafuse", checked={"ok": True}, call=spread(10.0), rotated=spread(4.0))
    if inside:
        eager.rotated["input_bytes"] = ours.rotated["input_bytes"] = 7
    wrong = RivalResult("compile", checked={"ok": False, "failures": ["output out"]})
    return CaseResult(f"{rows}", facts, {r.name: r for r in (eager, ours, wrong)})


def sample_record(*cases: CaseResult) -> Record:
    facts = {"environment": {"gpu": "GPU"}, "settings": {}, "copy": {}}
    return Record("mlp", "2026-01-02T03:04:05", "megafuse bench mlp", "abc", cases=cases, **facts)


def test_tables_stand_side_by_side_with_ours_first() -> None:
    graph, call, overhead, host = mlp_tables(sample_record(sample(64, inside=True), sample(128)))
    assert graph.title.startswith("training, 2 layers 5-9-3, silu, bias, float32. GPU time")
    assert graph.rows == (
        ("rows", "megafuse", "eager", "compile", "vs eager", "vs compile"),
        ("64+", "4.0 (3.5-4.5)", "12.0 (11.5-12.5)", "not validated", "3.00x", ""),
        ("128", "4.0 (3.5-4.5)", "12.0 (11.5-12.5)", "not validated", "3.00x", ""),
    )
    assert call.rows[1][:3] == ("64", "10.0 (9.5-10.5)", "40.0 (39.5-40.5)")
    assert overhead.rows[1] == ("64", "6.0", "28.0", "")
    assert host.rows[1][1:3] == ("", "50.0 (49.5-50.5)")


def test_each_series_has_tables_of_its_own() -> None:
    other = sample(64)
    other.facts["mode"] = "forward"
    titles = [t.title for t in mlp_tables(sample_record(sample(64), other, sample(256)))]
    assert len(titles) == 8
    assert sum(t.startswith("forward") for t in titles) == 4


def test_the_report_shows_the_tables(tmp_path: Path) -> None:
    path = sample_record(sample(64, inside=True)).write(tmp_path)
    text = render([(path.name, read_record(path))])
    assert "| rows | megafuse | eager | compile | vs eager | vs compile |" in text
    assert "| 64+ | 4.0 (3.5-4.5) | 12.0 (11.5-12.5) | not validated | 3.00x |  |" in text
    assert ROWS_INSIDE in text
    assert "- 64: compile not validated, not timed: output out" in text


def test_a_record_names_the_command_without_this_machines_folders() -> None:
    assert command_line(["/somewhere/bin/megafuse", "bench", "mlp"]) == "megafuse bench mlp"
    assert command_line(["benchmarks/mlp.py", "--json"]) == "python benchmarks/mlp.py --json"


@NEEDS_NO_GPU
def test_without_a_gpu_the_plan_is_shown_and_nothing_is_timed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["--sizes", "16,40", "--widths", "5,9,3", "--activation", "relu", "--dtype", "float32"]
    assert mlp.main([*argv, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(mlp.NO_GPU)
    assert out.strip().endswith(mlp.NO_GPU)
    assert "nothing was timed" in out
    assert "forward, 2 layers 5-9-3, relu, float32, planned for NVIDIA H200 (sm_90)" in out
    assert "compiled kernels at 40 rows" in out
    assert list(tmp_path.iterdir()) == []


@NEEDS_NO_GPU
def test_without_a_gpu_json_says_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_offline, "compiled_resources", lambda made: {})
    argv = ["--sizes", "16", "--widths", "5,9,3", "--mode", "forward,training", "--json"]
    assert mlp.weightnorm_main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["timed"] is False
    assert "nothing was timed" in found["why"]
    forward, training = found["cases"]
    assert forward["rows"] == training["rows"] == 16
    assert 0 < forward["seconds"] < training["seconds"]
    assert training["opaque"] == 0
    assert len(training["kernels"]) > len(forward["kernels"]) > 0


@pytest.mark.parametrize("wanted", [False, True], ids=["tables", "json"])
def test_a_run_writes_its_record_and_prints_what_was_asked_for(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = itertools.count()

    def measured(kind: str, listed: Any, settings: Settings, args: argparse.Namespace, show: Any) -> Record:
        assert kind == "mlp"
        record = sample_record(*(sample(s["rows"]) for s in listed))
        print(f"progress {next(numbers)}")
        print(show(record))
        return record

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mlp, "prepare_gpu", lambda: None)
    monkeypatch.setattr(mlp, "run_cases", measured)
    argv = ["--sizes", "64,128", "--out", str(tmp_path), *["--json"] * wanted]
    assert mlp.main(argv) == 1  # a rival did not validate
    printed = capsys.readouterr()
    if wanted:
        assert [c["name"] for c in json.loads(printed.out)["cases"]] == ["64", "128"]
        assert "progress" in printed.err
    else:
        assert "vs eager" in printed.out
        assert "compile not validated, not timed: output out" in printed.out


@pytest.mark.parametrize("mode", ["forward", "training"])
def test_both_kinds_of_timing_are_kept_for_each_rival(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way from a case to its results, on a device whose clock stands still but for flushes."""

    class Graph:
        def __init__(self, work: Any) -> None:
            self.replay = work

    properties = argparse.Namespace(L2_cache_size=6000)
    monkeypatch.setattr(measure, "CudaTimer", FakeTimer)
    monkeypatch.setattr(rotation, "capture", lambda work, warmup: Graph(work))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    case = make_case({**SMALL, "mode": mode}, device="cpu")
    settings = Settings(sections=("call", "rotated"), check="quick", rounds=2, warmup=1)
    result = measure_case(case, settings)
    assert result.errors == []
    for name in ("eager", "megafuse"):
        rival = result.rivals[name]
        assert rival.checked["ok"], rival.checked
        for found in (rival.call, rival.rotated):
            assert found["raw"] == [0.0] * 3
            assert found["input_bytes"] > found["l2_bytes"] == 6000
            assert found["calls"] * case.args[0].nbytes <= found["input_bytes"]
