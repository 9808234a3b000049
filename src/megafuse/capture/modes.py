"""The mode under which the user's function is traced: devices and reached tensors become stand-ins, lines are noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from megafuse.capture.devices import FACTORIES, FROM_VALUES, Elsewhere
from megafuse.capture.origins import Names, current_origin, mark
from megafuse.core.errors import NotFusableError

META = torch.device("meta")
_Tensor: Any = torch.Tensor
# What a tensor says of its device. Getters are made anew each time they are asked for: equal, and not one object.
_WHEREABOUTS: dict[Any, Callable[[torch.device], Any]] = {
    _Tensor.device.__get__: lambda device: device,
    _Tensor.is_cuda.__get__: lambda device: device.type == "cuda",
    _Tensor.is_cpu.__get__: lambda device: device.type == "cpu",
    _Tensor.is_meta.__get__: lambda device: device.type == "meta",
    _Tensor.get_device: lambda device: -1 if device.type == "cpu" else device.index or 0,
}


class Constants:
    """Tensors with real values that the function reaches by itself: made in it, or not given to it as arguments."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self.made: list[int] = []
        self.outer: list[str] = []

    def put_first(self, labels: Mapping[int, str]) -> None:
        """Move tensors that were reached at labelled places to the front; ``outer`` are their labels."""
        made = set(self.made)
        first = [i for i, t in enumerate(self.found) if id(t) in labels and i not in made]
        order = [*first, *(i for i in range(len(self.found)) if i not in set(first))]
        self.outer = [labels[id(self.found[i])] for i in first]
        self.made = [order.index(i) for i in self.made]
        self.found = [self.found[i] for i in order]

    def reach(self, tensor: torch.Tensor) -> int:
        """Index of a tensor among the constants; new ones are added."""
        for i, known in enumerate(self.found):
            if known is tensor:
                return i
        self.found.append(tensor)
        return len(self.found) - 1


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data that has the shape, strides, element type and requires_grad of ``tensor``."""
    with torch.no_grad():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    return made.requires_grad_(tensor.requires_grad)


class TraceMode(TorchFunctionMode):
    """Active while the user's function runs.

    ``swaps`` maps ids of real tensors to their stand-ins. With ``discover`` (the dry run) further real tensors are
    added to ``constants``; without it ``constant_stand_ins`` holds their stand-ins.
    """

    def __init__(
        self,
        swaps: dict[int, torch.Tensor],
        constants: Constants,
        constant_stand_ins: Sequence[torch.Tensor] | None,
        device: torch.device,
        stop: str,
        modules: Names,
    ) -> None:
        super().__init__()
        self.swaps, self.constants, self.stand_ins = dict(swaps), constants, constant_stand_ins
        self.device, self.stop, self.modules = device, stop, modules
        self.discover = constant_stand_ins is None
        self.elsewhere = Elsewhere(device)
        self.created = 0
        self.local: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call with devices and real tensors replaced, and the user's line noted."""
        kwargs = kwargs or {}
        if func in _WHEREABOUTS:
            return _WHEREABOUTS[func](self.device)
        mark(where := current_origin(self.stop, self.modules))
        args, given = self.replace(args), self.replace(kwargs)
        self.elsewhere.check_move(func, args, given, where)
        if isinstance(given.get("generator"), torch.Generator):
            raise NotFusableError(f"{func.__name__} draws from a generator of its own", where=str(where or ""),
                                  hint="draw from PyTorch's default generator")  # fmt: skip
        if func in FROM_VALUES and not _has_tensor(args):
            result = self.create(func, args, given)
        elif func in (torch.Tensor.cpu, torch.Tensor.cuda):
            result = args[0]  # it is there
        else:
            result = self.native(func, *_to_meta(func, args, given))
        self.elsewhere.note(func, args, given, result)
        return result

    def native(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call ``func``; where CUDA takes one kernel that meta does not, take that kernel."""
        if func is torch._weight_norm and not kwargs:
            return _weight_norm(*args)
        if func is torch.dropout and len(args) == 3 and args[2] and 0.0 < args[1] < 1.0:
            return torch.native_dropout(args[0], args[1], True)[0]
        return func(*args, **kwargs)

    def create(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """A tensor made from values becomes a constant; its n-th making is the same in every run."""
        order, self.created = self.created, self.created + 1
        if self.discover:
            real = func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
            self.constants.found.append(real)
            self.constants.made.append(len(self.constants.found) - 1)
        return self.constant(self.constants.made[order])

    def constant(self, index: int) -> torch.Tensor:
        """The stand-in of a constant."""
        if self.stand_ins is not None:
            return self.stand_ins[index]
        if index not in self.local:
            self.local[index] = stand_in(self.constants.found[index])
        return self.local[index]

    def replace(self, tree: Any) -> Any:
        """``tree`` with real tensors replaced by stand-ins."""
        if not any(isinstance(x, torch.Tensor) and x.device != META for x in pytree.tree_leaves(tree)):
            return tree
        return pytree.tree_map_only(torch.Tensor, self.swap, tree)

    def swap(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a real tensor."""
        if tensor.device == META:
            return tensor
        if id(tensor) not in self.swaps:
            known = any(t is tensor for t in self.constants.found)
            if not self.discover and not known:
                return tensor
            return self.constant(self.constants.reach(tensor))
        return self.swaps[id(tensor)]


class Substituted(TorchFunctionMode):
    """Within the context ops take other tensors for those that ``swaps`` names by their ids."""

    def __init__(self, swaps: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.swaps = swaps

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call with its tensors replaced."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: self.swaps.get(id(t), t), (args, kwargs or {}))
        return func(*args, **kwargs)


class _WeightNorm(torch.autograd.Function):
    """The one op of CUDA with its backward, for releases that cannot trace that (2.6): in fp32, rounded once."""

    @staticmethod
    def forward(ctx: Any, v: torch.Tensor, g: torch.Tensor, dim: int) -> torch.Tensor:
        w, norm = torch.ops.aten._weight_norm_interface.default(v, g, dim)
        ctx.save_for_backward(v, g, norm)
        ctx.others = [d for d in range(v.dim()) if d != dim % v.dim()]
        return w  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        v, g, saved = ctx.saved_tensors
        kind = torch.promote_types(v.dtype, torch.float32)
        d, x, scale, norm = (t.to(kind) for t in (grad, v, g, saved))
        along = (d * x).sum(ctx.others, keepdim=True)
        return (scale / norm * (d - x * (along / (norm * norm)))).to(v.dtype), (along / norm).to(g.dtype), None


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """One op where CUDA has one: for the first or last dim."""
    if dim not in (0, v.dim() - 1):
        return v * (g / torch.norm_except_dim(v, 2, dim))
    if torch._C.DispatchKey.Meta in torch.ops.aten._weight_norm_interface_backward.default.py_kernels:
        return torch.ops.aten._weight_norm_interface.default(v, g, dim)[0]
    return _WeightNorm.apply(v, g, dim)  # type: ignore[no-any-return,no-untyped-call]


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(tree))


def _is_device(value: Any) -> bool:
    if isinstance(value, str):
        return value.split(":")[0] in ("cpu", "cuda")
    return isinstance(value, torch.device) or (isinstance(value, int) and not isinstance(value, bool))


def _to_meta(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Devices in a call replaced by meta; factories without one get it."""
    if kwargs.get("device") is not None or func in FACTORIES:
        kwargs = {**kwargs, "device": META}
    if func is torch.Tensor.to and len(args) > 1 and _is_device(args[1]):
        args = (args[0], META, *args[2:])
    return args, kwargs
