"""``python -m megafuse.report [RECORD or FOLDER ...] [--into PAGE]``: records as Markdown tables.

A page that names tables (``pages``) gets those; any other page gets all records between its two markers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megafuse.bench.record import RESULTS
from megafuse.core.errors import MegafuseError
from megafuse.report.markdown import files_of, load, put_between_markers, render
from megafuse.report.pages import MARK, fill


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, or put them into a page; exit status 2 if it names what does not exist."""
    parser = argparse.ArgumentParser(prog="python -m megafuse.report", description="Records as Markdown tables.")
    parser.add_argument("records", nargs="*", type=Path, default=[RESULTS], help="files or folders")
    parser.add_argument("--into", type=Path, help="page to update: its named tables, or all between its markers")
    args = parser.parse_args(argv)
    if args.into is None:
        sys.stdout.write(render(load(args.records)) + "\n")
        return 0
    try:
        page = args.into.read_text(encoding="utf-8") if args.into.exists() else ""
        args.into.write_text(updated(page, args.records), encoding="utf-8")
    except MegafuseError as error:
        sys.stderr.write(f"error: {args.into}: {error}\n")
        return 2
    return 0


def updated(page: str, records: Sequence[Path]) -> str:
    """The text of ``page`` with its tables made anew from ``records`` (files or folders)."""
    if MARK.search(page):
        return fill(page, files_of(records))
    return put_between_markers(page, render(load(records)))


if __name__ == "__main__":
    raise SystemExit(main())
