"""Element types by their short and long names."""

from __future__ import annotations

import pytest

from megafuse.core.dtypes import spelled, spelled_list
from megafuse.core.errors import InputError

LONG = ("bfloat16", "float16", "float32", "float64", "tfloat32", "int64")
SHORT = ("fp32", "bf16", "fp16")


@pytest.mark.parametrize(
    ("text", "name"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32"), ("fp64", "float64"),
     ("tf32", "tfloat32"), ("int64", "int64"), ("float32", "float32")],
)  # fmt: skip
def test_short_and_long_names_mean_the_same(text: str, name: str) -> None:
    assert spelled(text, LONG, "--dtype") == name
    assert spelled(name, LONG, "--dtype") == name


def test_the_answer_is_in_the_callers_spelling() -> None:
    assert [spelled(text, SHORT, "--dtype") for text in ("float32", "bf16", "half")] == ["fp32", "bf16", "fp16"]


@pytest.mark.parametrize("text", ["tf32", "tfloat32", "float8", "", "int64"])
def test_the_error_lists_what_is_known(text: str) -> None:
    known = r"use one of fp32 \(float32\), bf16 \(bfloat16\), fp16 \(float16, half\)"
    with pytest.raises(InputError, match=rf"argument --dtype: unknown element type '{text}'\n.*{known}"):
        spelled(text, SHORT, "--dtype")


def test_lists_name_each_type_once() -> None:
    assert spelled_list(" bf16, tf32,bfloat16,", LONG, "--dtypes") == ["bfloat16", "tfloat32"]
    for wrong in ("", ",", "bf16,,fp32", "bf16 fp32"):
        with pytest.raises(InputError, match="argument --dtypes"):
            spelled_list(wrong, LONG, "--dtypes")
