"""Sizes share programs: which program serves a call whose sizes have not been seen before.

The first call gets a program of its own exact sizes. When one comes that differs from it in sizes only, the callable is
captured at a few sizes and the captures become one with open sizes (``capture.unify``); one program made from it serves
all sizes of a class. Classes differ in what is good for them, not in what is right: small sizes, where launches cost
most; large ones; and sizes that need 64-bit indices. Sizes 0 and 1 are kept apart, since PyTorch treats them in a way
of their own. What cannot be shared gets a program for each size, up to a limit.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megafuse.capture.open_call import Layout, OpenCall, open_calls
from megafuse.capture.types import Captured
from megafuse.capture.unify import Differs, Scalar, corners, unify
from megafuse.compiler.bound import Program
from megafuse.core.device import DeviceSpec
from megafuse.core.sizes import WIDE, Dim, OpenSize, is_open, settle
from megafuse.ir.graph import Graph
from megafuse.ir.types import Input
from megafuse.ir.verify import legal_at, open_questions
from megafuse.runtime.binding import BindingKey

Form = tuple[Any, ...]  # all of a binding key but layouts and alignment
Capture = Callable[[Sequence[Layout]], Captured]
Compile = Callable[[Captured, Sequence[Scalar]], Program]
ATTEMPTS = 3  # families of calls of one form: a callable may do one thing at small sizes and another at large ones
LARGE_PASSES = 2  # launches in whose time the largest value of a small step could be moved
TYPICAL_SMALL, TYPICAL_LARGE = 1 / 16, 4  # largest values of typical steps, in terms of the largest small one


class CallFails(Differs):
    """The callable does not run, or cannot be captured, at the sizes ``point``."""

    def __init__(self, what: str, point: Mapping[str, int]) -> None:
        super().__init__(what)
        self.point = dict(point)


@dataclass
class Family:
    """All calls of one form, captured with open sizes. ``programs`` by class: (large, wide).

    That the callable does the same at a size (Python may branch on it) is known from a capture at that size, which is
    made before the size is first served.
    """

    call: OpenCall
    captures: list[Captured]
    points: list[Mapping[str, int]]
    programs: dict[tuple[bool, bool], Program] = field(default_factory=dict)

    def __post_init__(self) -> None:
        captured, _ = self.unified(dict.fromkeys(self.call.names, 64), wide=False)
        self.values = [s for s in dict.fromkeys(_spans(captured.graph)) if is_open(s[0])]
        self.guards = open_questions(captured.graph)
        self.seen = {tuple(sorted(point.items())) for point in self.points}

    def sizes_of(self, layouts: Sequence[Layout]) -> dict[str, int] | None:
        """The open sizes of a call, if it is one of these."""
        sizes = self.call.values(layouts)
        return sizes if sizes is not None and all(legal_at(node, sizes) for node in self.guards) else None

    def reach(self, sizes: Mapping[str, int], capture: Capture) -> None:
        """Make sure that the callable does the same at ``sizes``, if they were not captured yet.

        Raises:
            Differs: it does not.
        """
        point = tuple(sorted(sizes.items()))
        if point in self.seen:
            return
        captures = [*self.captures, _capture_at(self.call, sizes, capture)]
        unify(captures, [*self.points, sizes], [Dim(name, 64) for name in self.call.names])
        self.seen.add(point)

    def unified(self, typical: Mapping[str, int], wide: bool) -> tuple[Captured, list[Scalar]]:
        """The capture with open sizes, for plans that are good at ``typical`` ones."""
        return unify(self.captures, self.points, [Dim(name, typical[name], wide) for name in self.call.names])

    def program(self, sizes: Mapping[str, int], device: DeviceSpec, compile_: Compile) -> Program:
        """The program of the class to which ``sizes`` belong."""
        small_bytes = LARGE_PASSES * device.launch_seconds * device.dram_bandwidth
        large = self.largest(sizes) > small_bytes
        wide = any(settle(span, sizes) >= WIDE for span, _ in self.values)
        if (large, wide) not in self.programs:
            aim = small_bytes * (TYPICAL_LARGE if large else TYPICAL_SMALL)
            self.programs[large, wide] = compile_(*self.unified(self.typical(sizes, aim), wide))
        return self.programs[large, wide]

    def largest(self, sizes: Mapping[str, int]) -> int:
        """Bytes of the largest value."""
        return max((settle(span, sizes) * size for span, size in self.values), default=0)

    def typical(self, sizes: Mapping[str, int], aim: float) -> dict[str, int]:
        """Powers of two near ``sizes``, scaled so that the largest value has about ``aim`` bytes."""
        powers = {name: max(1, (n - 1).bit_length()) for name, n in sizes.items()}

        def scaled(step: int) -> dict[str, int]:
            return {name: 1 << max(1, power + step) for name, power in powers.items()}

        return scaled(max((s for s in range(-40, 41) if self.largest(scaled(s)) <= aim), default=-40))


def _spans(graph: Graph) -> list[tuple[int, int]]:
    """Elements that each value spans in memory, and their size in bytes."""
    spans = [(node.type.numel, node.dtype.size) for node in graph.nodes]
    for node in graph.inputs:
        assert isinstance(node.attrs, Input)
        reach: int = sum(((n - 1) * s for n, s in zip(node.shape, node.attrs.strides, strict=True)), start=1)
        spans.append((reach, node.dtype.size))
    return spans


@dataclass
class Specialised:
    """A call that has an exact program."""

    form: Form
    layouts: tuple[Layout, ...]


class Sharing:
    """Families of one structure's calls, and what keeps others from being one."""

    def __init__(self) -> None:
        self.families: list[tuple[Form, Family]] = []
        self.exact: list[Specialised] = []
        self.tried: Counter[tuple[Form, OpenCall]] = Counter()
        self.reasons: list[tuple[Form, str]] = []  # why calls share no program

    def find(
        self, key: BindingKey, arguments: int, device: DeviceSpec, capture: Capture, compile_: Compile
    ) -> tuple[Program, Mapping[str, int]] | None:
        """The shared program that serves a call, and its open sizes; None where it needs a program of its own.

        The first ``arguments`` tensors of the call are the user's arguments. ``capture`` captures the call with other
        layouts of these, ``compile_`` makes a program.
        """
        form, layouts = form_of(key), layouts_of(key)
        for other, family in list(self.families):
            sizes = family.sizes_of(layouts) if other == form else None
            found = sizes and self._program(form, family, sizes, device, capture, compile_)
            if found:
                return found
        for seen in reversed(self.exact):
            for call in open_calls(seen.layouts, layouts, arguments) if seen.form == form else ():
                if self.tried[form, call] == ATTEMPTS:
                    continue
                self.tried[form, call] += 1
                try:
                    family = _family(call, call.values(seen.layouts), call.values(layouts), capture)
                except Differs as error:
                    self._note(form, error, call.values(layouts))
                    continue
                self.families.append((form, family))
                sizes = family.sizes_of(layouts)
                found = sizes and self._program(form, family, sizes, device, capture, compile_)
                if found:
                    return found
        return None

    def _program(
        self,
        form: Form,
        family: Family,
        sizes: Mapping[str, int],
        device: DeviceSpec,
        capture: Capture,
        compile_: Compile,
    ) -> tuple[Program, Mapping[str, int]] | None:
        try:
            family.reach(sizes, capture)
            return family.program(sizes, device, compile_), sizes
        except Differs as error:
            self._note(form, error, sizes)
        except OpenSize as question:
            self.families.remove((form, family))
            self.reasons.append((form, f"its plan depends on the size ({question})"))
        return None

    def _note(self, form: Form, error: Differs, sizes: Mapping[str, int] | None) -> None:
        """Remember why calls do not share, unless it is that this very call fails: that is the user's error."""
        if isinstance(error, CallFails) and error.point == sizes and error.__cause__ is not None:
            raise error.__cause__
        self.reasons.append((form, str(error)))

    def specialise(self, key: BindingKey) -> None:
        """Note that a call gets a program of its own."""
        self.exact.append(Specialised(form_of(key), layouts_of(key)))

    def over_limit(self, key: BindingKey, limit: int, labels: Sequence[str]) -> str | None:
        """Why a call gets no program of its own any more: too many differ from it in sizes only."""
        form, layouts = form_of(key), layouts_of(key)
        alike = [s for s in self.exact if s.form == form]
        if len(alike) < limit:
            return None
        reasons = [why for other, why in self.reasons if other == form]
        why = f"sizes could not share one because {reasons[-1]}" if reasons else "no two calls had a common form"
        return (
            f"{changed(alike[-1].layouts, layouts, labels)}; {len(alike)} programs were made for other sizes already, "
            f"and {why}. The original ops run for further sizes (fuse(..., max_specializations=...) sets the limit)"
        )


