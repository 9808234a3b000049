"""Random modules on a GPU, right by the acceptance rule in fp32, bf16 and fp16.

``MEGAFUSE_FUZZ_COUNT`` modules (120) from number ``MEGAFUSE_FUZZ_SEED`` (0) on; after ``MEGAFUSE_FUZZ_SECONDS`` (600)
of a process no further module starts in it. The run's last lines say how many passed, failed and were not run::

    MEGAFUSE_FUZZ_COUNT=1000 make test-gpu ARGS="tests/gpu/test_random_modules_gpu.py -n 15"
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable

import pytest

from megafuse.cli.fuzz import LOST, cases, examine_case, failure_text

pytestmark = pytest.mark.gpu

COUNT = int(os.environ.get("MEGAFUSE_FUZZ_COUNT", "120"))
FIRST = int(os.environ.get("MEGAFUSE_FUZZ_SEED", "0"))
END = time.monotonic() + float(os.environ.get("MEGAFUSE_FUZZ_SECONDS", "600"))
BATCH = 20
REDUCE_FOR = 30.0  # seconds spent on making the first failure of a batch smaller


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("start", range(FIRST, FIRST + COUNT, BATCH))
def test_random_modules(start: int, record_property: Callable[[str, object], None]) -> None:
    counts: Counter[str] = Counter()
    texts: list[str] = []
    todo = cases(start, min(BATCH, FIRST + COUNT - start), "all", "cuda")
    for case in todo:
        if time.monotonic() > END:
            break
        failure = examine_case(case, each=120.0, reduce_for=0.0 if texts else REDUCE_FOR)
        counts["passed" if failure is None else "failed"] += 1
        texts += [] if failure is None else [failure_text(case, failure)]
        if failure is not None and failure.kind == LOST:
            break
    counts["not run"] = len(todo) - counts["passed"] - counts["failed"]
    record_property("random_modules", dict(counts))
    assert not texts, "\n\n".join(texts)
    if counts["not run"]:
        pytest.skip(f"time limit: {counts['not run']} modules from {todo[-counts['not run']].seed} on were not run")
