from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megafuse.cli.main import main

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def own_world(monkeypatch, tmp_path):
    """A cache directory of the test's own, and its modules importable by name."""
    monkeypatch.setenv("MEGAFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])


@pytest.fixture
def megafuse_cli(capsys):
    """Run a command line in this process: (exit status, stdout, stderr)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run
