"""Variants of a kernel on a device: their buffers with random contents, launches, times and the check of results."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megafuse.compiler.variants import Place, Variant, in_precision
from megafuse.core.dtypes import DType
from megafuse.runtime.numpy_kernels import numpy_launcher
from megafuse.runtime.shim import cuda_launcher
from megafuse.runtime.tensors import LEAST_FINITE, TORCH_DTYPES, draw_away_from_zero, finite_share
from megafuse.runtime.timer import time_events
from megafuse.validate import judge, measure, same_bits

Work = Callable[[], None]
ROTATED_SHARE = 8  # buffers are doubled where they take less than this part of the free memory
WARMUP = 2


class Timer(Protocol):
    """Times work on the device; tests put made-up times in its place."""

    def __call__(self, variant: Variant, work: Work, samples: int) -> float:
        """Median seconds of ``work``, which runs ``variant`` once."""


def event_timer(variant: Variant, work: Work, samples: int) -> float:
    """By CUDA events, the L2 cache flushed before each sample."""
    return time_events(work, samples=samples, warmup=WARMUP).median * 1e-6


@dataclass(frozen=True)
class Bench:
    """Where variants run. ``backend``: triton on a CUDA device, numpy on the CPU."""

    device: torch.device
    backend: str
    timer: Timer

    def seconds(self, variant: Variant, given: Mapping[str, Tensor], samples: int) -> float:
        """Median seconds of one run, over two sets of buffers in turn where memory allows."""
        steps = [self._bound(variant, buffers) for buffers in self._sets(variant, given)]
        turn = [0]

        def work() -> None:
            turn[0] += 1
            steps[turn[0] % len(steps)]()

        with torch.no_grad():
            return self.timer(variant, work, samples)

    def given(self, variant: Variant, *, signed: bool = True) -> dict[str, Tensor]:
        """Random contents for what the kernels read: the same for all variants of a kernel."""
        return {p.name: self._drawn(p, signed) for p in variant.places if p.kind == "given"}

    def results(self, variant: Variant, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the kernels write, into memory that held NaN (integers: ones) before."""
        buffers = {**given, **self._made(variant, fill=True)}
        with torch.no_grad():
            self._bound(variant, buffers)()
        return {p.name: buffers[p.name] for p in variant.places if p.kind == "made"}

    def disagreement(self, variant: Variant, reference: Variant, given: Mapping[str, Tensor]) -> str:
        """Why ``variant`` may not stand in for ``reference``; empty where it may.

        Without reductions all bits must be equal. Reductions may add in another order: then the acceptance rule holds
        ``variant`` against ``reference``, by the errors that each has beside the same computation in fp64.
        """
        expected = self.results(reference, given)
        if finite_share(expected) < 1:  # a variance below zero, say
            given = self.given(reference, signed=False)
            expected = self.results(reference, given)
        if finite_share(expected) < LEAST_FINITE:
            return "cannot be checked: random inputs give no finite results"
        found, again = self.results(variant, given), self.results(variant, given)
        if set(found) != set(expected):
            return "it writes other values"
        if not all(same_bits(found[n], again[n]) for n in found):
            return "it does not repeat its results"
        if not variant.reduces:
            wrong = [n for n in found if not same_bits(found[n], expected[n])]
            return f"it changes the bits of {', '.join(wrong)}" if wrong else ""
        del again
        exact = self._precise(reference, given, DType.F64)
        rough = self._precise(reference, given, DType.F32) if torch.float64 in _dtypes(found) else {}
        samples = [
            measure(n, "output", found[n], expected[n], exact[n].double(), surrogate=rough.get(n)) for n in found
        ]
        bad = [str(verdict) for verdict in judge(samples) if not verdict.ok]
        return f"it fails the acceptance rule: {bad[0]}" if bad else ""

    def _precise(self, variant: Variant, given: Mapping[str, Tensor], dtype: DType) -> dict[str, Tensor]:
        """The results of the same computation in ``dtype`` throughout."""
        other = {n: t.to(TORCH_DTYPES[dtype]) if t.is_floating_point() else t for n, t in given.items()}
        return self.results(in_precision(variant, self.backend, dtype), other)

    def _sets(self, variant: Variant, given: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        first = {**given, **self._made(variant)}
        if self.device.type != "cuda":
            return [first]
        size = sum(t.untyped_storage().nbytes() for t in first.values())
        if size * ROTATED_SHARE > torch.cuda.mem_get_info(self.device)[0]:
            return [first]
        copies = {n: _strided_copy(t) for n, t in given.items()}
        return [first, {**copies, **self._made(variant)}]

    def _made(self, variant: Variant, *, fill: bool = False) -> dict[str, Tensor]:
        made = {p.name: self._empty(p) for p in variant.places if p.kind != "given"}
        if fill:
            for tensor in made.values():
                tensor.fill_(math.nan if tensor.is_floating_point() else 1)
        return made

    def _bound(self, variant: Variant, buffers: Mapping[str, Tensor]) -> Work:
        make = cuda_launcher if self.backend == "triton" else numpy_launcher
        calls = [
            (make(source), [buffers[n] for n in args])
            for source, args in zip(variant.sources, variant.args, strict=True)
        ]

        def run() -> None:
            for launch, tensors in calls:
                launch(*tensors)

        return run

    def _empty(self, place: Place) -> Tensor:
        return torch.empty_strided(place.shape, place.strides, dtype=TORCH_DTYPES[place.dtype], device=self.device)

    def _drawn(self, place: Place, signed: bool) -> Tensor:
        """Numbers of a size between 1/2 and 3/2, small integers, coin tosses; drawn from the place's name.

        None is near 0, where a quotient or a root would put one result far above all others and hide their errors.
        Matrices of chains have both signs, and products with them are about as large as what they multiply.
        """
        tensor = self._empty(place)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(place.name.encode()))
        memory = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        if place.dtype is DType.BOOL:
            memory.copy_(torch.randint(0, 2, memory.shape, generator=generator, device=self.device))
        elif tensor.is_floating_point():
            draw_away_from_zero(memory, generator, signed=signed or place.inner > 0)
            memory.mul_(place.inner**-0.5 if place.inner else 1.0)
        else:
            memory.random_(0, 3, generator=generator)
        return tensor


def _dtypes(tensors: Mapping[str, Tensor]) -> set[torch.dtype]:
    return {t.dtype for t in tensors.values()}


def _strided_copy(tensor: Tensor) -> Tensor:
    """A copy of the memory behind a tensor, with the same strides."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = torch.as_strided(tensor, (count,), (1,), 0).clone()
    return torch.as_strided(memory, tensor.shape, tensor.stride(), 0)
