from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench_fakes import sample_record
from megafuse.bench import rank_mixer, workloads
from megafuse.bench.kernels import KernelTime, collect
from megafuse.bench.measure import Settings, kernel_row
from megafuse.bench.record import CaseResult, RivalResult, compact_lists, read_record
from megafuse.bench.run import failed, run_cases, settings_from
from megafuse.bench.table import summary
from megafuse.bench.traffic import NcuJob, join_predicted, measure_traffic, ncu_command, parse_ncu
from megafuse.core.errors import InputError, TargetError
from megafuse.report.__main__ import main as report_main
from megafuse.report.markdown import BEGIN, END, put_between_markers, render

HEADER = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
NCU = (
    "==PROF== Connected to process 1\n"
    + HEADER
    + '"0","1","square_bias","Command line","dram__bytes_read.sum","byte","1,000,000"\n'
    + '"0","1","square_bias","Command line","dram__bytes_write.sum","Mbyte","0.5"\n'
    + '"0","1","square_bias","Command line","gpu__time_duration.sum","ns","2,000"\n'
    + '"1","1","void at::foo<int>(int, float)","Command line","dram__bytes_read.sum","byte","7"\n'
    + '"1","1","void at::foo<int>(int, float)","Command line","dram__bytes_write.sum","byte","n/a"\n'
    + '"1","1","void at::foo<int>(int, float)","Command line","gpu__time_duration.sum","usecond","3"\n'
    + "==PROF== Disconnected\n"
)


def test_ncu_output_is_parsed() -> None:
    first, second = parse_ncu(NCU)
    assert (first.name, first.read, first.written, first.microseconds) == ("square_bias", 1e6, 5e5, 2.0)
    assert (second.name, second.total, second.microseconds) == ("void at::foo<int>", 7.0, 3.0)
    assert parse_ncu("==ERROR== no permission\n") == []


def test_measured_and_predicted_bytes_are_joined() -> None:
    rows = join_predicted([*parse_ncu(NCU), parse_ncu(NCU)[0]], {"square_bias": 1_000_000}, copy_rate=1.5e12)
    assert [r["name"] for r in rows] == ["square_bias", "void at::foo<int>"]
    assert rows[0]["predicted_bytes"] == 2_000_000
    assert rows[0]["measured_over_predicted"] == pytest.approx(1.5)
    assert rows[0]["share_of_copy"] == pytest.approx(0.5)


def test_profiler_command_profiles_the_worker() -> None:
    command = ncu_command(NcuJob({"kind": "rank_mixer", "shape": [1, 2, 4, 2]}, "eager"), Path("log.csv"))
    assert command[0] == "ncu"
    assert "--cache-control" in command
    assert json.loads(command[-1]) == {"source": {"kind": "rank_mixer", "shape": [1, 2, 4, 2]}, "rival": "eager"}


def test_without_the_profiler_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(TargetError, match="not on the PATH"):
        measure_traffic(NcuJob({}, "eager"))


def test_device_events_are_summed_by_name() -> None:
    class Event(argparse.Namespace):
        pass

    def event(name: str, us: float, device: str = "CUDA", note: bool = False) -> Event:
        span = argparse.Namespace(elapsed_us=lambda: us)
        kind = argparse.Namespace(name=device)
        return Event(name=name, device_type=kind, time_range=span, is_user_annotation=note)

    events = [
        event("a", 2),
        event("a", 4),
        event("b", 9),
        event("c", 1, "CPU"),
        event("## graph", 50),
        event("n", 5, note=True),
    ]
    assert collect(events, 2) == [KernelTime("b", 0.5, 4.5), KernelTime("a", 1.0, 3.0)]
    row = kernel_row(KernelTime("a", 2.0, 4.0), 1000, copy_rate=1e9)
    assert row["share_of_copy"] == pytest.approx(0.5)


def test_records_survive_writing_and_reading(tmp_path: Path) -> None:
    record = sample_record()
    path = record.write(tmp_path)
    assert path.name == "rank_mixer_20260102T030405.json"
    assert read_record(path) == record
    (tmp_path / "other.json").write_text('{"format": 0}')
    with pytest.raises(InputError, match="not a record"):
        read_record(tmp_path / "other.json")


