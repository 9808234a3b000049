"""``python -m megafuse.report [RECORD or FOLDER ...] [--into docs/results.md]``: records as Markdown tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megafuse.bench.record import RESULTS
from megafuse.report.markdown import load, put_between_markers, render


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, or put them between the markers of a page."""
    parser = argparse.ArgumentParser(prog="python -m megafuse.report", description="Records as Markdown tables.")
    parser.add_argument("records", nargs="*", type=Path, default=[RESULTS], help="files or folders")
    parser.add_argument("--into", type=Path, help="page to update between its markers (added at its end if missing)")
    args = parser.parse_args(argv)
    text = render(load(args.records))
    if args.into is None:
        sys.stdout.write(text + "\n")
        return 0
    page = args.into.read_text(encoding="utf-8") if args.into.exists() else ""
    args.into.write_text(put_between_markers(page, text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
