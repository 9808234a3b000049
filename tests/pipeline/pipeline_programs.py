"""Random small programs over torch functions, as source text with the tensors that they take."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

T = TypeVar("T")
NAMESPACE = {"torch": torch, "F": F, "math": math}
MAX_ELEMENTS = 3000
MAX_VALUE = 1e3
SIZES = (3, 2, 5, 4, 1, 7, 8, 12, 33)
LAYOUTS = (
    "plain",
    "plain",
    "plain",
    "plain",
    "transposed",
    "sliced",
)  # expanded: rows of equal values, whose norms are all rounding noise


class Draw:
    """Choices from any source of integers: hypothesis (which shrinks to the first choice) or a seeded generator."""

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


@dataclass(frozen=True)
class ArgumentSpec:
    """A tensor that a program takes. ``scale`` multiplies normal values; ``layout`` says how it lies in memory."""

    name: str
    shape: tuple[int, ...]
    layout: str = "plain"
    scale: float = 1.0
    requires_grad: bool = True

    def make(self, seed: int, dtype: torch.dtype) -> Tensor:
        """The tensor; its values depend on seed, name and shape."""
        generator = torch.Generator().manual_seed(seed * 1000 + sum(map(ord, self.name)))

        def normal(shape: Sequence[int]) -> Tensor:
            return (torch.randn(list(shape), generator=generator, dtype=torch.float64) * self.scale).to(dtype)

        shape = self.shape
        if self.layout == "transposed" and len(shape) > 1:
            made = normal((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
        elif self.layout == "sliced" and shape:
            made = normal((*shape[:-1], 2 * shape[-1] + 1))[..., 1 : 2 * shape[-1] : 2]
        elif self.layout == "expanded" and len(shape) > 1:
            made = normal((1, *shape[1:])).expand(shape)
        else:
            made = normal(shape)
        return made.detach().requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Program:
    """A function's source text and its arguments."""

    lines: tuple[str, ...]
    results: tuple[str, ...]
    arguments: tuple[ArgumentSpec, ...]

    @property
    def text(self) -> str:
        """The function, as Python source."""
        head = f"def program({', '.join(a.name for a in self.arguments)}):"
        return "\n    ".join([head, *self.lines, f"return {', '.join(self.results)}"])

    def function(self) -> Callable[..., Any]:
        """The compiled function."""
        names = dict(NAMESPACE)
        exec(compile(self.text, "program.py", "exec"), names)
        return names["program"]  # type: ignore[return-value]

    def tensors(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
        """The arguments' tensors."""
        return [a.make(seed, dtype) for a in self.arguments]

    def __str__(self) -> str:
        return self.text + "\n" + "\n".join(map(str, self.arguments))


@dataclass
class Writer:
    """A program under construction. Every line is run at once, so that shapes are known and values stay moderate."""

    draw: Draw
    lines: list[str] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    arguments: list[ArgumentSpec] = field(default_factory=list)

    def argument(self, shape: Sequence[int], prefix: str = "w", scale: float = 1.0) -> str:
        """A new argument; weights (prefix w) lie plainly in memory more often."""
        layout = self.draw.one_of(LAYOUTS) if prefix == "x" or self.draw.maybe(4) else "plain"
        spec = ArgumentSpec(f"{prefix}{len(self.arguments)}", tuple(shape), layout, scale, not self.draw.maybe(8))
        self.arguments.append(spec)
        self.values[spec.name] = spec.make(0, torch.float32).detach()
        return spec.name

    def emit(self, expression: str) -> str | None:
        """Add ``v = expression`` and return the name; None (and no line) where its values are unfit to compare."""
        try:
            value = eval(expression, {**NAMESPACE, **self.values})
        except RuntimeError:  # shapes that do not broadcast
            return None
        if not 0 < value.numel() <= MAX_ELEMENTS or value.dim() > 4:
            return None
        if not bool(torch.isfinite(value).all()) or float(value.abs().max()) > MAX_VALUE:
            return None
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        self.values[name] = value
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a value."""
        return tuple(self.values[name].shape)


def _axis(w: Writer, x: str) -> int:
    return -1 - w.draw.up_to(len(w.shape(x)) - 1)


def _axes(w: Writer, x: str) -> tuple[int, ...]:
    rank = len(w.shape(x))
    first = _axis(w, x)
    return (first, -1 - (-first) % rank) if rank > 1 and w.draw.maybe(3) else (first,)


def _pointwise(w: Writer, x: str) -> str:
    return w.draw.one_of(
        f"F.silu({x})|torch.tanh({x})|F.gelu({x})|{x} * 0.5|{x} + 1.5|F.relu({x})|torch.sigmoid({x})|F.softplus({x})|"
        f"torch.sqrt({x} * {x} + 1)|-{x}|{x}.abs()|torch.exp(-{x}.abs())|torch.cos({x})|F.leaky_relu({x}, 0.1)|"
        f"F.elu({x})|F.gelu({x}, approximate='tanh')|{x}.clamp(-0.7, 0.9)|2 / (1 + {x} * {x})|{x}**2|F.hardswish({x})|"
        f"torch.where({x} > 0.1, {x}, 0.3)|F.mish({x})|torch.erf({x})".split("|")
    )


def _binary(w: Writer, x: str) -> str:
    shape = w.shape(x)
    same = [n for n in w.values if n != x and w.shape(n) == shape]
    kind = w.draw.up_to(3)
    if kind == 0 and same:
        y = w.draw.one_of(same)
    elif kind == 1 and any(w.shape(n)[-1:] == shape[-1:] for n in w.values if n != x):
        y = w.draw.one_of([n for n in w.values if n != x and w.shape(n)[-1:] == shape[-1:]])
    else:
        keep = [s if w.draw.up_to(1) == 0 else 1 for s in shape]
        y = w.argument(keep[w.draw.up_to(len(keep) - 1) :] if keep else keep)
    fn = w.draw.one_of(
        ["{} + {}", "{} * {}", "{} - {}", "{} * torch.sigmoid({})", "torch.maximum({}, {})", "{} / (2 + {}.abs())"]
    )
    fn = w.draw.one_of([fn, fn, "torch.addcmul({}, {}, torch.tanh({}))"])
    return fn.format(x, y, x) if fn.startswith("torch.addcmul") else fn.format(x, y)


def _norm(w: Writer, x: str) -> str:
    shape = w.shape(x)
    n = shape[-1]
    kind = w.draw.up_to(6)
    axis = _axis(w, x)
    if kind == 0:
        return f"F.layer_norm({x}, ({n},), {w.argument((n,))}, {w.argument((n,))}, 1e-3)"
    if kind == 1:
        dims = shape[-2:] if len(shape) > 1 and w.draw.maybe(2) else (n,)
        return f"F.layer_norm({x}, {dims}, eps=1e-2)"
    if kind == 2:
        return f"F.rms_norm({x}, ({n},), {w.argument((n,))}, 1e-3)"
    if kind == 3:
        return f"F.softmax({x}, {axis})"
    if kind == 4:
        return f"F.log_softmax({x}, {axis})"
    if kind == 5:
        return (
            f"({x} - {x}.mean({axis}, keepdim=True)) * torch.rsqrt({x}.var({axis}, correction=0, keepdim=True) + 0.1)"
        )
    return f"{x} * torch.rsqrt({x}.pow(2).mean({axis}, keepdim=True) + 0.1)"


def _move(w: Writer, x: str) -> str:
    shape = w.shape(x)
    rank = len(shape)
    axis = w.draw.up_to(rank - 1)
    size = shape[axis]
    kind = w.draw.up_to(12)
    if kind == 0:
        return f"{x}.permute({w.draw.shuffled(range(rank))})"
    if kind == 1 and rank > 1:
        at = w.draw.up_to(rank - 2)
        return f"{x}.reshape({(*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])})"
    if kind == 2:
        factors = [f for f in range(1, size + 1) if size % f == 0]
        f = w.draw.one_of(factors)
        return f"{x}.reshape({(*shape[:axis], size // f, f, *shape[axis + 1 :])})"
    if kind == 3:
        return f"{x}.flip({axis})"
    if kind == 4:
        return f"{x}.roll({1 + w.draw.up_to(size)}, {axis})"
    if kind == 5:
        start = w.draw.up_to(size - 1)
        return f"{x}.narrow({axis}, {start}, {1 + w.draw.up_to(size - 1 - start)})"
    if kind == 6:
        return f"{x}[{':, ' * axis}{w.draw.up_to(size - 1)}::{1 + w.draw.up_to(2)}]"
    if kind == 7:
        return f"torch.cat([{x}, {w.draw.one_of([x, f'torch.tanh({x})', f'{x} * 2'])}], {axis})"
    if kind == 8:
        wide = (*shape[:axis], 2 + w.draw.up_to(2), *shape[axis:])  # times a weight: norms of equal values are noise
        return f"{x}.unsqueeze({axis}).expand({wide}) * {w.argument(wide)}"
    if kind == 9:
        return f"F.pad({x}, ({w.draw.up_to(2)}, {w.draw.up_to(2)}))"
    if kind == 10:
        return f"torch.stack([{x}, torch.sin({x})], {w.draw.up_to(rank)})"
    if kind == 11 and math.prod(shape) % 6 == 0:
        return f"{x}.reshape({w.draw.one_of([(6, -1), (-1, 3), (2, 3, -1), (-1,)])})"
    return f"{x}.transpose({axis}, {w.draw.up_to(rank - 1)}).contiguous()"


def _mix(w: Writer, x: str) -> str:
    """Cut, swap, join: what a token mixer does."""
    shape = w.shape(x)
    if len(shape) < 2 or shape[-1] % shape[-2]:
        return _move(w, x)
    t, d = shape[-2:]
    return f"{x}.reshape({(*shape[:-2], t, t, d // t)}).transpose(-3, -2).reshape({shape})"


def _gate(w: Writer, x: str) -> str:
    axis = _axis(w, x)
    parts = w.draw.one_of([2, 3])
    if w.shape(x)[axis] % parts:
        return _pointwise(w, x)
    chunks = [f"{x}.chunk({parts}, {axis})[{i}]" for i in w.draw.shuffled(range(parts))]
    if w.draw.maybe(3):
        return f"torch.cat([{', '.join([*chunks[:-1], f'torch.tanh({chunks[-1]})'])}], {axis})"
    return f"{chunks[0]} * torch.sigmoid({chunks[1]})"


def _reduce(w: Writer, x: str) -> str:
    if len(w.shape(x)) == 0:
        return _pointwise(w, x)
    keep = w.draw.one_of([False, True])
    axes = _axes(w, x)
    one = axes if len(set(axes)) > 1 else axes[0]
    kind = w.draw.one_of(["mean", "sum", "amax", "amin", "centred"])
    if kind == "centred":
        return f"{x} - {x}.mean({one}, keepdim=True)"
    return f"{x}.{kind}({one}, keepdim={keep})" + (" * 0.3" if kind == "sum" else "")


def _dot(w: Writer, x: str) -> str:
    shape = w.shape(x)
    k = shape[-1]
    n = w.draw.one_of(SIZES)
    scale = 1 / math.sqrt(k)
    kind = w.draw.up_to(4)
    if kind == 1:
        return f"F.linear({x}, {w.argument((n, k), scale=scale)}, {w.argument((n,))})"
    if kind == 2 and len(shape) == 3:
        return f"torch.bmm({x}.transpose(0, 1), {w.argument((shape[1], k, n), scale=scale)}).transpose(0, 1)"
    if kind == 3 and len(shape) >= 2:
        return f"{x} @ {x}.transpose(-1, -2) * {scale:.3f}"
    if kind == 4 and len(shape) == 3:
        return f"torch.einsum('bth,st->bsh', {x}, {w.argument((n, shape[1]), scale=shape[1] ** -0.5)})"
    return f"{x} @ {w.argument((k, n), scale=scale)}"


def _opaque(w: Writer, x: str) -> str:
    return f"torch.cumsum({x}, {_axis(w, x)}) * 0.2" if w.draw.maybe(2) else _reduce(w, x)


STEPS = (
    _pointwise, _binary, _norm, _reduce, _move, _dot, _gate, _mix, _pointwise, _binary, _binary, _norm, _norm, _move,
    _move, _dot, _reduce, _mix, _gate, _opaque,
)  # fmt: skip


def draw_program(draw: Draw, most: int = 9) -> Program:
    """A program of up to ``most`` lines, with one to three results of which at least one requires a gradient."""
    w = Writer(draw)
    rank = draw.one_of([2, 3, 3, 1, 4])
    shape = [draw.one_of(SIZES[:8]) for _ in range(rank)]
    while math.prod(shape) > MAX_ELEMENTS // 4:
        shape = [max(1, n // 2) for n in shape]
    w.argument(shape, "x")
    for _ in range(draw.up_to(2)):
        w.argument(shape if draw.up_to(1) == 0 else shape[-1:], "x")
    made: list[str] = []
    for _ in range(1 + draw.up_to(most - 1)):
        pool = [*reversed(made), *(a.name for a in w.arguments if a.name[0] == "x")]
        x = pool[0] if not draw.maybe(3) else draw.one_of(pool)
        if not w.shape(x):
            x = w.arguments[0].name
        name = w.emit(draw.one_of(STEPS)(w, x))
        made += [name] if name else []
    if not made:
        made = [w.emit(f"{w.arguments[0].name} * 2") or ""]
    results = [made[-1], *(draw.one_of(made) for _ in range(draw.up_to(2)))]
    results = [n if _dense(w.values[n]) else w.emit(f"{n}.contiguous() * 1.5") or made[-1] for n in results]
    return Program(tuple(w.lines), tuple(dict.fromkeys(results)), tuple(w.arguments))


def _dense(x: Tensor) -> bool:
    return torch.empty_like(x).stride() == x.stride()


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs that hypothesis can shrink."""
    return draw_program(Draw(lambda high: draw(st.integers(0, high))))


def seeded_program(seed: int, most: int = 9) -> Program:
    """A program that depends on the seed alone."""
    rng = random.Random(seed)
    return draw_program(Draw(lambda high: rng.randint(0, high)), most)
