"""Which tensors of a traced call lie on another device than the call: its stand-ins are all on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megafuse.core.errors import NotFusableError
from megafuse.ir.types import Origin

FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "empty zeros ones full arange linspace logspace eye rand randn randint randperm empty_strided tril_indices "
        "triu_indices bartlett_window blackman_window hamming_window hann_window kaiser_window"
    ).split()
)
FROM_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.scalar_tensor})
MOVES = frozenset({torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.to})
Function = Callable[..., Any]


def move_target(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device to which ``func`` moves its first argument; None where it names none."""
    if func is torch.Tensor.cpu:
        return torch.device("cpu")
    given = kwargs.get("device", args[1] if len(args) > 1 else None)
    if func is torch.Tensor.cuda:
        return torch.device("cuda", given) if isinstance(given, int) else torch.device(given or "cuda")
    return torch.device(given) if func is torch.Tensor.to and isinstance(given, str | torch.device) else None


class Elsewhere:
    """Tensors that the function makes on another device than ``device``, where it computes, and what follows of them.

    Where both kinds meet the result counts as made on ``device``: PyTorch takes single numbers and indices of the CPU
    beside other tensors, and refuses the rest.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._found: dict[int, tuple[torch.Tensor, torch.device]] = {}  # by id; the tensor keeps its id taken

    def of(self, tensor: torch.Tensor) -> torch.device:
        """Where eager mode would have the tensor."""
        return self._found[id(tensor)][1] if id(tensor) in self._found else self.device

    def same(self, device: torch.device) -> bool:
        """Whether this is the device of the call."""
        return device.type == self.device.type and device.index in (None, self.device.index or 0)

    def check_move(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], where: Origin | None) -> None:
        """``func`` moves nothing to another device.

        Raises:
            NotFusableError: it does.
        """
        target = move_target(func, args, kwargs) if func in MOVES and self.device.type != "meta" else None
        if target is not None and not self.same(target):
            raise NotFusableError(
                f"the function moves a tensor to {target}, while the call is on {self.device}",
                where=str(where or ""),
                hint="move tensors before and after the fused function",
            )

    def note(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note where eager mode would have had the results of a call."""
        made = [v for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor)]
        if self.device.type == "meta" or not made or (args and result is args[0] and func not in MOVES):
            return
        place = self._target(func, args, kwargs)
        for tensor in made:
            if self.same(place):
                self._found.pop(id(tensor), None)
            else:
                self._found[id(tensor)] = (tensor, place)

    def _target(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        if isinstance(kwargs.get("device"), str | torch.device):
            return torch.device(kwargs["device"])
        if func in FACTORIES or func in FROM_VALUES:
            return torch.get_default_device()
        if func in MOVES:
            return move_target(func, args, kwargs) or self.of(args[0])
        places = {self.of(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        return next(iter(places)) if len(places) == 1 else self.device

    def check_outputs(self, outputs: list[torch.Tensor]) -> None:
        """All outputs are on the device of the call.

        Raises:
            NotFusableError: one is not.
        """
        for number, tensor in enumerate(outputs):
            if not self.same(self.of(tensor)):
                raise NotFusableError(
                    f"output {number} is made on {self.of(tensor)}, while the call is on {self.device}",
                    hint=f"make it on the device of the inputs, as in torch.zeros(..., device={self.device.type!r})",
                )
