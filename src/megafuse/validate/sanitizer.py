"""NVIDIA's compute-sanitizer around a command: its command line, its findings, and what makes a run clean."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megafuse.core.errors import InputError, TargetError

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROGRAM = "compute-sanitizer"
FOUND = 86  # exit status where the tool found something
QUIET = ("--report-api-errors", "no", "--show-backtrace", "no", "--print-limit", "50")
EXACT_MEMORY = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor an allocation of its own, whose end is known
MOST_SHOWN = 5

_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)s?", re.MULTILINE)
_KINDS = "Invalid|Misaligned|Uninitialized|Race reported|Potential|Barrier|Divergent|Program hit"
_FINDING = re.compile(rf"^=+ ((?:Error: |Warning: )?(?:{_KINDS}).*)$", re.MULTILINE)
_PLACE = re.compile(r"(?:\bat |^)([\w.<>~:]+)(?:\([^)]*\))?\+0x[0-9a-f]+|\bat 0x[0-9a-f]+ in (?:\S+:)?([\w.<>~]+)")


@dataclass(frozen=True)
class Finding:
    """What a tool says first of one error, and the kernel in which it happened (empty: it says none)."""

    what: str
    kernel: str


@dataclass(frozen=True)
class Sanitized:
    """One run under a tool. ``count``: errors or hazards by its summary; -1: it printed none, so it did not end."""

    tool: str
    count: int
    findings: tuple[Finding, ...]
    status: int
    output: str

    @property
    def problem(self) -> str:
        """Why the run is not clean; empty where it is."""
        if self.count > 0:
            shown = [f"{f.what} in {f.kernel or 'an unnamed kernel'}" for f in dict.fromkeys(self.findings)]
            more = f"; and {len(shown) - MOST_SHOWN} more kinds" * (len(shown) > MOST_SHOWN)
            return f"{self.count} found: {'; '.join(shown[:MOST_SHOWN]) or self.output[-500:]}{more}"
        if self.count < 0:
            return f"{self.tool} did not end with a summary (status {self.status}): {self.output[-1500:]}"
        return f"the program failed (status {self.status}): {self.output[-1500:]}" if self.status else ""


def parse_tools(text: str) -> tuple[str, ...]:
    """Tools from a list with commas.

    Raises:
        InputError: one is not known, or there is none.
    """
    tools = tuple(dict.fromkeys(t.strip() for t in text.split(",") if t.strip()))
    unknown = [t for t in tools if t not in TOOLS]
    if unknown or not tools:
        what = f"unknown tool {unknown[0]!r}" if unknown else "no tool is named"
        raise InputError(f"argument --sanitize: {what}", hint=f"give some of {','.join(TOOLS)}")
    return tools


def find_sanitizer() -> str:
    """The path of compute-sanitizer: from the PATH, or from the CUDA toolkit's usual places.

    Raises:
        TargetError: it is not installed.
    """
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    folders = [str(Path(h) / part) for h in homes if h for part in ("bin", "compute-sanitizer")]
    found = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=os.pathsep.join(folders))
    if found is None:
        raise TargetError(
            f"{PROGRAM} is not installed: it is neither on the PATH nor under CUDA_HOME",
            hint="install the CUDA toolkit, or its package cuda-sanitizer, on the GPU machine",
        )
    return found


def sanitizer_command(tool: str, program: str, command: Sequence[str]) -> list[str]:
    """``command`` under a tool."""
    return [program, "--tool", tool, *QUIET, "--error-exitcode", str(FOUND), *command]


def run_sanitized(tool: str, program: str, command: Sequence[str], env: Mapping[str, str], timeout: float) -> Sanitized:
    """Run ``command`` under a tool, each tensor in an allocation of its own, and read what it found.

    Raises:
        TargetError: it took longer than ``timeout`` seconds.
    """
    try:
        done = subprocess.run(
            sanitizer_command(tool, program, command),
            capture_output=True, text=True, errors="replace", timeout=timeout, env={**env, **EXACT_MEMORY}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TargetError(f"{tool} took more than {timeout:g} s", hint="check a smaller size") from error
    return parse_output(tool, done.stdout + done.stderr, done.returncode)


def parse_output(tool: str, output: str, status: int) -> Sanitized:
    """What a tool's output says."""
    counts = [int(m.group(1)) for m in _SUMMARY.finditer(output)]
    starts = list(_FINDING.finditer(output))
    ends = [*(m.start() for m in starts), len(output)][1:]
    findings = tuple(
        Finding(_plain(m.group(1)), _kernel(output[m.start() : end])) for m, end in zip(starts, ends, strict=True)
    )
    return Sanitized(tool, sum(counts) if counts else -1, findings, status, output)


def _plain(what: str) -> str:
    """The sentence without addresses, threads and counts, so that equal findings read alike."""
    return re.sub(r"\s+(?:at block|between|at|by thread|\[)\s?.*$", "", re.sub(r"0x[0-9a-f]+", "", what)).strip()


def _kernel(text: str) -> str:
    """The first kernel that a finding names."""
    for line in text.splitlines():
        found = _PLACE.search(line.lstrip("= "))
        if found:
            return found.group(1) or found.group(2)
    return ""
