"""Runs captured graphs in fp64, and fused functions under few seeds of the acceptance rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megafuse.api import engine_of
from megafuse.capture.types import Captured
from megafuse.compiler import Compiled
from megafuse.ir.graph import Graph, Node
from megafuse.ir.interpret import evaluate
from megafuse.ir.types import Opaque
from megafuse.validate import CheckOptions, CheckReport, check

FEW = CheckOptions(seeds=2, small_seeds=1, repeats=1)


def compiled_of(fused: Any) -> Compiled:
    """The compilation behind the first binding of a fused callable."""
    compiled = engine_of(fused).bindings[0].compiled
    assert compiled is not None
    return compiled


def check_few(
    fn: Callable[..., Any], *args: Any, fused: Any, options: CheckOptions = FEW, **kwargs: Any
) -> CheckReport:
    """The rule with few seeds; raises with its report where it fails."""
    return check(fn, *args, fused=fused, options=options, **kwargs).raise_if_failed()


def to_array(x: Tensor) -> np.ndarray:
    """The values, floats widened to 64 bits."""
    x = x.detach()
    return (x.double() if x.dtype.is_floating_point else x).cpu().numpy()


def opaque_runner(captured: Captured) -> Callable[[Node, list[np.ndarray]], tuple[Any, ...]]:
    """Runs opaque calls with PyTorch."""

    def run(node: Node, arrays: list[np.ndarray]) -> tuple[Any, ...]:
        assert isinstance(node.attrs, Opaque)
        call = captured.calls[node.attrs.call]
        args, kwargs = call.bind([torch.as_tensor(np.array(a, order="C")) for a in arrays], torch.device("cpu"))
        results = call.target(*args, **kwargs)
        flat = [results] if isinstance(results, Tensor) else list(results)
        return tuple(None if r is None else to_array(r) for r in flat)

    return run


def graph_differences(
    fn: Callable[..., Any], args: list[Tensor], captured: Captured, graph: Graph, tol: float
) -> list[str]:
    """Where ``graph`` evaluated in fp64 differs from PyTorch in fp64, for a function of tensors alone."""
    exact = [a.detach().double().requires_grad_(a.requires_grad) for a in args]
    outs = [v for v in pytree.tree_leaves(fn(*exact)) if isinstance(v, Tensor)]
    generator = torch.Generator().manual_seed(5)
    tangents = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outs]
    place = {id(a): i for i, a in enumerate(args)}
    order = [place[id(a)] for a in args][: len(captured.leaves)]
    inputs = [to_array(exact[i]) for i in order] + [to_array(tangents[i]) for i in captured.tangent_of]
    results = evaluate(graph, inputs, opaque=opaque_runner(captured))
    wanted = [i for i in range(len(exact)) if exact[i].requires_grad]
    roots = [i for i, o in enumerate(outs) if o.requires_grad]
    grads: dict[int, Tensor | None] = {}
    if roots and wanted:
        found = torch.autograd.grad(
            [outs[i] for i in roots], [exact[i] for i in wanted], [tangents[i] for i in roots], allow_unused=True
        )
        grads = dict(zip(wanted, found, strict=True))
    bad = [f"output {i}" for i, o in enumerate(outs) if not _close(results[i], o, tol)]
    for position, got in zip(graph.grad_of, results[graph.num_forward :], strict=True):
        want = grads.get(position)
        if (got is None) != (want is None) or (want is not None and not _close(got, want, tol)):
            bad.append(f"gradient of argument {position}")
    return bad


def _close(got: Any, want: Tensor, tol: float) -> bool:
    true = to_array(want)
    if got is None or got.shape != true.shape:
        return False
    scale = float(np.abs(true).max(initial=1.0)) if true.size else 1.0
    return bool(np.allclose(got, true, rtol=tol, atol=tol * scale))
