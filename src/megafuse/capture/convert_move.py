"""Converters of pure index maps: views, transposes, slices, padding, concatenation, and their backwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megafuse.capture.context import Context, Unconverted
from megafuse.capture.registry import converts
from megafuse.ir.graph import Node


@converts("clone", "detach", "alias", "contiguous", "lift_fresh_copy", "lift_fresh", "lift", "detach_copy",
          "alias_copy")  # fmt: skip
def identity(cx: Context, x: Node, *_: Any, **__: Any) -> Node:
    """The value itself, of its own type (see group norm): memory layout is the planner's choice."""
    cx.outs = (x.type,)
    return x


@converts("view.default", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "view_copy.default",
          "unsqueeze_copy", "squeeze_copy", "flatten.using_ints", "unflatten.int")  # fmt: skip
def reshape(cx: Context, x: Node, *_: Any, **__: Any) -> Node:
    """Same elements in row-major order."""
    return cx.b.reshape(x, cx.out.shape)


@converts("permute", "permute_copy")
def permute(cx: Context, x: Node, dims: Sequence[int]) -> Node:
    """Permutation of dims."""
    return cx.b.permute(x, dims)


@converts("transpose.int", "transpose_copy.int")
def transpose(cx: Context, x: Node, a: int, b: int) -> Node:
    """Two dims swapped."""
    perm = list(range(x.type.rank))
    if perm:
        perm[a], perm[b] = perm[b], perm[a]
    return cx.b.permute(x, perm)


@converts("t", "t_copy")
def t(cx: Context, x: Node) -> Node:
    """Matrix transpose."""
    return cx.b.permute(x, tuple(reversed(range(x.type.rank))))


@converts("expand", "expand_copy")
def expand(cx: Context, x: Node, *_: Any, **__: Any) -> Node:
    """Dims of size 1 repeat."""
    return cx.b.broadcast(x, cx.out.shape)


@converts("repeat")
def repeat(cx: Context, x: Node, repeats: Sequence[int]) -> Node:
    """The tensor several times along each dim: a new dim of repetitions before each dim, then merged."""
    shape = (1,) * (len(repeats) - x.type.rank) + x.shape
    pairs = [s for n in shape for s in (1, n)]
    wide = [s for r, n in zip(repeats, shape, strict=True) for s in (r, n)]
    return cx.b.reshape(cx.b.expand(cx.b.reshape(x, pairs), wide), cx.out.shape)


def cut(cx: Context, x: Node, dim: int, start: int, size: int, step: int = 1) -> Node:
    """``size`` elements of one dim, from ``start`` in steps."""
    starts, sizes, steps = [0] * x.type.rank, list(x.shape), [1] * x.type.rank
    starts[dim], sizes[dim], steps[dim] = start, size, step
    return cx.b.slice(x, starts, sizes, steps)


def clamped(index: int | None, size: int, default: int) -> int:
    """A slice bound as PyTorch normalises it."""
    if index is None:
        return default
    return min(max(index + size if index < 0 else index, 0), size)


