"""A recorded fx graph as a plain function to capture."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch


class RecordedFunction:
    """Calls ``module`` node by node, so that each op is found on the line that its node was recorded for.

    ``names`` are the inputs' names in messages and in generated code. The module is no part of the function's state:
    all of its tensors come as arguments.
    """

    def __init__(self, module: torch.fx.GraphModule, names: Sequence[str]) -> None:
        self.module = module
        kind = inspect.Parameter.POSITIONAL_ONLY
        self.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        return torch.fx.Interpreter(self.module).run(*args)
