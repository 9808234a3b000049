"""The one comparison: (fused, unfused, oracle) triples of a tensor, summed over seeds and judged by the one rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megafuse.validate.tolerance import RULE, SURROGATE_SCALE, Rule, precision

_CHUNK = 1 << 22  # elements compared at a time: bounds the fp64 temporaries
_WITNESSES = 3


@dataclass(frozen=True)
class Witness:
    """One element: its coordinates and the three values there, and which mismatch it shows."""

    seed: int
    coords: tuple[int, ...]
    fused: float
    unfused: float
    oracle: float

    def __str__(self) -> str:
        where = f"seed {self.seed} [{', '.join(map(str, self.coords))}]"
        return f"{where}: fused {self.fused:.6g}, unfused {self.unfused:.6g}, oracle {self.oracle:.6g}"


@dataclass(frozen=True)
class Sample:
    """Sums over the elements of one tensor (one seed, or several added up). e = fused - oracle, d = unfused - oracle.

    ``elements`` counts those finite in all three; ``excess`` is the largest |e| beyond the ulp part of the max rule;
    ``largest`` holds both that and the largest |d| per seed; ``column_*`` hold, per index of the last axis, sum(e * o);
    ``row_square`` is the sum over rows of sum(e * o)**2.
    """

    name: str
    role: str
    dtype: torch.dtype
    elements: int = 0
    skipped: int = 0
    mask_errors: int = 0
    nonfinite: int = 0
    mismatches: int = 0
    fused_square: float = 0.0
    unfused_square: float = 0.0
    oracle_square: float = 0.0
    fused_cross: float = 0.0
    unfused_cross: float = 0.0
    row_square: float = 0.0
    column_cross: torch.Tensor | None = None
    fused_max: float = 0.0
    unfused_max: float = 0.0
    excess: float = -math.inf
    largest: tuple[tuple[float, float], ...] = ()
    worst: tuple[tuple[float, Witness], ...] = ()
    bad_mask: tuple[Witness, ...] = ()

    @property
    def fused_rms(self) -> float:
        """RMS(fused - oracle)."""
        return math.sqrt(self.fused_square / max(self.elements, 1))

    @property
    def unfused_rms(self) -> float:
        """RMS(unfused - oracle)."""
        return math.sqrt(self.unfused_square / max(self.elements, 1))

    @property
    def oracle_rms(self) -> float:
        """RMS(oracle)."""
        return math.sqrt(self.oracle_square / max(self.elements, 1))

    @property
    def gain(self) -> float:
        """Relative systematic scaling of the fused result: sum(e * o) / sum(o * o)."""
        return self.fused_cross / self.oracle_square if self.oracle_square else 0.0

    @property
    def unfused_gain(self) -> float:
        """The same of the unfused result."""
        return self.unfused_cross / self.oracle_square if self.oracle_square else 0.0

    @property
    def gain_error(self) -> float:
        """Standard error of ``gain`` when errors within a row, or within a column, may be fully correlated."""
        if not self.oracle_square or self.column_cross is None:
            return 0.0
        columns = float(self.column_cross.square().sum())
        return math.sqrt(max(columns, self.row_square)) / self.oracle_square

    def __add__(self, other: Sample) -> Sample:
        summed = {f: getattr(self, f) + getattr(other, f) for f in _SUMMED}
        largest = {f: max(getattr(self, f), getattr(other, f)) for f in ("fused_max", "unfused_max", "excess")}
        worst = tuple(sorted(self.worst + other.worst, key=lambda w: -w[0])[:_WITNESSES])
        bad = (self.bad_mask + other.bad_mask)[:_WITNESSES]
        columns = [c for c in (self.column_cross, other.column_cross) if c is not None]
        return replace(
            self,
            **summed,
            **largest,
            worst=worst,
            bad_mask=bad,
            column_cross=torch.stack(columns).sum(0) if columns else None,
        )


_SUMMED = (
    *("elements", "skipped", "mask_errors", "nonfinite", "mismatches", "fused_square", "unfused_square"),
    *("oracle_square", "fused_cross", "unfused_cross", "row_square", "largest"),
)


def measure(
    name: str,
    role: str,
    fused: torch.Tensor,
    unfused: torch.Tensor,
    oracle: torch.Tensor,
    *,
    seed: int = 0,
    surrogate: torch.Tensor | None = None,
    rule: Rule = RULE,
) -> Sample:
    """Sums over one triple of equal shapes; ``fused`` and ``unfused`` share a dtype, ``oracle`` is fp64.

    Integer and bool tensors are compared exactly (``unfused`` is the reference). For fp64 tensors give ``surrogate``,
    the same result computed in fp32: its error, scaled to fp64, stands for the unfused one, which the fp64 oracle
    cannot see. Raises ``ValueError`` on different shapes and ``KeyError`` for a dtype outside the table.
    """
    if not fused.shape == unfused.shape == oracle.shape:
        raise ValueError(f"{name}: shapes differ: {fused.shape}, {unfused.shape}, {oracle.shape}")
    dtype = unfused.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        wrong = fused != unfused
        bad = tuple(_witnesses(wrong.nonzero()[:_WITNESSES], fused, unfused, oracle, seed))
        return Sample(name, role, dtype, fused.numel(), mismatches=int(wrong.sum()), bad_mask=bad)
    if oracle.numel() == 0:
        return Sample(name, role, dtype)
    precision(dtype)
    grids = [_grid(t) for t in (fused, unfused, oracle)] + ([] if surrogate is None else [_grid(surrogate)])
    finite = grids[2].masked_fill(~torch.isfinite(grids[2]), 0.0)
    scale = math.sqrt(float(finite.double().square().mean()))
    del finite
    width = grids[0].shape[1]
    total = Sample(name, role, dtype)
    step = max(1, _CHUNK // width)
    for start in range(0, grids[0].shape[0], step):
        parts = [g[start : start + step] for g in grids]
        total += _chunk(Sample(name, role, dtype), parts, (fused.shape, start * width, seed), scale, rule)
    return replace(total, largest=((total.excess, total.unfused_max),))


def _chunk(
    empty: Sample,
    parts: Sequence[torch.Tensor],
    place: tuple[torch.Size, int, int],
    scale: float,
    rule: Rule,
) -> Sample:
    """``Sample`` of rows ``parts`` = (fused, unfused, oracle[, surrogate]), each [rows, width]."""
    f, u, o = (p.double() for p in parts[:3])
    agree = _same_class(f, u)
    usable = agree & torch.isfinite(f) & torch.isfinite(o)
    e, d, o0 = ((x).masked_fill(~usable, 0.0) for x in (f - o, u - o, o))
    if len(parts) == 4:
        d = torch.maximum(d.abs(), (parts[3].double() - o).masked_fill(~usable, 0.0).abs() * SURROGATE_SCALE)
    row = precision(empty.dtype)
    slack = (torch.clamp(o0.abs(), min=scale) * row.eps).clamp(min=row.tiny) * rule.max_ulps
    excess = (e.abs() - slack).masked_fill(~usable, -math.inf)
    cross = e * o0
    top = excess.reshape(-1).topk(min(_WITNESSES, excess.numel()))
    elements = int(usable.sum())
    return replace(
        empty,
        elements=elements,
        skipped=usable.numel() - elements,
        mask_errors=int((~agree).sum()),
        nonfinite=int((~torch.isfinite(f) | ~torch.isfinite(u)).sum()),
        fused_square=float(e.square().sum()),
        unfused_square=float(d.square().sum()),
        oracle_square=float(o0.square().sum()),
        fused_cross=float(cross.sum()),
        unfused_cross=float((d * o0).sum()),
        row_square=float(cross.sum(1).square().sum()),
        column_cross=cross.sum(0).cpu(),
        fused_max=float(e.abs().max()),
        unfused_max=float(d.abs().max()),
        excess=float(top.values[0]),
        worst=tuple(zip(top.values.tolist(), _flat_witnesses(top.indices, (f, u, o), place), strict=True)),
        bad_mask=tuple(_flat_witnesses((~agree).reshape(-1).nonzero()[:_WITNESSES, 0], (f, u, o), place)),
    )


def _grid(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as [rows, last axis]; scalars as [1, 1]."""
    return tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.detach().reshape(1, 1)


