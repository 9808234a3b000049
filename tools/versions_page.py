"""The record of `make test-versions` as the generated section of docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BEGIN, END = "<!-- versions:begin -->", "<!-- versions:end -->"
PACKAGES = ("torch", "triton", "numpy", "ml_dtypes")
DURATIONS = {"test_seconds": "tests took", "compile_seconds": "compilation took"}


def put(page: str, record: Mapping[str, Any]) -> str:
    """``page`` with its generated section made anew.

    Raises:
        ValueError: the page lacks the two markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no section between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{section(record)}\n{END}{after}"


def section(record: Mapping[str, Any]) -> str:
    """Tables of environments, of tests by folder and of compiled kernels, then every failure and reason to skip."""
    runs: Mapping[str, Any] = record["environments"]
    names = list(runs)
    if not names:
        return "No run is recorded yet."
    head = ["", *names]
    about = [[key, *(_fact(runs[n], key) for n in names)] for key in ("python", *PACKAGES, "date", "commit")]
    about += [[said, *(_minutes(runs[n].get(key)) for n in names)] for key, said in DURATIONS.items()]
    folders = sorted({f for n in names for f in runs[n]["tests"]})
    tests = [[f"`{f}`", *(_counts(runs[n]["tests"].get(f, {})) for n in names)] for f in folders]
    tests.append(["all", *(_counts(_total(runs[n]["tests"])) for n in names)])
    cases = list(dict.fromkeys((c["name"], c["dtype"]) for n in names for c in runs[n]["compiled"]))
    kernels = [[f"{c[0]} {c[1]}", *(_kernels(runs[n]["compiled"], c) for n in names)] for c in cases]
    parts = [_table(head, about), "Tests:", _table(head, tests), "Kernels compiled for sm_90, with no GPU:"]
    parts.append(_table(["at production sizes", *names], kernels))
    for name in names:
        parts += _list(f"Failed under `{name}`:", [f"`{t}`" for t in runs[name]["failed"]])
        skipped = [f"{count}: {reason}" for reason, count in sorted(runs[name]["skipped"].items())]
        parts += _list(f"Skipped under `{name}`:", skipped)
    return "\n\n".join(parts)


def _fact(run: Mapping[str, Any], key: str) -> str:
    return str(run.get(key) or run["packages"].get(key, "not installed"))


def _minutes(seconds: int | None) -> str:
    return "not run" if seconds is None else f"{seconds // 60} min {seconds % 60} s"


def _total(tests: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    kinds = ("passed", "failed", "skipped")
    return {kind: sum(counts.get(kind, 0) for counts in tests.values()) for kind in kinds}


def _counts(counts: Mapping[str, int]) -> str:
    said = [f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped") if counts.get(kind)]
    return ", ".join(said) or "not run"


def _kernels(compiled: list[dict[str, Any]], case: tuple[str, str]) -> str:
    for found in compiled:
        if (found["name"], found["dtype"]) == case:
            bad = [f"{len(found[kind])} {kind}" for kind in ("failed", "spilling") if found[kind]]
            return ", ".join([f"{found['kernels']} kernels", *bad])
    return "not run"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _list(title: str, items: list[str]) -> list[str]:
    return [title, "\n".join(f"- {item}" for item in items)] if items else []
