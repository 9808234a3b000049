"""Partial failures: a section that fails leaves its error in the record and the rest goes on."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager

import torch

MAX_ERROR_CHARS = 2000
_START = time.perf_counter()


def error_text(error: BaseException) -> str:
    """Class and message of an error, cut to a length that a record can hold."""
    text = f"{type(error).__name__}: {error}".strip()
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + " [...]"


@contextmanager
def guarded(errors: MutableSequence[str], section: str) -> Iterator[None]:
    """Turn an exception of the block into a line of ``errors`` (and of the console)."""
    try:
        yield
    except Exception as error:
        line = f"{section}: {error_text(error)}"
        errors.append(line)
        say(f"  failed: {line}")


def say(text: str) -> None:
    """One line to the console, at once: benchmarks run long and may be stopped."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def progress(text: str) -> None:
    """A line with the seconds since the start of the process's benchmark."""
    say(f"[{time.perf_counter() - _START:6.1f} s] {text}")


def release_memory() -> None:
    """Collect garbage and hand cached device memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
