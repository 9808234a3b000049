"""A small writer of formatted Python text: indentation, wrapped calls, comments and docstrings."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LINE = 120


class Writer:
    """Collects lines; ``with w.block("for ...:")`` indents. Lines come out as ruff's formatter would leave them."""

    def __init__(self, depth: int = 0) -> None:
        self._lines: list[str] = []
        self._depth = depth

    def part(self) -> Writer:
        """An empty writer at the present depth, for text that is added later with ``add``."""
        return Writer(self._depth)

    def add(self, part: Writer) -> None:
        """Append what ``part`` holds."""
        self._lines += part._lines

    @property
    def text(self) -> str:
        """Everything written so far."""
        return "\n".join(self._lines) + "\n"

    def line(self, text: str = "") -> None:
        """One line at the present depth."""
        self._lines.append("    " * self._depth + text if text else "")

    def blank(self) -> None:
        """An empty line, but none after another or at the start of a block."""
        if self._lines and self._lines[-1] and not self._lines[-1].endswith(":"):
            self._lines.append("")

    def raw(self, text: str) -> None:
        """Ready text, line by line."""
        for line in text.rstrip("\n").split("\n"):
            self.line(line)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """A compound statement: its head, then the body one level deeper."""
        self.line(head)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def comment(self, text: str) -> None:
        """A comment, wrapped to the line width."""
        for line in textwrap.wrap(text, LINE - 4 * self._depth - 2, break_long_words=False) or [""]:
            self.line(f"# {line}".rstrip())

    def docstring(self, paragraphs: Sequence[str]) -> None:
        """A docstring: the first paragraph is its summary, the others follow after an empty line."""
        width = LINE - 4 * self._depth
        safe = [p.replace("\\", "\\\\").replace('"""', "'''").rstrip() for p in paragraphs] or [""]
        lines: list[str] = []
        for at, paragraph in enumerate(safe):
            lines += [""] * (at == 1)
            lines += textwrap.wrap(paragraph, width - 3 if at == 0 else width, break_long_words=False) or [""]
        if len(lines) == 1 and len(lines[0]) <= width - 6 and not lines[0].endswith('"'):
            self.line(f'"""{lines[0]}"""')
            return
        self.line(f'"""{lines[0]}')
        for text in lines[1:]:
            self.line(text)
        self.line('"""')

    def call(self, head: str, args: Sequence[str], tail: str = ")") -> None:
        """``head + args + tail`` (``head`` ends with the opening bracket), wrapped as the formatter wraps a call."""
        room = LINE - 4 * self._depth
        flat = ", ".join(args)
        if len(head) + len(flat) + len(tail) <= room:
            self.line(f"{head}{flat}{tail}")
            return
        self.line(head)
        if len(flat) <= room - 4:
            self.line(f"    {flat}")
        else:
            for arg in args:
                self._argument(arg, room - 5)
        self.line(tail)

    def _argument(self, arg: str, room: int) -> None:
        """One argument on lines of its own; a tuple that does not fit gets a line per element."""
        if len(arg) <= room or not arg.startswith("("):
            self.line(f"    {arg},")
            return
        self.line("    (")
        for element in _split(arg[1:-1], (",",)):
            self.line(f"        {element.strip()},")
        self.line("    ),")

    def assign(self, name: str, value: str) -> None:
        """``name = value``; a value too long for one line is broken inside its call, or before its operators."""
        text = f"{name} = {value}"
        operands = _split(value, _OPERATORS)
        if len(text) <= LINE - 4 * self._depth:
            self.line(text)
        elif len(operands) == 1 and value.endswith(")"):
            head, args = value[:-1].split("(", 1)
            self.call(f"{name} = {head}(", [arg.strip() for arg in _split(args, (",",))])
        else:
            self.line(f"{name} = (")
            fits = len(value) <= LINE - 4 * self._depth - 4
            for part in [value] if fits else operands:
                self.line(f"    {part}")
            self.line(")")


def join_tests(tests: Sequence[str]) -> str:
    """Conditions joined by ``&``, which binds tighter than comparisons: one of several stands in brackets.

    Args:
        tests: names and comparisons without brackets; a condition that stands twice is kept once.

    Returns:
        The text; empty where there are none.
    """
    unlike = list(dict.fromkeys(tests))
    return " & ".join(t if len(unlike) == 1 or t.isidentifier() else f"({t})" for t in unlike)


_OPERATORS = (" + ", " - ", " * ", " & ", " | ")


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """Cut ``text`` where one of ``marks`` stands outside all brackets; operators stay with what follows them."""
    depth, start, parts = 0, 0, []
    for at, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        mark = next((m for m in marks if text.startswith(m, at)), "") if depth == 0 else ""
        if mark:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]
