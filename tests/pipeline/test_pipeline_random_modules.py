"""Random modules through the whole pipeline on the CPU: right by the acceptance rule in fp32, bf16 and fp16.

More of them: ``make fuzz ARGS="--count 2000 --seed 1000"``.
"""

from __future__ import annotations

import pytest

from megafuse.cli.fuzz import cases, examine_case, failure_text

MODULES, BATCH = 200, 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, MODULES, BATCH))
def test_random_modules(first: int) -> None:
    for case in cases(first, BATCH, "all", "cpu"):
        failure = examine_case(case)
        assert failure is None, failure_text(case, failure)
