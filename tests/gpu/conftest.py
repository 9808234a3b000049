"""A line at the end of a run that says how many random modules were checked."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":  # set-up and tear-down carry the same properties
                found.update(dict(report.user_properties).get("random_modules", {}))
    if found:
        kinds = ("passed", "failed", "not run")
        terminalreporter.write_line(f"random modules: {', '.join(f'{found[k]} {k}' for k in kinds)}")
