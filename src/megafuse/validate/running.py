"""One forward and backward of a callable, with every result under a name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megafuse.core.errors import InputError
from megafuse.validate.problem import Problem, fresh_copy, generator, is_input


@dataclass(frozen=True)
class Run:
    """Results of one run: outputs (tensors and plain values), gradients (None where unused), state afterwards."""

    outputs: Mapping[str, Any]
    grads: Mapping[str, torch.Tensor | None]
    after: Mapping[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the run, detached, outputs and gradients and state under distinct names."""
        found = {f"output {n}": t for n, t in self.outputs.items()} | {f"grad {n}": t for n, t in self.grads.items()}
        found |= {f"state {n}": t for n, t in self.after.items()}
        return {n: t.detach() for n, t in found.items() if isinstance(t, torch.Tensor)}


def named_outputs(out: Any) -> dict[str, Any]:
    """Leaves of an output tree by path; a single tensor is named ``out``."""
    paths, _ = pytree.tree_flatten_with_path(out)
    return {"out" + pytree.keystr(path): leaf for path, leaf in paths}


def draw_cotangents(outputs: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Standard normal upstream gradients, with the shape, strides and dtype of each differentiable output."""
    cotangents = {}
    for index, (name, out) in enumerate(outputs.items()):
        if isinstance(out, torch.Tensor) and out.requires_grad:
            rng = generator(out.device, seed, 10_000 + index)
            cotangents[name] = torch.empty_like(out).detach().normal_(generator=rng)
    return cotangents


def differentiate(
    outputs: Mapping[str, Any],
    targets: Mapping[str, torch.Tensor],
    cotangents: Mapping[str, torch.Tensor],
    *,
    retain_graph: bool = False,
) -> dict[str, torch.Tensor | None]:
    """Gradients of ``outputs`` by the targets that require them, None where unused; ``.grad`` is untouched."""
    wanted = {n: t for n, t in targets.items() if t.requires_grad}
    roots = [n for n, c in cotangents.items() if _accepts(outputs.get(n), c)]
    if not roots or not wanted:
        return dict.fromkeys(wanted)
    for device in {t.device for t in wanted.values() if t.is_cuda}:
        _wake_autograd(device)
    grads = torch.autograd.grad(
        [outputs[n] for n in roots],
        list(wanted.values()),
        [cotangents[n].to(outputs[n].dtype) for n in roots],
        retain_graph=retain_graph,
        allow_unused=True,
    )
    return dict(zip(wanted, grads, strict=True))


@functools.cache
def _wake_autograd(device: torch.device) -> None:
    """Give autograd's thread of a GPU its CUDA context: PyTorch warns if the first call there is a matrix product."""
    torch.zeros((), device=device, requires_grad=True).sin().backward()


def _accepts(output: Any, cotangent: torch.Tensor) -> bool:
    """True if ``cotangent`` fits; an output of another shape is a structural difference, reported as such."""
    return isinstance(output, torch.Tensor) and output.requires_grad and output.shape == cotangent.shape


class Runner:
    """Runs one callable on the arguments of a problem; buffers and arguments are the same before every run."""

    def __init__(self, problem: Problem, call: Callable[..., Any]) -> None:
        self._problem = problem
        self._call = call
        self._params, self._buffers = _matched_state(problem, call)

    def run(
        self, leaves: Sequence[Any], cotangents: Mapping[str, torch.Tensor] | int, *, backwards: int = 1
    ) -> list[Run]:
        """One forward and ``backwards`` backwards over it (all but the last keep the graph): one ``Run`` for each.

        ``cotangents``: upstream gradients by output name, or a seed to draw them for the outputs found.
        """
        live = [fresh_copy(x) if is_input(x) else x for x in leaves]
        args, kwargs = self._problem.arguments(live)
        with _restored(self._buffers.values()):
            outputs = named_outputs(self._call(*args, **kwargs))
            after = self._after(live)
            targets = self._problem.inputs(live) | self._params
            grads = []
            for left in reversed(range(backwards)):
                upstream = draw_cotangents(outputs, cotangents) if isinstance(cotangents, int) else cotangents
                grads.append(differentiate(outputs, targets, upstream, retain_graph=left > 0))
        return [Run(outputs, g, after) for g in grads]

    def _after(self, live: Sequence[Any]) -> dict[str, torch.Tensor]:
        after = {n: b.detach().clone() for n, b in self._buffers.items()}
        after.update((n, x) for n, x in self._problem.inputs(live).items() if not x.requires_grad)
        return after


def require_not_random(problem: Problem, leaves: Sequence[Any]) -> None:
    """Raise ``InputError`` if the reference draws random numbers, which fused, unfused and oracle could not share."""
    devices = {x.device for x in [*leaves, *problem.parameters().values()] if isinstance(x, torch.Tensor)}
    before = {d: _rng_state(d) for d in devices}
    with torch.no_grad():
        Runner(problem, problem.fn).run(leaves, {})
    if any(not torch.equal(_rng_state(d), state) for d, state in before.items()):
        raise InputError(
            "the reference draws random numbers (dropout?), so its results cannot be compared",
            hint="call module.eval() or set the dropout probability to 0",
        )


def _rng_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _matched_state(
    problem: Problem, call: Callable[..., Any]
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """The reference's parameters and buffers, or those of equal name where ``call`` is a module with its own."""
    params, buffers = problem.parameters(), problem.buffers()
    if not isinstance(call, nn.Module) or call is problem.fn:
        return params, buffers
    own_params, own_buffers = dict(call.named_parameters()), dict(call.named_buffers())
    shared = {id(t) for t in [*own_params.values(), *own_buffers.values()]}
    matched_params = {n: p if id(p) in shared else own_params.get(n, p) for n, p in params.items()}
    matched_buffers = {n: b if id(b) in shared else own_buffers.get(n, b) for n, b in buffers.items()}
    for name, param in matched_params.items():
        if not torch.equal(param, params[name]):
            raise InputError(f"parameter {name} of the fused module differs in value", hint="load the same state_dict")
    return matched_params, matched_buffers


@contextmanager
def _restored(buffers: Any) -> Iterator[None]:
    """Put the values of ``buffers`` back on leaving."""
    held = list(buffers)
    saved = [b.detach().clone() for b in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(held, saved, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
