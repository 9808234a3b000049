"""Help of the benchmarks' options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial

import pytest

from megafuse.bench import host, mlp, rank_mixer, tuning, workloads
from megafuse.bench.parser import bench_parser

PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "mlp": mlp.build_parser,
    "weightnorm": partial(mlp.build_parser, "weightnorm"),
    "rank_mixer": rank_mixer.build_parser,
    "workloads": workloads.build_parser,
    "tuning": tuning.build_parser,
    "host": host.build_parser,
}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.mark.parametrize("name", PARSERS)
def test_help_names_the_command_and_the_defaults(name: str) -> None:
    parser = PARSERS[name]()
    text = re.sub(r"\n {8,}", " ", parser.format_help())  # one line an option
    assert text.startswith(f"usage: megafuse bench {name} ")
    assert not re.findall(r"\(default: (?:None|False|==SUPPRESS==|)\)", text)
    for option, default in vars(parser.parse_args([])).items():
        if default not in (None, False, "", True):
            flag = "--" + option.replace("_", "-")
            assert re.search(rf"{flag} .*\(default: {re.escape(str(default))}\)", text), flag


@pytest.mark.parametrize(("default", "said"), [(0, True), (0.0, True), ("x", True), (None, False), ("", False)])
def test_a_zero_is_a_default_and_nothing_is_none(default: object, said: bool) -> None:
    parser = bench_parser("x", "about")
    parser.add_argument("--option", default=default, help="something")
    parser.add_argument("--flag", action="store_true", help="a flag")
    assert (f"(default: {default})" in parser.format_help()) == said
    assert parser.format_help().count("default") == int(said)
