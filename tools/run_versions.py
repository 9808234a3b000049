"""Run the CPU tests and the offline compilation under the releases that pyproject.toml names for this.

Usage: ``python tools/run_versions.py [--only NAME] [--python NAME=PATH] [--jobs N] [-- PYTEST ARGUMENTS]``

Each entry of ``[tool.megafuse.versions]`` gets a virtual environment ``.venvs/NAME``, made by pip. Results go to
benchmarks/versions.json and from there into docs/compatibility.md; a run with pytest arguments of its own only prints
them. Exit status 1 when a test fails or a kernel does not compile. PIP_EXTRA_INDEX names a further package index.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomllib

import versions_page

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "versions.json"
PAGE = ROOT / "docs" / "compatibility.md"
FACTS = "import platform; print(platform.python_version())"
USABLE = "import venv, ensurepip"


def entries_of_the_project() -> dict[str, dict[str, Any]]:
    """What pyproject.toml says under ``[tool.megafuse.versions]``."""
    tables: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["megafuse"]
    return dict(tables["versions"])


def find_python(names: Sequence[str]) -> str | None:
    """The first ``pythonX.Y`` of these versions that runs and can make environments."""
    for name in names:
        path = shutil.which(f"python{name}")
        if path and subprocess.run([path, "-c", USABLE], capture_output=True, check=False).returncode == 0:
            return path
    return None


def make_environment(name: str, entry: dict[str, Any], python: str) -> Path:
    """The Python of ``.venvs/NAME``, made anew where the entry or the interpreter changed."""
    home = ROOT / ".venvs" / name
    stamp, text = home / ".ready", json.dumps([entry, python, (ROOT / "pyproject.toml").read_text()])
    own = home / "bin" / "python"
    if stamp.exists() and stamp.read_text() == text:
        return own
    print(f"{name}: making {home.relative_to(ROOT)} with {python}: {', '.join(entry['requirements'])}", flush=True)
    subprocess.run([python, "-m", "venv", "--clear", str(home)], check=True)
    index = os.environ.get("PIP_EXTRA_INDEX")
    command = [str(own), "-m", "pip", "--disable-pip-version-check", "--no-input", "-qq", "install"]
    command += ["--extra-index-url", index] if index else []
    subprocess.run([*command, *entry["requirements"], "--editable", f"{ROOT}[test]"], check=True)
    stamp.write_text(text)
    return own


def run_tests(python: Path, jobs: int, extra: Sequence[str]) -> dict[str, Any]:
    """Run pytest: counts by folder, ids of what failed, reasons of what was skipped."""
    report = python.parents[1] / "tests.xml"
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-n", str(jobs), "-p", "no:cacheprovider", f"--junitxml={report}"]
    begun = time.monotonic()
    ended = subprocess.run([*command, *extra], cwd=ROOT, check=False).returncode
    if ended not in (0, 1) or not report.exists():  # 1: a test failed; others: not all tests were run
        raise SystemExit(f"error: pytest ended with {ended}, which is no result: {' '.join(command)}")
    return {**read_report(report), "test_seconds": round(time.monotonic() - begun)}


def read_report(path: Path) -> dict[str, Any]:
    """Sum up a JUnit report."""
    tests: dict[str, Counter[str]] = {}
    failed: list[str] = []
    skipped: Counter[str] = Counter()
    for case in ET.parse(path).iter("testcase"):
        module, test = case.get("classname", ""), case.get("name", "")
        parts = (module or test).split(".")
        folder = "/".join(parts[:2]) + ("" if len(parts) > 2 else ".py")
        kinds = {child.tag for child in case}
        skip = case.find("skipped")
        if kinds & {"failure", "error"}:
            failed.append(f"{module.replace('.', '/')}.py::{test}")
        elif skip is not None:
            skipped[re.sub(r"\s+", " ", skip.get("message", ""))] += 1
        kind = "failed" if kinds & {"failure", "error"} else "passed" if skip is None else "skipped"
        tests.setdefault(folder, Counter())[kind] += 1
    return {"tests": tests, "failed": sorted(failed), "skipped": skipped}


def compile_kernels(python: Path) -> dict[str, Any]:
    """What tools/compile_offline.py says in this environment."""
    command = [str(python), str(ROOT / "tools" / "compile_offline.py")]
    begun = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        raise SystemExit(f"error: nothing was compiled: {' '.join(command)} ended with {done.returncode}")
    return {"compiled": found, "compile_seconds": round(time.monotonic() - begun)}


def describe(python: Path) -> dict[str, Any]:
    """Versions, date and commit."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "list", "--format=json"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    versions = {p["name"].lower().replace("-", "_"): p["version"] for p in listed}
    fact = subprocess.run([str(python), "-c", FACTS], capture_output=True, text=True, check=True).stdout.strip()
    packages = {name: versions[name] for name in versions_page.PACKAGES if name in versions}
    return {"python": fact, "packages": packages, "date": dt.date.today().isoformat(), "commit": commit()}


def commit() -> str:
    """The commit, with a word when the tree differs from it; ``unknown`` outside a checkout."""
    git = ["git", "-C", str(ROOT)]
    done = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if done.returncode:
        return "unknown"
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    return done.stdout.strip() + (" with changes" if status.strip() else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    given = list(sys.argv[1:] if argv is None else argv)
    extra = given[given.index("--") + 1 :] if "--" in given else []
    parser = argparse.ArgumentParser(description="Run the CPU tests under the releases that pyproject.toml names.")
    parser.add_argument("--only", action="append", help="one of the entries; give it again for more")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="interpreter of an entry")
    parser.add_argument("--jobs", type=int, default=2, help="processes of pytest")
    args = parser.parse_args(given[: given.index("--")] if "--" in given else given)
    entries = entries_of_the_project()
    chosen = args.only or list(entries)
    if unknown := [n for n in chosen if n not in entries]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(entries)}")
    pythons = dict(p.split("=", 1) for p in args.python)
    results = {name: run_one(name, entries[name], pythons.get(name), args.jobs, extra) for name in chosen}
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"environments": {}}
    record["environments"] = {n: r for n in entries if (r := results.get(n) or record["environments"].get(n))}
    if extra:
        print(versions_page.section({"environments": results}))
    else:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(versions_page.put(PAGE.read_text(), record))
        print(f"record: {RECORD.relative_to(ROOT)}, page: {PAGE.relative_to(ROOT)}")
    bad = [n for n, r in results.items() if r["failed"] or any(c["failed"] for c in r["compiled"])]
    print(f"failures under: {', '.join(bad)}" if bad else f"all passed under: {', '.join(results)}")
    return int(bool(bad))


def run_one(name: str, entry: dict[str, Any], python: str | None, jobs: int, extra: Sequence[str]) -> dict[str, Any]:
    """Everything for one entry."""
    python = python or find_python(entry["python"])
    if python is None:
        wanted = " or ".join(entry["python"])
        raise SystemExit(
            f"error: {name}: found no Python {wanted} with venv; name one: --python {name}=/path/to/python"
        )
    own = make_environment(name, entry, python)
    found = {"about": entry["about"], **describe(own), **run_tests(own, jobs, extra)}
    return {**found, **({"compiled": []} if extra else compile_kernels(own))}


if __name__ == "__main__":
    sys.exit(main())
