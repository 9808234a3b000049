"""Every workload through ``torch.compile``: right by the rule, in generated kernels."""

from __future__ import annotations

import pytest

from dynamo_helpers import check_compiled
from megafuse.workloads import get, names


@pytest.mark.parametrize("name", names())
def test_workload(name: str) -> None:
    module, inputs = get(name).make("small")
    (graph,) = check_compiled(module, *inputs, fullgraph=True)
    assert not graph.unfused
