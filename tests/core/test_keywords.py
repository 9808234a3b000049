"""Keywords that are neither options nor arguments are named, and nothing else is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from megafuse.core.errors import InputError
from megafuse.core.keywords import options_of, require_known

OPTIONS = ("strict", "target", "seeds")


def plain(x: int, mask: int | None = None, *rest: int, scale: int = 1) -> None: ...


def open_ended(x: int, **more: int) -> None: ...


def widened(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def run(*args: Any, extra: int = 0, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return run


class Called:
    def __call__(self, x: int, mask: int) -> None: ...


class Unreadable:
    __signature__ = "none"

    def __call__(self, x: int) -> None: ...


@pytest.mark.parametrize(
    ("fn", "given"),
    [
        (plain, ["x", "mask", "scale"]),
        (open_ended, ["anything"]),
        (functools.partial(plain, scale=2), ["scale", "mask"]),
        (widened(plain), ["extra", "scale"]),
        (Called(), ["mask"]),
        (Unreadable(), ["anything"]),
        (max, ["key", "default"]),
        (dict.get, []),
    ],
)
def test_arguments_of_the_callable_pass(fn: Callable[..., Any], given: list[str]) -> None:
    require_known("fuse", OPTIONS, fn, given)


@pytest.mark.parametrize(
    ("fn", "name", "message"),
    [
        (
            plain,
            "strickt",
            r"keyword 'strickt' is neither an option of fuse\(\) nor an argument of plain\(\)\n.*'strict'",
        ),
        (plain, "maks", r"'maks'(.|\n)*did you mean 'mask'"),
        (plain, "rest", r"'rest'(.|\n)*options are strict, target, seeds; plain\(\) takes x, mask, scale"),
        (functools.partial(plain, scale=2), "scael", r"argument of partial\(\)\n.*'scale'"),
        (Called(), "sed", r"'sed' .* argument of Called\(\)\n.*'seeds'"),
        (lambda: None, "zzz", "takes no keywords"),
    ],
)
def test_others_are_named_with_the_closest(fn: Callable[..., Any], name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        require_known("fuse", OPTIONS, fn, ["x", name] if fn is plain else [name])


def test_options_are_the_keyword_only_names() -> None:
    assert options_of(plain) == ("scale",)