def _same_class(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """True where both are NaN, both the same infinity, or both finite."""
    same_nan = torch.isnan(a) == torch.isnan(b)
    infinite = torch.isinf(a) | torch.isinf(b)
    return same_nan & (~infinite | (a == b))


def _flat_witnesses(
    indices: torch.Tensor, values: Sequence[torch.Tensor], place: tuple[torch.Size, int, int]
) -> list[Witness]:
    shape, offset, seed = place
    found = []
    for index in indices.tolist():
        coords = torch.unravel_index(torch.tensor(index + offset), shape) if len(shape) else ()
        found.append(Witness(seed, tuple(int(c) for c in coords), *(float(v.reshape(-1)[index]) for v in values)))
    return found


def _witnesses(
    coords: torch.Tensor, fused: torch.Tensor, unfused: torch.Tensor, oracle: torch.Tensor, seed: int
) -> Iterator[Witness]:
    for row in coords.tolist():
        where = tuple(row)
        yield Witness(seed, where, float(fused[where]), float(unfused[where]), float(oracle[where]))


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """``torch.equal``, except that NaN equals NaN and None equals None."""
    if a is None or b is None:
        return a is b
    if torch.equal(a, b):
        return True
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
        return False
    nan = torch.isnan(a)
    return torch.equal(nan, torch.isnan(b)) and torch.equal(a.masked_fill(nan, 0.0), b.masked_fill(nan, 0.0))


def compare(
    name: str,
    triples: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    *,
    role: str = "output",
) -> Sample:
    """``measure`` over (fused, unfused, oracle) of several seeds, added up; judge it with ``judge([...])``."""
    samples = [measure(name, role, *triple, seed=seed) for seed, triple in enumerate(triples)]
    if not samples:
        raise ValueError(f"{name}: nothing to compare")
    return sum(samples[1:], start=samples[0])