def changed(first: Sequence[Layout], second: Sequence[Layout], labels: Sequence[str]) -> str:
    """Where two calls differ first: ``argument x has size 9 in dim 0, where it had 8``."""
    for label, (a, s), (b, t) in zip(labels, first, second, strict=True):
        if len(a) != len(b):
            return f"{label} has {len(b)} dims, where it had {len(a)}"
        for dim, (m, n) in enumerate(zip(a, b, strict=True)):
            if m != n:
                return f"{label} has size {n} in dim {dim}, where it had {m}"
        if s != t:
            return f"{label} has strides {t}, where it had {s}"
    return "the call differs in the alignment of its tensors"


def form_of(key: BindingKey) -> Form:
    """All of a binding key but layouts and alignment."""
    return (tuple((t.dtype, t.device, t.requires_grad) for t in key.tensors), key.flags, key.extra)


def layouts_of(key: BindingKey) -> tuple[Layout, ...]:
    """Shape and strides of each tensor."""
    return tuple((t.shape, t.strides) for t in key.tensors)


def stand_ins(arguments: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
    """Tensors without data of other layouts, that take gradients as ``arguments`` do."""
    made: dict[int, Tensor] = {}
    with torch.inference_mode(False), torch.enable_grad():
        for tensor, (shape, strides) in zip(arguments, layouts, strict=True):
            if id(tensor) not in made:
                empty = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
                empty.requires_grad_(tensor.requires_grad)
                made[id(tensor)] = empty if tensor.is_leaf else empty.view_as(empty)
    return [made[id(t)] for t in arguments]


def _family(call: OpenCall, first: Any, second: Any, capture: Capture) -> Family:
    """Capture a call at the corners of a box of sizes, and at one point far from them.

    Raises:
        Differs: the captures do not become one, or the callable does not run at other sizes.
    """
    low, high = _box(call, first, second)
    points = corners(low, high)
    captures = [_capture_at(call, point, capture) for point in points]
    reasons: list[Differs] = []
    for factor, plus in ((2, 3), (1, 1)):
        point = {name: factor * high[name] + plus + 2 * i for i, name in enumerate(high)}
        try:
            return Family(call, [*captures, _capture_at(call, point, capture)], [*points, point])
        except Differs as error:
            reasons.append(error)
    raise min(reasons, key=lambda error: isinstance(error, CallFails))  # a size of our making may be none of the user's


def _box(call: OpenCall, first: Mapping[str, int], second: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """The sizes of the two calls, moved away from sizes that other dims have: no two should be equal by chance."""
    taken = {n for shape, _ in call.layouts for n in shape if not is_open(n)}
    low: dict[str, int] = {}
    high: dict[str, int] = {}
    for name in call.names:
        small, large = sorted((first[name], second[name]))
        for box, size in ((low, small), (high, max(large, small + 1))):
            while size in taken:
                size += 1
            taken.add(size)
            box[name] = size
    return low, high


def _capture_at(call: OpenCall, point: Mapping[str, int], capture: Capture) -> Captured:
    at = ", ".join(f"{name} = {size}" for name, size in point.items())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return capture(call.at(dict(point)))
    except Exception as error:
        line = str(error).strip().splitlines()
        what = f"it cannot be captured at {at}: {line[0] if line else type(error).__name__}"
        raise CallFails(what, point) from error