def test_lists_of_numbers_take_one_line() -> None:
    data = {"raw": [1.5, -2e-05, 3], "empty": [], "words": ["a"], "nested": [[1, 2], {"x": [4]}]}
    text = compact_lists(json.dumps(data, indent=1))
    assert json.loads(text) == data
    assert "[1.5, -2e-05, 3]" in text


def test_summary_compares_with_eager_and_products() -> None:
    text = summary(sample_record())
    ours = next(line for line in text.splitlines() if "megafuse" in line).split()
    assert ours[3:] == ["yes", "10.0", "1.25", "0.50", "15.0", "0.50", "512", "0.50", "5.00", "4.00", "5", "7"]
    assert "compile not validated, not timed: no compiler" in text
    assert "4.00 TB/s" in text


def test_report_goes_between_markers(tmp_path: Path) -> None:
    sample_record().write(tmp_path)
    page = tmp_path / "results.md"
    page.write_text(f"# Results\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    assert report_main([str(tmp_path), "--into", str(page)]) == 0
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("# Results")
    assert text.endswith("after\n")
    assert "| `k0` | 1 | 3.0 | 1.0 | 2.0 |  |" in text
    assert put_between_markers("# Page\n", "x") == f"# Page\n\n{BEGIN}\n\nx\n\n{END}\n"
    assert "no record" in render([])


def run(tmp_path: Path, count: int, *options: str) -> tuple[list[CaseResult], list[str]]:
    args = rank_mixer.build_parser().parse_args(["--out", str(tmp_path), "--no-copy-rate", *options])

    def measure(source: object, settings: Settings) -> CaseResult:
        return CaseResult(str(source), rivals={"eager": RivalResult("eager", checked={"ok": True})})

    record = run_cases("rank_mixer", [{"n": i} for i in range(count)], settings_from(args), args, measure=measure)
    (file,) = tmp_path.glob("*.json")
    assert read_record(file).cases == record.cases
    assert failed(record) is (not record.cases)
    return list(record.cases), list(record.errors)


def test_a_run_writes_its_record_and_stops_at_its_limit(tmp_path: Path) -> None:
    cases, errors = run(tmp_path / "all", 2)
    assert len(cases) == 2
    assert errors == []
    cases, errors = run(tmp_path / "none", 2, "--time-limit", "1e-9")
    assert cases == []
    assert "2 cases were not run" in errors[0]


def test_sources_of_both_benchmarks() -> None:
    found = rank_mixer.sources("small", "bfloat16,float32", 7)
    assert [(s["shape"], s["dtype"]) for s in found[:2]] == [
        ([4, 16, 128, 2], "bfloat16"),
        ([4, 16, 128, 2], "float32"),
    ]
    assert len(rank_mixer.sources("all", "float16", 1)) == 15
    assert len(workloads.sources("block,mutation,swiglu_ffn", "bfloat16", "gpu")) > 11
    for wrong in ("nothing",):
        with pytest.raises(InputError, match="unknown workload"):
            workloads.sources(wrong, "bfloat16", "gpu")
    with pytest.raises(InputError, match=r"argument --dtypes: unknown element type 'int8'(.|\n)*tfloat32 \(tf32\)"):
        rank_mixer.sources("small", "int8", 1)
    with pytest.raises(InputError, match="unknown section"):
        settings_from(rank_mixer.build_parser().parse_args(["--what", "speed"]))


def test_workload_table_compares_with_the_block() -> None:
    def case(name: str, family: str, per_input: float) -> CaseResult:
        plan = {"kernels": [{}], "kernel_bytes_per_input": per_input, "coverage_by_elements": 1.0}
        ours = RivalResult("megafuse", checked={"ok": True}, plan=plan, host={"median": 5.0})
        eager = RivalResult("eager", checked={"ok": True}, host={"median": 10.0})
        return CaseResult(f"{name} f", {"family": family, "dtype": "f"}, {"eager": eager, "megafuse": ours})

    cases = (case("rank_mixer_block", "block", 10.0), case("tanh", "mutation", 11.0), case("ffn", "stranger", 4.0))
    record = sample_record()
    rows = workloads.workload_rows(type(record)(**{**record.__dict__, "kind": "workloads", "cases": cases}))
    assert [row[7] for row in rows] == ["1.00", "1.10", ""]
    assert rows[0][12] == "0.50"


@pytest.mark.parametrize("main", [rank_mixer.main, workloads.main])
def test_without_a_gpu_nothing_runs(
    main: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out
