"""A random module under construction: every line is run at once, so that shapes are known and values stay moderate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafuse.workloads.random_modules import DTYPES, NAME, NO_FLOATS, Child, Leaf, Line, ModuleProgram

T = TypeVar("T")
MAX_ELEMENTS = 4096
MAX_VALUE = 1e2  # other draws of the inputs may be larger, and squares of them must fit fp16
SIZES = (3, 2, 5, 4, 1, 7, 8, 12, 33)
INPUT_LAYOUTS = ("plain", "plain", "plain", "transposed", "sliced", "expanded")
MIN_SPREAD = 0.1  # of a norm's operand, as a part of its RMS: the norm of nearly equal values is rounding noise


class Draw:
    """Choices from any source of integers; the first choice is the plainest."""

    def __init__(self, integer: Callable[[int], int]) -> None:
        self.up_to = integer  # an integer from 0 to the argument, both included

    def one_of(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.up_to(len(items) - 1)]

    def shuffled(self, items: Iterable[T]) -> list[T]:
        """The items in some order."""
        left, out = list(items), []
        while left:
            out.append(left.pop(self.up_to(len(left) - 1)))
        return out

    def maybe(self, one_in: int) -> bool:
        """True once in ``one_in`` times."""
        return self.up_to(one_in - 1) == one_in - 1


@dataclass
class Writer:
    """What has been written so far, and the values of one run of it.

    ``exact`` names what is not rounded on its way: inputs, state and moves of them. In 16-bit types a function with a
    jump in its value or slope is applied to those alone: elsewhere one rounding decides a branch, and no rule can judge
    the two sides (docs/numerics.md).
    """

    draw: Draw
    dtype: str
    seed: int = 0
    lines: list[Line] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    exact: set[str] = field(default_factory=set)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that an expression may use elementwise: floating-point values, inputs, parameters, buffers."""
        owned = {f"self.{n}": t for n, t in self.state.items() if isinstance(t, Tensor)}
        return {n: t for n, t in {**owned, **self.values}.items() if t.is_floating_point()}

    def leaf(self, shape: Sequence[int], kind: str = "", *, layout: str = "", scale: float = 1.0) -> str:
        """A new tensor; ``kind`` is x, w or b, by default a parameter and now and then an input or a buffer."""
        kind = kind or self.draw.one_of("wwwwwwxb")
        usual = INPUT_LAYOUTS if kind == "x" else ("plain", "plain", "plain", "transposed")
        layout = layout or self.draw.one_of(usual)
        if len(shape) < 2 and layout in ("transposed", "expanded"):
            layout = "plain"
        gradient = kind != "b" and layout not in NO_FLOATS and not self.draw.maybe(7)
        name = f"{kind}{len(self.leaves)}" if kind == "x" else f"self.{kind}{len(self.leaves)}"
        made = Leaf(name, tuple(shape), layout, round(scale, 3), gradient)
        self.leaves.append(made)
        value = eval(made.text, {"normal": self._normal})
        (self.values if kind == "x" else self.state)[name.removeprefix("self.")] = value
        self.exact.add(name)
        return name

    def child(self, text: str) -> str:
        """A new submodule, now and then with a frozen parameter; it shares the weight of one with the same text."""
        same = [c.name for c in self.children if c.text == text]
        made = Child(f"self.m{len(self.children)}", text)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * self.seed + len(self.children))
            module = eval(text, {"nn": nn}).to(DTYPES[self.dtype])
        names = [n for n, _ in module.named_parameters(recurse=False)]
        if names and self.draw.maybe(6):
            made = replace(made, frozen=(self.draw.one_of(names),))
        if same and "weight" in names:
            made = replace(made, shares_weight_of=same[0], frozen=())
        self.children.append(made)
        self.state[made.name.removeprefix("self.")] = module
        return made.name

    def emit(self, expression: str) -> str | None:
        """Add ``v = expression`` and return the name; None (and no line) where its values are unfit to compare."""
        try:
            value = eval(expression, {"torch": torch, "F": F, "self": SimpleNamespace(**self.state), **self.values})
        except (RuntimeError, ValueError, IndexError):  # shapes or dtypes that do not go together
            return None
        if not 0 < value.numel() <= MAX_ELEMENTS or value.dim() > 5:
            return None
        if not bool(torch.isfinite(value).all()) or float(value.detach().abs().max()) > MAX_VALUE:
            return None
        line = Line(f"v{len(self.lines)}", expression)
        self.lines.append(line)
        self.values[line.name] = value.detach()
        return line.name

    def emit_move(self, expression: str) -> str | None:
        """Add a line that moves elements and computes nothing."""
        name = self.emit(expression)
        if name and self.may_jump(*NAME.findall(expression)):
            self.exact.add(name)
        return name

    def may_jump(self, *names: str) -> bool:
        """Whether a function with a jump may be applied to these."""
        return self.dtype == "fp32" or self.exact.issuperset(names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self.tensors[name].shape)

    def spread(self, name: str, axes: Sequence[int]) -> bool:
        """Whether values differ enough along ``axes`` for a norm over them to be more than rounding noise."""
        x = self.tensors[name].float()
        centred = x - x.mean(list(axes), keepdim=True)
        rms = float(x.pow(2).mean().sqrt())
        return float(centred.pow(2).mean(list(axes)).sqrt().min()) > MIN_SPREAD * rms > 0

    def program(self, results: Sequence[str]) -> ModuleProgram:
        """What was written, without what ``results`` do not need."""
        parts = tuple(self.leaves), tuple(self.children), tuple(self.lines)
        return ModuleProgram(self.dtype, self.seed, *parts, tuple(results)).pruned()

    def _normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        numbers = torch.Generator().manual_seed(1000 * self.seed + len(self.leaves))
        return (torch.randn(shape, generator=numbers) * scale).to(DTYPES[self.dtype])
