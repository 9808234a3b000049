"""Parsers of the benchmarks' options."""

from __future__ import annotations

import argparse


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Says the default of each option that has one: nothing of flags, nor where an option is just not given."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        absent = action.default is None or action.default is False or action.default == ""
        return action.help if absent else super()._get_help_string(action)


def bench_parser(name: str, about: str) -> argparse.ArgumentParser:
    """The parser of ``megafuse bench NAME``, without options as yet; its help shows their defaults."""
    return argparse.ArgumentParser(prog=f"megafuse bench {name}", description=about, formatter_class=_Formatter)
