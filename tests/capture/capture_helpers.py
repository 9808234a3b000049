"""Compares a captured graph, evaluated in fp64, with PyTorch's own autograd in fp64 on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megafuse.capture.api import Captured, capture, leaf_getter
from megafuse.capture.types import OpaqueCall
from megafuse.ir.graph import Node
from megafuse.ir.interpret import evaluate
from megafuse.ir.types import Cast, Opaque
from megafuse.ir.verify import verify


def seeded(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True, seed: int = 0) -> Tensor:
    """Normal values; the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(grad and dtype.is_floating_point)


def to_array(x: Tensor) -> np.ndarray:
    """The values, 16-bit floats widened."""
    x = x.detach()
    return (x.double() if x.dtype.is_floating_point else x).cpu().numpy()


@dataclass
class Compared:
    """A captured callable with the values both roads gave."""

    captured: Captured
    outputs: list[Any]
    gradients: list[Any]


def run_opaque(captured: Captured) -> Callable[[Node, list[np.ndarray]], tuple[Any, ...]]:
    """Runs opaque calls with PyTorch."""

    def run(node: Node, arrays: list[np.ndarray]) -> tuple[Any, ...]:
        assert isinstance(node.attrs, Opaque)
        call: OpaqueCall = captured.calls[node.attrs.call]
        args, kwargs = call.bind([torch.as_tensor(np.array(a, order="C")) for a in arrays], torch.device("cpu"))
        results = call.target(*args, **kwargs)
        flat = [results] if isinstance(results, Tensor) else list(results)
        return tuple(None if r is None else to_array(r) for r in flat)

    return run


def run_graph(captured: Captured, tensors: list[Tensor], tangents: list[Tensor], mode: str = "f64") -> list[Any]:
    """All outputs of the graph for the leaves' tensors and one tangent for each forward output that needs it."""
    inputs = [to_array(t) for t in tensors] + [to_array(tangents[i]) for i in captured.tangent_of]
    return evaluate(captured.graph, inputs, mode=mode, opaque=run_opaque(captured))  # type: ignore[arg-type]


def compare(fn: Callable[..., Any], *args: Any, tol: float = 1e-9, **kwargs: Any) -> Compared:
    """Capture ``fn``, evaluate the graph and assert that outputs, gradients and mutations agree with PyTorch's."""
    captured = capture(fn, args, kwargs)
    verify(captured.graph)
    tensors = leaf_getter(fn, args, kwargs, captured)(args, kwargs)
    before = [t.detach().clone() for t in tensors]
    outs, tangents, grads = reference(fn, args, kwargs, tensors, captured)
    results = run_graph(captured, before, tangents)
    count = captured.out_spec.num_tensors
    for i, (got, want) in enumerate(zip(results[:count], outs, strict=True)):
        close(got, to_array(want), tol, f"output {i}")
    for leaf, output in captured.mutations:
        close(results[output], to_array(tensors[leaf]), tol, f"mutation of {captured.leaves[leaf].label}")
    for position, got in zip(captured.graph.grad_of, results[captured.graph.num_forward :], strict=True):
        want, name = grads[position], captured.leaves[position].label
        assert (got is None) == (want is None), f"gradient of {name}: got {got is not None}, want {want is not None}"
        if want is not None:
            close(got, to_array(want), tol, f"gradient of {name}")
    return Compared(captured, results[:count], results[captured.graph.num_forward :])


def reference(
    fn: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor], captured: Captured
) -> tuple[list[Tensor], list[Tensor], dict[int, Tensor | None]]:
    """PyTorch's outputs, random cotangents for them, and the gradients of the leaves."""
    outs = [v for v in pytree.tree_leaves(fn(*args, **kwargs)) if isinstance(v, Tensor)]
    assert tuple(o.requires_grad for o in outs) == captured.out_requires_grad
    tangents = [seeded(*o.shape, grad=False, seed=7 + i) for i, o in enumerate(outs)]
    roots = [i for i in range(len(outs)) if outs[i].requires_grad]
    wanted = [i for i, leaf in enumerate(captured.leaves) if leaf.requires_grad]
    found: Any = [None] * len(wanted)
    if roots and wanted:
        cotangents = [tangents[i].to(outs[i].dtype) for i in roots]
        found = torch.autograd.grad([outs[i] for i in roots], [tensors[i] for i in wanted], cotangents,
                                    allow_unused=True)  # fmt: skip
    return outs, tangents, dict(zip(wanted, found, strict=True))


def close(got: np.ndarray, want: np.ndarray, tol: float, what: str) -> None:
    """Equal within ``tol`` of the largest value."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, want {want.shape}"
    scale = float(np.nanmax(np.abs(want[np.isfinite(want)]), initial=1.0)) if want.size else 1.0
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol * scale, err_msg=what)


def double(module: nn.Module) -> nn.Module:
    """A copy of the module in fp64 with random parameters."""
    made = copy.deepcopy(module).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return made


def casts(captured: Captured) -> int:
    """Number of casts to 16-bit types in the graph."""
    return sum(n.is_a(Cast) and n.dtype.size == 2 for n in captured.graph.nodes)
