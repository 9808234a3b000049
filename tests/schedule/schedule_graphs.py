"""Small graphs by hand, and their covers."""

from __future__ import annotations

from collections.abc import Sequence

from megafuse.core.device import DeviceSpec, device_spec
from megafuse.core.dtypes import DType
from megafuse.fusion.plan import Cover
from megafuse.fusion.planner import cover_options
from megafuse.ir.graph import Builder, Graph, Node, contiguous_strides
from megafuse.ir.types import TensorType
from megafuse.schedule.step import build_step
from megafuse.schedule.types import Step

DEVICE: DeviceSpec = device_spec(90)


def arg(b: Builder, position: int, *shape: int, role: str = "arg", dtype: DType = DType.F32) -> Node:
    """An input called ``x<position>``."""
    return b.input(f"x{position}", TensorType(shape, dtype), contiguous_strides(shape), role, position)


def norm(b: Builder, x: Node, eps: float = 1e-3) -> Node:
    """``x * rsqrt(mean(x^2) + eps)`` over the last axis."""
    last = x.type.rank - 1
    mean = b.map("mul", b.reduce("sum", b.map("mul", x, x), [last], keepdim=True), 1.0 / x.shape[-1])
    return b.map("mul", x, b.map("rsqrt", b.map("add", mean, eps)))


def mixed(b: Builder, x: Node) -> Node:
    """[B, T, D] -> [B, T, D]: pieces of tokens trade places with tokens."""
    batch, tokens, dim = x.shape
    pieces = b.reshape(x, (batch, tokens, tokens, dim // tokens))
    return b.reshape(b.permute(pieces, (0, 2, 1, 3)), x.shape)


def graph(inputs: Sequence[Node], *outputs: Node) -> Graph:
    """A graph without gradients."""
    return Graph(tuple(inputs), outputs, len(outputs))


def cover_of(made: Graph) -> Cover:
    """The cover of a graph whose outputs are contiguous."""
    return min(cover_options(made, {}, DEVICE), key=lambda option: option.seconds).cover()


def step_of(made: Graph, *, finishers_alone: bool = False) -> Step:
    """The scheduled step of a graph whose outputs are contiguous."""
    return build_step(cover_of(made), DEVICE, finishers_alone=finishers_alone)
