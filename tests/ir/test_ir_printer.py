"""Printed graphs."""

from __future__ import annotations

from megafuse.core.dtypes import DType
from megafuse.ir.graph import Builder, Graph
from megafuse.ir.printer import format_graph
from megafuse.ir.types import Opaque, Origin, TensorType


def example(junk: int = 0) -> Graph:
    """``y = x * w`` and its gradients; ``junk`` unused nodes shift the uids."""
    b = Builder()
    for i in range(junk):
        b.const(float(i), DType.F32)
    x = b.input("x", TensorType((2, 3), DType.BF16), (3, 1), "arg", 0)
    w = b.input("w", TensorType((3,), DType.BF16), (1,), "param", 1)
    g = b.input("g", TensorType((2, 3), DType.BF16), (1, 2), "tangent", 2)
    b.origin = Origin("block.py", 31)
    y = b.map("mul", b.map("mul", x, w), 0.5)
    b.origin = None
    dw = b.cast(b.reduce("sum", b.cast(b.map("mul", g, x), DType.F32), [0]), DType.BF16)
    corner = b.pad(b.slice(g, (1, 2), (1, 2), (1, -2)), (0, 1), (2, 3))
    return Graph((x, w, g), (y, corner, dw), 1, (0, 1))


GOLDEN = """\
inputs:
  %0 = input.arg('x', strides=[3, 1])       # bf16[2, 3]
  %1 = input.param('w', strides=[1])        # bf16[3]
  %2 = input.tangent('g', strides=[1, 2])   # bf16[2, 3]
forward:
  %3 = reshape(%1, [1, 3])   # bf16[1, 3]  src[block.py:31]
  %4 = expand(%3)            # bf16[2, 3]  src[block.py:31]
  %5 = mul(%0, %4)           # bf16[2, 3]  src[block.py:31]
  %6 = mul(%5, 0.5:bf16)     # bf16[2, 3]  src[block.py:31]
backward:
  %7 = slice(%2, [1+1, 2+2*-2])           # bf16[1, 2]
  %8 = pad(%7, lo=[0, 1], value=0.0)      # bf16[2, 3]
  %9 = mul(%2, %0)                        # bf16[2, 3]
  %10 = cast.f32(%9)                      # f32[2, 3]
  %11 = reduce.sum(%10, axes=[0])         # f32[3]
  %12 = cast.bf16(%11)                    # bf16[3]
outputs:
  output 0 = %6
  gradient of %0 'x' = %8
  gradient of %1 'w' = %12
"""


def test_text() -> None:
    lines = [" ".join(line.split()) for line in format_graph(example()).splitlines()]
    assert lines == [" ".join(line.split()) for line in GOLDEN.splitlines()]


def test_numbering_does_not_depend_on_uids() -> None:
    assert format_graph(example()) == format_graph(example(junk=5))


def test_comments_line_up() -> None:
    forward = format_graph(example()).split("forward:\n")[1].split("backward:")[0]
    assert len({line.index("#") for line in forward.splitlines()}) == 1


def test_opaque_and_missing_gradient() -> None:
    b = Builder()
    x = b.input("x", TensorType((3,), DType.F32), (1,), "arg", 0)
    call = b.opaque(Opaque("aten.sort", 4, "no converter", (TensorType((3,), DType.F32), None)), [x])
    text = format_graph(Graph((x,), (b.pick(call, 0), None), 1, (0,)))
    assert "opaque[aten.sort](%0, call=4, reason='no converter', results=(f32[3], none))" in text
    assert "pick(%1, 0)" in text and "gradient of %0 'x' = none" in text
