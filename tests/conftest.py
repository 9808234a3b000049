"""Shared by all tests: GPU tests are skipped with a reason where there is no GPU; parallel workers share the cores."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch starts its threads
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
