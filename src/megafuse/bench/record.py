"""The record of a benchmark: everything measured, with raw samples and the state of the machine, as JSON."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megafuse.bench.cases import ROOT
from megafuse.core.errors import InputError
from megafuse.runtime.environment import environment

FORMAT = 1
RESULTS = ROOT / "benchmarks" / "results"
Facts = dict[str, Any]


@dataclass
class RivalResult:
    """What was measured of one rival on one case; sections that were not asked for, or failed, are empty."""

    name: str
    build_seconds: float = 0.0
    error: str = ""
    checked: Facts = field(default_factory=dict)
    memory: Facts = field(default_factory=dict)
    step: Facts = field(default_factory=dict)
    graph: Facts = field(default_factory=dict)
    host: Facts = field(default_factory=dict)
    call: Facts = field(default_factory=dict)
    rotated: Facts = field(default_factory=dict)
    kernels: list[Facts] = field(default_factory=list)
    traffic: Facts = field(default_factory=dict)
    plan: Facts = field(default_factory=dict)


@dataclass
class CaseResult:
    """One case: its rivals, its library products alone (``gemm``), and what failed."""

    name: str
    facts: Facts = field(default_factory=dict)
    rivals: dict[str, RivalResult] = field(default_factory=dict)
    gemm: Facts = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    gpu_after: Facts = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Record:
    """A whole run. ``environment`` is the machine before the first case; each case holds the GPU's state after it."""

    kind: str
    started: str
    command: str
    commit: str
    environment: Facts
    settings: Facts
    copy: Facts
    cases: tuple[CaseResult, ...]
    errors: tuple[str, ...] = ()
    format: int = FORMAT

    def as_json(self) -> str:
        """The record's text."""
        return json.dumps(asdict(self), indent=1, default=str) + "\n"

    def write(self, folder: Path) -> Path:
        """Write into ``folder`` as ``<kind>_<start>.json`` (one file per run, replaced as the run goes on)."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.kind}_{self.started.replace(':', '').replace('-', '')}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(compact_lists(self.as_json()), encoding="utf-8")
        partial.replace(path)
        return path


def compact_lists(text: str) -> str:
    """The same JSON with lists of plain numbers on one line each: raw samples are many."""
    out: list[str] = []
    inside = False
    for line in text.splitlines():
        bare = line.strip()
        number = bare.rstrip(",").lstrip("-").replace(".", "").replace("e", "").replace("-", "").isdigit()
        if inside and (number or bare in ("]", "],")):
            out[-1] += bare if bare.startswith("]") else f"{bare} " if bare.endswith(",") else bare
            inside = number
        else:
            out.append(line)
            inside = bare.endswith("[")
    return "\n".join(out) + "\n"


def begin(kind: str, settings: Mapping[str, Any]) -> Facts:
    """The fields of a record that are known before anything runs."""
    return {
        "kind": kind,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "command": command_line(sys.argv),
        "commit": git_commit(),
        "environment": environment(),
        "settings": dict(settings),
    }


def command_line(argv: Sequence[str]) -> str:
    """What the user typed, quoted for a shell, without the folders of this machine."""
    name = Path(argv[0]).name
    return shlex.join([name, *argv[1:]] if name == "megafuse" else ["python", *argv])


def git_commit(root: Path = ROOT) -> str:
    """The commit of the tree (with ``+changes`` where files differ from it); empty where git does not answer."""

    def ask(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        commit = ask("rev-parse", "HEAD")
        return commit + ("+changes" if ask("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def read_record(path: Path) -> Record:
    """A record from its file.

    Raises:
        InputError: not a record of this format.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != FORMAT:
        raise InputError(f"{path} is not a record of format {FORMAT}")
    cases = tuple(_case(c) for c in data.pop("cases"))
    return Record(**{**data, "cases": cases, "errors": tuple(data["errors"])})


def _case(data: Facts) -> CaseResult:
    rivals = {name: RivalResult(**r) for name, r in data["rivals"].items()}
    return CaseResult(**{**data, "rivals": rivals})
