"""What a workload is: a plain eager module, the inputs it takes, and the sizes it is run at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

Sizes = Mapping[str, int]

SIZE_NAMES = ("small", "odd", "gpu")


class InputMaker(Protocol):
    """Makes a module's positional inputs from sizes; the same seed gives the same values on one device type."""

    def __call__(
        self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device, seed: int, requires_grad: bool
    ) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, eq=False)
class Workload:
    """A module to fuse, with everything needed to run it.

    `inputs` takes all sizes, `build` those not named in `input_sizes`, each as a keyword.
    `default_sizes` holds "small" and "odd" (CPU tests) and "gpu" (measurements).
    `family` is "block", "mutation" or "stranger".
    """

    name: str
    build: Callable[..., nn.Module]
    inputs: InputMaker
    default_sizes: Mapping[str, Sizes]
    family: str
    input_sizes: frozenset[str] = frozenset({"batch"})

    def __post_init__(self) -> None:
        missing = [key for key in SIZE_NAMES if "batch" not in self.default_sizes.get(key, {})]
        if missing:
            raise ValueError(f"workload {self.name!r}: default_sizes lacks {missing}, or a 'batch' in them")

    def sizes(self, size: str | Sizes = "small", **changes: int) -> dict[str, int]:
        """The sizes named `size` (or given as a mapping), with single entries replaced by `changes`."""
        if isinstance(size, str):
            if size not in self.default_sizes:
                raise KeyError(f"workload {self.name!r} has no size {size!r}; it has {', '.join(self.default_sizes)}")
            size = self.default_sizes[size]
        expected = set(self.default_sizes["small"])
        merged = {**size, **changes}
        if set(merged) != expected:
            raise ValueError(f"workload {self.name!r} takes the sizes {sorted(expected)}, got {sorted(merged)}")
        return merged

    def module(
        self,
        size: str | Sizes = "small",
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        perturb: float = 0.1,
    ) -> nn.Module:
        """Build the module from `seed` in float32 on `device`, then cast it to `dtype`.

        Parameters that start constant (gammas, betas, zero biases) get normal noise of scale `perturb`: at ones and
        zeros they would hide a forgotten or swapped affine part. 0 keeps the constructor's values.
        """
        target = _concrete(device)
        keywords = {key: value for key, value in self.sizes(size).items() if key not in self.input_sizes}
        with torch.random.fork_rng(devices=[target] if target.type == "cuda" else []):
            torch.manual_seed(seed)
            with target:
                module = self.build(**keywords)
            if perturb:
                _perturb_constants(module, perturb)
        return module.to(dtype=dtype)

    def make(
        self,
        size: str | Sizes = "small",
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        perturb: float = 0.1,
        requires_grad: bool = True,
    ) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module and its positional inputs; floating-point inputs require gradients unless told otherwise."""
        target = _concrete(device)
        module = self.module(size, dtype=dtype, device=target, seed=seed, perturb=perturb)
        inputs = self.inputs(self.sizes(size), dtype=dtype, device=target, seed=seed + 1, requires_grad=requires_grad)
        return module, inputs


registry: dict[str, Workload] = {}


def register(workload: Workload) -> Workload:
    """Add a workload to the registry; a name may be used once."""
    if workload.name in registry:
        raise ValueError(f"workload {workload.name!r} is registered twice")
    registry[workload.name] = workload
    return workload


def get(name: str) -> Workload:
    """The workload of that name."""
    if name not in registry:
        raise KeyError(f"no workload {name!r}; there are: {', '.join(sorted(registry))}")
    return registry[name]


def names(family: str | None = None) -> list[str]:
    """Names of all workloads, or of one family, in the order they were registered."""
    return [workload.name for workload in registry.values() if family in (None, workload.family)]


def normal(*shapes: tuple[str, ...]) -> InputMaker:
    """Standard-normal inputs, one per shape; a shape is a tuple of size names."""

    def make_inputs(
        sizes: Sizes, *, dtype: torch.dtype, device: torch.device, seed: int, requires_grad: bool
    ) -> tuple[Tensor, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        made = (torch.randn([sizes[axis] for axis in shape], generator=generator, device=device) for shape in shapes)
        return tuple(tensor.to(dtype).requires_grad_(requires_grad) for tensor in made)

    return make_inputs


def size_table(**columns: tuple[int, int, int]) -> dict[str, Sizes]:
    """Default sizes from one (small, odd, gpu) triple per size name."""
    return {key: {name: column[i] for name, column in columns.items()} for i, key in enumerate(SIZE_NAMES)}


def _concrete(device: torch.device | str) -> torch.device:
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


@torch.no_grad()
def _perturb_constants(module: nn.Module, scale: float) -> None:
    for parameter in module.parameters():
        if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.randn_like(parameter), alpha=scale)
