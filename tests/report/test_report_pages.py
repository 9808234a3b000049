from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafuse.bench.cases import ROOT
from megafuse.bench.record import CaseResult, Record, RivalResult
from megafuse.core.errors import InputError
from megafuse.report.__main__ import main, updated
from megafuse.report.markdown import render
from megafuse.report.pages import MAKERS, fill

PAGE = "# Report\n\n<!-- table: {} -->\nold\n<!-- table: end -->\n\nafter\n"
STEP = {"mean": 10.0, "min": 9.0, "p20": 9.5, "median": 10.5, "p80": 11.0, "max": 12.0, "samples": 20}
MIB = 2**20
PAGES = {
    "docs/results.md": ("benchmarks/results",),
    "docs/rank_mixer/report.md": ("benchmarks/results", "benchmarks/checks"),
    "docs/results/mlp.md": ("benchmarks/results/mlp",),
}


def record(started: str = "2026-01-02T03:04:05", name: str = "case a") -> Record:
    """One case of two rivals with every section."""
    memory = {"peak": 9 * MIB, "before": 4 * MIB, "gradients": MIB, "activation": 4 * MIB}
    eager = RivalResult("eager", checked={"ok": True}, step={**STEP, "mean": 20.0}, memory=memory)
    kernels = [
        {"name": "k0", "launches": 1.0, "us": 3.0, "predicted_bytes": 1_000_000_000},
        {"name": "library", "launches": 2.0, "us": 4.0},
    ]
    by_kernel = [
        {"name": "k0", "launches": 1, "us": 3.0, "measured_bytes": 2e9, "predicted_bytes": 1e9},
        {"name": "library", "launches": 2, "us": 4.0, "measured_bytes": 3e9},
    ]
    ours = RivalResult(
        "megafuse",
        checked={"ok": True},
        step=STEP,
        memory={**memory, "activation": 2 * MIB},
        kernels=kernels,
        traffic={"total": 5e9, "by_kernel": by_kernel},
        plan={"dot_bytes": 2.5e9},
    )
    eager.rotated, ours.rotated = ({"median": m, "p20": m - 1, "p80": m + 1} for m in (12.0, 4.0))
    mlp = {"rows": 64, "widths": [8, 16, 4], "activation": "relu", "bias": False, "weight_norm": False}
    facts = mlp | {"mode": "forward", "dtype": "float16"}
    case = CaseResult(name, facts, rivals={r.name: r for r in (eager, ours)})
    settings = {"commit": "a" * 40 + "+changes", "environment": {"gpu": "GPU"}, "settings": {}, "copy": {}}
    return Record(kind="rank_mixer", started=started, command="python bench.py", cases=(case,), **settings)


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Path]:
    """Files of two records and of a demo's checks, by name."""
    second = record("2026-01-02T03:04:06", "case b")
    paths = [r.write(tmp_path) for r in (record(), second)]
    check = {"title": "a block", "target": "interpret", "ok": True, "text": "check: passed\n  ok  out"}
    facts = {"commit": "b" * 40, "environment": {"python": "3", "torch": "2", "numpy": "1"}}
    demo = tmp_path / "demo.json"
    demo.write_text(json.dumps({**facts, "checks": [{"title": "compiled", "ok": True}, check]}))
    return {p.stem: p for p in (*paths, demo)}


FIRST, SECOND = "rank_mixer_20260102T030405", "rank_mixer_20260102T030406"
EXPECTED = {
    "machines": [f"| `{FIRST}` | 2026-01-02T03:04:05 | aaaaaaa+changes | GPU |", "python bench.py"],
    "steps": ["| case a | eager | yes | 20.0 | 1.00 |", "| case a | megafuse | yes | 10.0 | 0.50 |"],
    "samples": ["| case a | megafuse | 20 | 10.0 | 9.0 | 9.5 | 10.5 | 11.0 | 12.0 |"],
    "memory": ["| case a | megafuse | 9 | 4 | 1 | 2 | 0.50 |"],
    "busy": ["| case a | megafuse | 3 | 7.0 |"],
    "traffic": [
        "| generated kernels | 2.00 | 1.00 |",
        "| library products | 3.00 | 2.50 |",
        "| together | 5.00 | 3.50 |",
    ],
    "kernels": ["| `k0` | 1 | 3.0 | 1000.0 | 2000.0 |", "| `library` | 2 | 4.0 |  | 3000.0 |"],
    "mlps": ["forward, 2 layers 8-16-4, relu, float16. GPU time", "| 64 | 4.0 (3.0-5.0) | 12.0 (11.0-13.0) | 3.00x |"],
    "checks": ["Commit bbbbbbb, python 3, torch 2, numpy 1.", "```\ncheck: passed\n  ok  out\n```"],
}