@converts("slice.Tensor", "slice_copy.Tensor")
def slice_(cx: Context, x: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Node:
    """``x[start:end:step]`` along a dim."""
    dim %= x.type.rank
    return cut(cx, x, dim, clamped(start, x.shape[dim], 0), cx.out.shape[dim], step)


@converts("select.int", "select_copy.int")
def select(cx: Context, x: Node, dim: int, index: int) -> Node:
    """One position of a dim, which is dropped."""
    dim %= x.type.rank
    return cx.b.reshape(cut(cx, x, dim, index % x.shape[dim], 1), cx.out.shape)


def cut_all(cx: Context, x: Node, sizes: Sequence[int], dim: int) -> tuple[Node, ...]:
    """Consecutive pieces of a dim."""
    dim %= x.type.rank
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(cut(cx, x, dim, e - s, s) for e, s in zip(ends, sizes, strict=True))


@converts("split_with_sizes", "unsafe_split_with_sizes", "split_with_sizes_copy")
def split_with_sizes(cx: Context, x: Node, sizes: Sequence[int], dim: int = 0) -> tuple[Node, ...]:
    """Pieces of given sizes."""
    return cut_all(cx, x, sizes, dim)


@converts("split.Tensor", "unsafe_split.Tensor", "split_copy.Tensor")
def split(cx: Context, x: Node, size: int, dim: int = 0) -> tuple[Node, ...]:
    """Pieces of one size, the last may be shorter."""
    total = x.shape[dim]
    return cut_all(cx, x, [min(size, total - i) for i in range(0, total, size)] or [0], dim)


@converts("unbind.int", "unbind_copy.int")
def unbind(cx: Context, x: Node, dim: int = 0) -> tuple[Node, ...]:
    """All positions of a dim."""
    return tuple(cx.b.reshape(p, x.shape[: dim % x.type.rank] + x.shape[dim % x.type.rank + 1 :])
                 for p in cut_all(cx, x, [1] * x.shape[dim], dim))  # fmt: skip


@converts("cat")
def cat(cx: Context, xs: Sequence[Node], dim: int = 0) -> Node:
    """Concatenation; parts are promoted, and legacy empty 1-D parts are skipped."""
    parts = [cx.b.cast(x, cx.out.dtype) for x in xs if x.shape != (0,) or cx.out.rank == 1]
    return cx.b.concat(parts, dim % len(cx.out.shape))


@converts("stack")
def stack(cx: Context, xs: Sequence[Node], dim: int = 0) -> Node:
    """Concatenation along a new dim."""
    dim %= len(cx.out.shape)
    parts = [cx.b.cast(x, cx.out.dtype) for x in xs]
    return cx.b.concat([cx.b.reshape(p, (*p.shape[:dim], 1, *p.shape[dim:])) for p in parts], dim)


@converts("flip")
def flip(cx: Context, x: Node, dims: Sequence[int]) -> Node:
    """Dims reversed."""
    for d in dims:
        dim = d % x.type.rank
        if x.shape[dim] > 1:
            x = cut(cx, x, dim, x.shape[dim] - 1, x.shape[dim], -1)
    return x


@converts("roll")
def roll(cx: Context, x: Node, shifts: Sequence[int], dims: Sequence[int] = ()) -> Node:
    """Cyclic shifts, each a concatenation of two slices; without dims the flattened tensor is shifted."""
    shape = x.shape
    if not dims:
        x, dims = cx.b.reshape(x, (math.prod(shape),)), (0,)
    for shift, d in zip(shifts, dims, strict=True):
        dim = d % x.type.rank
        size = x.shape[dim]
        k = shift % size if size else 0
        if k:
            x = cx.b.concat([cut(cx, x, dim, size - k, k), cut(cx, x, dim, 0, size - k)], dim)
    return cx.b.reshape(x, shape)


@converts("constant_pad_nd")
def constant_pad_nd(cx: Context, x: Node, pad: Sequence[int], value: float = 0) -> Node:
    """Padding given from the last dim backwards; negative amounts crop."""
    lo, hi = [0] * x.type.rank, [0] * x.type.rank
    for i in range(len(pad) // 2):
        lo[-1 - i], hi[-1 - i] = pad[2 * i], pad[2 * i + 1]
    starts = [max(-n, 0) for n in lo]
    sizes = [s - max(-a, 0) - max(-b, 0) for s, a, b in zip(x.shape, lo, hi, strict=True)]
    return cx.b.pad(cx.b.slice(x, starts, sizes), [max(n, 0) for n in lo], cx.out.shape, float(value))


def place(cx: Context, x: Node, dim: int, start: int, size: int) -> Node:
    """Zeros of ``size`` along a dim, with ``x`` from ``start`` on."""
    lo, shape = [0] * x.type.rank, list(x.shape)
    lo[dim], shape[dim] = start, size
    return cx.b.pad(x, lo, shape)


def spread(cx: Context, x: Node, dim: int, step: int) -> Node:
    """``step - 1`` zeros after each element of a dim."""
    split_shape = (*x.shape[: dim + 1], 1, *x.shape[dim + 1 :])
    wide = place(cx, cx.b.reshape(x, split_shape), dim + 1, 0, step)
    return cx.b.reshape(wide, (*x.shape[:dim], x.shape[dim] * step, *x.shape[dim + 1 :]))


@converts("slice_backward")
def slice_backward(cx: Context, g: Node, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Node:
    """The gradient in its place among zeros."""
    dim %= g.type.rank
    size = sizes[dim]
    first = clamped(start, size, 0)
    if step != 1 and g.shape[dim] > 0:
        last = (g.shape[dim] - 1) * step + 1
        g = cut(cx, spread(cx, g, dim, step), dim, 0, last)
    return place(cx, g, dim, first, size)


@converts("select_backward")
def select_backward(cx: Context, g: Node, sizes: Sequence[int], dim: int, index: int) -> Node:
    """The gradient in its place among zeros."""
    dim %= len(sizes)
    kept = cx.b.reshape(g, (*sizes[:dim], 1, *sizes[dim + 1 :]))
    return place(cx, kept, dim, index % sizes[dim], sizes[dim])


@converts("pixel_shuffle")
def pixel_shuffle(cx: Context, x: Node, r: int) -> Node:
    """[..., C*r*r, H, W] -> [..., C, H*r, W*r]."""
    *lead, c, h, w = x.shape
    n = len(lead)
    parts = cx.b.reshape(x, (*lead, c // (r * r), r, r, h, w))
    return cx.b.reshape(cx.b.permute(parts, (*range(n), n, n + 3, n + 1, n + 4, n + 2)), cx.out.shape)


@converts("pixel_unshuffle")
def pixel_unshuffle(cx: Context, x: Node, r: int) -> Node:
    """[..., C, H*r, W*r] -> [..., C*r*r, H, W]."""
    *lead, c, h, w = x.shape
    n = len(lead)
    parts = cx.b.reshape(x, (*lead, c, h // r, r, w // r, r))
    return cx.b.reshape(cx.b.permute(parts, (*range(n), n, n + 2, n + 4, n + 1, n + 3)), cx.out.shape)


@converts("channel_shuffle")
def channel_shuffle(cx: Context, x: Node, groups: int) -> Node:
    """[N, G * C, ...] -> [N, C * G, ...]: the channels of the groups in turn."""
    n, c, *rest = x.shape
    parts = cx.b.reshape(x, (n, groups, c // groups, math.prod(rest)))
    return cx.b.reshape(cx.b.permute(parts, (0, 2, 1, 3)), x.shape)


def overwrite(cx: Context, x: Node, source: Node, dim: int, start: int) -> Node:
    """``x`` with ``source`` written over a run of a dim."""
    source = cx.b.cast(source, x.dtype)
    end = start + source.shape[dim]
    head, tail = cut(cx, x, dim, 0, start), cut(cx, x, dim, end, x.shape[dim] - end)
    return cx.b.concat([head, source, tail], dim)


@converts("slice_scatter")
def slice_scatter(
    cx: Context, x: Node, source: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Node:
    """``x`` with a slice replaced."""
    dim %= x.type.rank
    if step != 1:
        raise Unconverted("slice_scatter with a step")
    size = x.shape[dim]
    first, last = clamped(start, size, 0), clamped(end, size, size)
    shape = (*x.shape[:dim], max(last - first, 0), *x.shape[dim + 1 :])
    return overwrite(cx, x, cx.b.broadcast(source, shape), dim, first)


@converts("select_scatter")
def select_scatter(cx: Context, x: Node, source: Node, dim: int, index: int) -> Node:
    """``x`` with one position of a dim replaced."""
    dim %= x.type.rank
    kept = cx.b.reshape(source, (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    return overwrite(cx, x, kept, dim, index % x.shape[dim])


@converts("arange")
def arange(cx: Context, *bounds: float, **_: Any) -> Node:
    """start + step * index."""
    start = bounds[0] if len(bounds) > 1 else 0
    step = bounds[2] if len(bounds) > 2 else 1
    return ramp(cx, start, step)


@converts("linspace")
def linspace(cx: Context, start: float, end: float, steps: int, **_: Any) -> Node:
    """``steps`` values from start to end."""
    return ramp(cx, start, (end - start) / (steps - 1) if steps > 1 else 0.0)


def ramp(cx: Context, start: float, step: float) -> Node:
    """start + step * index, computed in the result's compute type."""
    kind = cx.out.dtype.compute
    index = cx.b.cast(cx.b.iota(cx.out.shape, 0), kind)
    if step != 1:
        index = cx.b.map("mul", index, step)
    if start != 0:
        index = cx.b.map("add", index, start)
    return cx.finish(index)


def band(cx: Context, shape: Sequence[int], fn: str, diagonal: int) -> Node:
    """Mask of the last two dims: ``column - row`` compared with ``diagonal``."""
    rank = len(shape)
    plane = tuple(shape[-2:])
    row, column = cx.b.iota(plane, 0), cx.b.iota(plane, 1)
    mask = cx.b.map(fn, cx.b.map("sub", column, row), diagonal)
    return cx.b.broadcast(mask, shape) if rank > 2 else mask


def _triangle(cx: Context, x: Node, fn: str, diagonal: int) -> Node:
    return cx.finish(cx.b.map("where", band(cx, x.shape, fn, diagonal), x, cx.const(0, x.dtype)))


@converts("tril")
def tril(cx: Context, x: Node, diagonal: int = 0) -> Node:
    """Lower triangle, zeros above."""
    return _triangle(cx, x, "le", diagonal)


@converts("triu")
def triu(cx: Context, x: Node, diagonal: int = 0) -> Node:
    """Upper triangle, zeros below."""
    return _triangle(cx, x, "ge", diagonal)


@converts("eye")
def eye(cx: Context, *_: Any, **__: Any) -> Node:
    """Identity matrix."""
    return cx.finish(cx.b.cast(band(cx, cx.out.shape, "eq", 0), cx.out.dtype))
