"""The tool behind `make test-versions`: what it reads from reports, what it writes into the page, what it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import run_versions
import versions_page

ROOT = Path(__file__).resolve().parents[1]
RUN = {
    "python": "3.12.1",
    "packages": {"torch": "2.6.0", "numpy": "1.26.4"},
    "date": "2026-01-02",
    "commit": "abc",
    "test_seconds": 605,
    "tests": {"tests/ir": {"passed": 3}, "tests/core": {"passed": 1, "failed": 1, "skipped": 2}},
    "failed": ["tests/core/test_a.py::test_b"],
    "skipped": {"needs ruff": 2},
    "compiled": [{"name": "block", "dtype": "float32", "kernels": 4, "failed": ["k: no"], "spilling": []}],
}


def test_the_page_holds_what_the_record_says():
    record = json.loads((ROOT / "benchmarks" / "versions.json").read_text())
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert versions_page.put(page, record) == page, "run make test-versions, which writes this section"


def test_a_section_lists_counts_failures_and_reasons():
    other = {**RUN, "tests": {}, "failed": [], "compiled": []}
    text = versions_page.section({"environments": {"old": RUN, "new": other}})
    assert "| python | 3.12.1 | 3.12.1 |" in text
    assert "| tests took | 10 min 5 s | 10 min 5 s |" in text
    assert "| compilation took | not run | not run |" in text
    assert "| triton | not installed | not installed |" in text
    assert "| `tests/core` | 1 passed, 1 failed, 2 skipped | not run |" in text
    assert "| all | 4 passed, 1 failed, 2 skipped | not run |" in text
    assert "| block float32 | 4 kernels, 1 failed | not run |" in text
    assert "Failed under `old`:\n\n- `tests/core/test_a.py::test_b`" in text
    assert "Skipped under `old`:\n\n- 2: needs ruff" in text
    assert "Failed under `new`" not in text


def test_an_empty_record_says_so():
    assert versions_page.section({"environments": {}}) == "No run is recorded yet."


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="versions:begin"):
        versions_page.put("# page\n", {"environments": {}})


def test_reports_are_summed_up_by_folder(tmp_path):
    cases = [
        '<testcase classname="tests.ir.test_a" name="test_b" />',
        '<testcase classname="tests.ir.test_a" name="test_c[1]"><failure message="no">text</failure></testcase>',
        '<testcase classname="tests.ir.test_d" name="test_e"><error message="no">text</error></testcase>',
        '<testcase classname="tests.test_p" name="test_q"><skipped message="needs\n  ruff" /></testcase>',
    ]
    report = tmp_path / "tests.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    found = run_versions.read_report(report)
    assert found["tests"] == {"tests/ir": {"passed": 1, "failed": 2}, "tests/test_p.py": {"skipped": 1}}
    assert found["failed"] == ["tests/ir/test_a.py::test_c[1]", "tests/ir/test_d.py::test_e"]
    assert found["skipped"] == {"needs ruff": 1}


def test_an_interrupted_run_is_no_result(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    for ended in (1, 2):
        python.write_text(f"#!/bin/sh\necho '<testsuites/>' > {tmp_path}/tests.xml\nexit {ended}\n")
        python.chmod(0o755)
        if ended == 1:
            assert run_versions.run_tests(python, 1, [])["failed"] == []
        else:
            with pytest.raises(SystemExit, match="pytest ended with 2"):
                run_versions.run_tests(python, 1, [])


def test_every_environment_pins_torch_and_triton():
    for entry in run_versions.entries_of_the_project().values():
        pinned = {r.split("==")[0] for r in entry["requirements"] if "==" in r}
        assert {"torch", "triton"} <= pinned
        assert entry["python"]


def test_a_missing_interpreter_is_said(monkeypatch):
    monkeypatch.setattr(run_versions, "find_python", lambda names: None)
    entry = {"python": ["3.99"], "requirements": [], "about": ""}
    with pytest.raises(SystemExit, match=r"odd: found no Python 3\.99 with venv; name one: --python odd="):
        run_versions.run_one("odd", entry, None, 1, [])


def test_an_interpreter_that_cannot_run_is_passed_over(tmp_path, monkeypatch):
    for name, code in (("python3.98", 1), ("python3.97", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert run_versions.find_python(["3.99", "3.98", "3.97"]) == str(tmp_path / "python3.97")


def test_unknown_environments_are_refused(capsys):
    with pytest.raises(SystemExit):
        run_versions.main(["--only", "nothing"])
    assert "--only nothing: there are reference, newest" in capsys.readouterr().err