@pytest.mark.parametrize("name", MAKERS)
def test_each_table_shows_what_its_record_holds(name: str, known: dict[str, Path]) -> None:
    source = "demo" if name == "checks" else FIRST
    text = fill(PAGE.format(f"{name} {source}"), known.values())
    for line in (*EXPECTED[name], f"From `{source}`."):
        assert line in text
    assert "old" not in text
    assert text.startswith(f"# Report\n\n<!-- table: {name} {source} -->\n")
    assert text.endswith("<!-- table: end -->\n\nafter\n")
    assert fill(text, known.values()) == text


def test_a_table_takes_several_records_and_drops_empty_columns(known: dict[str, Path]) -> None:
    text = fill(PAGE.format(f"steps {SECOND} {FIRST}"), known.values())
    assert text.index("case b") < text.index("case a")
    assert "| case | rival | ok | step us | x eager | peak MiB | x eager | DRAM GB |\n" in text
    assert f"From `{SECOND}`, `{FIRST}`." in text


def test_tables_of_a_page_stay_apart(known: dict[str, Path]) -> None:
    page = PAGE.format(f"busy {FIRST}") + "between\n" + PAGE.format(f"memory {FIRST}")
    text = fill(page, known.values())
    assert text.index("launches per step") < text.index("between") < text.index("activation")


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (f"speed {FIRST}", "asks for a table 'speed'"),
        ("steps rank_mixer_1", "no record rank_mixer_1"),
        ("steps", "none is named"),
    ],
)
def test_what_does_not_exist_is_an_error(mark: str, message: str, known: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=message):
        fill(PAGE.format(mark), known.values())


def test_an_empty_table_is_an_error(tmp_path: Path) -> None:
    bare = record()
    bare.cases[0].rivals["megafuse"].kernels = []
    path = bare.write(tmp_path)
    with pytest.raises(InputError, match="nothing to show"):
        fill(PAGE.format(f"busy {path.stem}"), [path])


def test_the_command_fills_a_page_and_leaves_it_alone_on_an_error(
    tmp_path: Path, known: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(f"busy {FIRST}"))
    assert main([str(tmp_path), "--into", str(page)]) == 0
    assert "| case a | megafuse | 3 | 7.0 |" in page.read_text()
    before = PAGE.format("busy nothing")
    page.write_text(before)
    assert main([str(tmp_path), "--into", str(page)]) == 2
    assert "no record nothing" in capsys.readouterr().err
    assert page.read_text() == before


@pytest.mark.parametrize("page", PAGES)
def test_committed_pages_say_what_the_records_say(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert updated(text, [ROOT / folder for folder in PAGES[page]]) == text, "run python -m megafuse.report"


def test_kernels_of_a_tuning_record_show_before_and_after(tmp_path: Path) -> None:
    tuned = record()
    row = {"name": "k0", "heuristic_us": 12.0, "us": 8.0, "own_us": 7.0, "share_of_copy": 0.81, "registers": 40,
           "spills": 0, "limit": "memory", "num_warps": 4, "tiles": []}  # fmt: skip
    tuned.cases[0].rivals["megafuse"].kernels = [row]
    text = render([("tuning", tuned)])
    assert "| kernel | heuristic us | tuned us | gain | share of copy | registers | spills | limit |" in text
    assert "| `k0` | 12.0 | 8.0 | 1.50 | 0.81 | 40 | 0 | memory |" in text
