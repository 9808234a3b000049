"""Keywords of ``fuse(fn, *args, option=..., **kwargs)`` and the like: options, arguments of ``fn``, or mistakes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megafuse.core.errors import InputError


def options_of(call: Callable[..., Any]) -> tuple[str, ...]:
    """The names that ``call`` takes as keywords alone."""
    return tuple(p.name for p in inspect.signature(call).parameters.values() if p.kind is p.KEYWORD_ONLY)


def require_known(call: str, options: Sequence[str], fn: Callable[..., Any], given: Iterable[str]) -> None:
    """Nothing happens where ``fn`` takes all keywords that were ``given``, or where its signature does not tell.

    Args:
        call: the call that takes ``options`` and passes what else it is given on to ``fn``.
        options: its options.
        fn: what receives the other keywords.
        given: the keywords that are not options.

    Raises:
        InputError: a keyword is no argument of ``fn``.
    """
    taken = _keywords_of(fn)
    unknown = None if taken is None else next((name for name in given if name not in taken), None)
    if taken is None or unknown is None:
        return
    theirs = f"{getattr(fn, '__qualname__', type(fn).__qualname__)}()"
    close = difflib.get_close_matches(unknown, (*options, *taken), n=1)
    listed = f"options are {', '.join(options)}; {theirs} takes {', '.join(taken) or 'no keywords'}"
    raise InputError(
        f"keyword {unknown!r} is neither an option of {call}() nor an argument of {theirs}",
        hint=f"did you mean {close[0]!r}?" if close else listed,
    )


def require_arguments(call: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Nothing happens where ``fn`` can be called with ``args`` and ``kwargs``, or where its signature does not tell.

    Raises:
        InputError: an example argument is missing, or there is one too many.
    """
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        theirs = f"{getattr(fn, '__qualname__', type(fn).__qualname__)}{signature}"
        hint = f"give {call}() an example of each argument of {theirs}: {call}(module, example_input)"
        raise InputError(f"{call}() cannot make the call that it is given: {error}", hint=hint) from None


def _keywords_of(fn: Callable[..., Any]) -> list[str] | None:
    """The names of the arguments of ``fn``; None where it takes any keyword or its signature cannot be read.

    A decorated function is looked at as it is called, not as what it wraps: the decorator may take more.
    """
    try:
        parameters = inspect.signature(fn, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
