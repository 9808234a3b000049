"""The fp64 oracle: the original module itself, every floating-point op promoted to fp64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megafuse.validate.errors import OracleError
from megafuse.validate.problem import Problem, is_input, rebuild
from megafuse.validate.running import Run, differentiate, named_outputs

_REFUSED = {torch.ops.aten.view.dtype: "it reinterprets the bits of a tensor"}


class PromoteMode(TorchDispatchMode):
    """Runs every op in ``dtype``: floating-point tensor operands and dtype arguments of any other float type become it.

    Sits below autograd, so derivatives are those of the original ops. Integer and bool tensors are untouched. Tensors
    made from literals keep the value that the literal has in the dtype the program asked for. Raises ``OracleError``
    for ops without a meaning or a kernel in ``dtype``.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:  # a factory: its literal is data
            return self._lift_tree(func(*args, **(kwargs or {})))
        self._refuse(func, args, kwargs or {})
        out = self._call(func, [self._lift(leaf) for leaf in leaves], spec)
        if any(t.is_floating_point() for t in tensors) or not self._has_narrow(out):
            return self._lift_tree(out)
        wide = [leaf.to(self.dtype) if isinstance(leaf, torch.Tensor) else self._lift(leaf) for leaf in leaves]
        return self._lift_tree(self._call(func, wide, spec))  # int / int and its like: exact operands, wide result

    def _call(self, func: Any, leaves: list[Any], spec: pytree.TreeSpec) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            hint = "give check() a reference that computes the same with plain ops"
            raise OracleError(f"{func} does not run in {self.dtype}: {error}", hint=hint) from error

    def _refuse(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if func in _REFUSED:
            raise OracleError(f"{func} cannot be promoted to {self.dtype}: {_REFUSED[func]}")
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        for index, spec in enumerate(schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(spec.name)
            if spec.alias_info is not None and spec.alias_info.is_write and self._narrow(value):
                raise OracleError(
                    f"{func} writes into a {value.dtype} tensor {tuple(value.shape)} that is neither an argument, "
                    "a parameter nor a buffer",
                    hint="register it as a buffer",
                )

    def _narrow(self, value: Any) -> TypeGuard[torch.Tensor]:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != self.dtype

    def _has_narrow(self, out: Any) -> bool:
        return any(self._narrow(leaf) for leaf in pytree.tree_leaves(out))

    def _lift(self, value: Any) -> Any:
        if self._narrow(value):
            return value.to(self.dtype)
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return self.dtype
        return value

    def _lift_tree(self, out: Any) -> Any:
        return pytree.tree_map(lambda leaf: self._lift(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)


def oracle(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    cotangents: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Run:
    """Outputs and gradients of ``fn(*args, **kwargs)`` with every floating-point op in ``dtype``, on its own device.

    ``cotangents`` are the upstream gradients by output name (any float dtype); without them only the forward runs.
    The module is left as it was: parameters, buffers, ``.grad`` and arguments are copied first. Raises
    ``OracleError`` where an op cannot run in ``dtype``.
    """
    problem = Problem.of(fn, args, kwargs or {})
    return oracle_run(problem, problem.leaves, cotangents or {}, dtype)


def oracle_run(
    problem: Problem,
    leaves: Sequence[Any],
    cotangents: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.float64,
) -> Run:
    """``oracle`` for a problem already taken apart, with ``leaves`` for its arguments."""
    copies = _Copies(dtype)
    live = [copies.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    params = {name: copies.of(p) for name, p in problem.parameters().items()}
    holder = _Holder(problem)
    state = {n: copies.of(t) for n, t in [*holder.named_parameters(), *holder.named_buffers()]}
    args, kwargs = problem.arguments(live)
    with PromoteMode(dtype):
        out = torch.func.functional_call(holder, state, args, kwargs)
        outputs = named_outputs(out)
        targets = {n: x for n, x in zip(problem.names, live, strict=True) if is_input(x)} | params
        wide = {name: c.detach().to(dtype) for name, c in cotangents.items()}
        grads = differentiate(outputs, targets, wide)
    after = {n: copies.of(b) for n, b in problem.buffers().items()}
    after.update((n, x) for n, x in problem.inputs(live).items() if not x.requires_grad)
    return Run(outputs, grads, {n: t.detach() for n, t in after.items()})


class _Copies:
    """One promoted copy per distinct tensor, so that a tensor passed twice stays one tensor."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._made: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            copy = rebuild(tensor.detach(), tensor, dtype).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy.detach(), requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = copy
        return self._made[id(tensor)]


class _Holder(nn.Module):
    """All modules of a problem under one roof, so that one functional_call replaces the state of each."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.held = nn.ModuleList(problem.modules.values())
        self._call = [problem.fn]  # in a list: not registered a second time

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call[0](*args, **kwargs)
