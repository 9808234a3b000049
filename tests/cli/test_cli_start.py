"""Commands load what they need: help and the cache answer without PyTorch, and no command but ``bench`` a benchmark."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from megafuse.cli.bench import BENCHES

RUN = """
import sys
from megafuse.cli.main import main
try:
    main({argv!r})
except SystemExit as end:
    assert not end.code, end.code
print("loaded", *sorted(sys.modules))
"""


def loaded(*argv: str) -> set[str]:
    """The modules that are loaded once the command has ended."""
    code = RUN.format(argv=list(argv))
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    return set(found.stdout.splitlines()[-1].split()[1:])


LIGHT = ("--help", "cache", "cache --tuned", "cache --clear", "bench", "explain --help", "demo --help", "fuzz --help")


@pytest.mark.parametrize("argv", LIGHT)
def test_a_light_command_loads_neither_pytorch_nor_benchmarks(argv: str) -> None:
    modules = loaded(*argv.split())
    assert "megafuse.cli.main" in modules
    assert not {"torch", "triton", "numpy", "megafuse.bench"} & modules


@pytest.mark.parametrize("argv", ["explain --workload tiny_mlp", "doctor"])
def test_commands_that_work_with_pytorch_load_no_benchmark(argv: str) -> None:
    modules = loaded(*argv.split())
    assert "torch" in modules
    assert not [name for name in modules if name.startswith("megafuse.bench")]


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_is_where_the_list_says(name: str) -> None:
    module, function, about = BENCHES[name]
    assert callable(getattr(import_module(module), function))
    assert about
