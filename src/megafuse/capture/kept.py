"""What a traced function would leave behind outside of modules: it is undone, and reported.

Tracing runs the user's function on stand-ins. What it rebinds at the places of its scope, or puts into lists, dicts and
sets there, would hold these stand-ins afterwards, and later calls of the captured step would not do it again. Functions
that keep their results (``functools.lru_cache``) compute anew meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megafuse.capture.scope import Place, Scope


@contextmanager
def kept(scope: Scope) -> Iterator[list[str]]:
    """Within the context nothing is cached; yields a list that holds, after it, the places that were changed.

    One thread at a time may enter it (``state.TRACING``).
    """
    changed: list[str] = []
    cached = [(table, key, table[key]) for table, key in scope.caches]
    before = {label: table[key] for label, (table, key) in scope.places.items()}
    contents = {label: value.copy() for label, value in before.items() if type(value) in (list, dict, set)}
    for table, key, function in cached:
        table[key] = function.__wrapped__
    try:
        yield changed
    finally:
        for table, key, function in cached:
            table[key] = function
        changed += _put_back(scope.places, before, contents)


def _put_back(places: Mapping[str, Place], before: Mapping[str, Any], contents: Mapping[str, Any]) -> Iterator[str]:
    for label, (table, key) in places.items():
        if (table.get(key) if isinstance(table, dict) else table[key]) is not before[label]:
            table[key] = before[label]
            yield label
        elif label in contents and not same_content(before[label], contents[label]):
            refill(before[label], contents[label])
            yield label


def refill(value: Any, content: Any) -> None:
    """Give a list, dict or set its former content again."""
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(content)


def same_content(value: Any, content: Any) -> bool:
    """The same objects in the same places."""
    if len(value) != len(content):
        return False
    if isinstance(value, dict):
        return list(value) == list(content) and same_content([*value.values()], [*content.values()])
    if isinstance(value, set):
        return bool(value == content)
    return all(a is b for a, b in zip(value, content, strict=True))
