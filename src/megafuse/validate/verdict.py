"""From samples to verdicts: the acceptance rule applied to every tensor and to the pools of short ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from megafuse.validate.compare import Sample, Witness
from megafuse.validate.tolerance import RULE, Rule, precision


class Part(Enum):
    """A part of the acceptance rule that a tensor can break."""

    RMS = "rms"
    MAX = "max"
    GAIN = "gain"
    MASK = "mask"
    FINITE = "finite"
    EXACT = "exact"


_Reason = tuple[Part, str]


@dataclass(frozen=True)
class Verdict:
    """The rule applied to one tensor (or pool): errors, limits, and the reasons why it failed (none: it passed).

    ``broken``: the parts of the rule that ``reasons`` tell of. Errors are absolute in the tensor's own units; in a pool
    they are relative to each member's scale. ``excess``: the largest fused error beyond the ulp part of the max rule.
    ``rms_limit`` is that of a sample of this size, also where the RMS rule is left to the pool named ``pool``.
    ``larger``: in how many of the ``draws`` the largest fused error exceeds the unfused one of that draw by more than
    the RMS factor and the ulps; a pool has none.
    """

    name: str
    role: str
    dtype: torch.dtype
    elements: int
    fused_rms: float
    unfused_rms: float
    rms_limit: float
    fused_max: float
    unfused_max: float
    excess: float
    gain: float
    gain_limit: float
    draws: int = 0
    larger: int = 0
    pool: str | None = None
    broken: frozenset[Part] = frozenset()
    reasons: tuple[str, ...] = ()
    witnesses: tuple[Witness, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing was broken."""
        return not self.reasons

    def in_doubt(self, rule: Rule = RULE) -> bool:
        """True if only RMS and max rule fail, on a short sample, and not by so much that chance is ruled out.

        RMS(f-o) counts also where the max rule alone fails, or the RMS rule is left to the pool: errors that are large
        everywhere are none of chance.
        """
        if self.elements >= rule.full_sample or not self.broken or self.broken - {Part.RMS, Part.MAX}:
            return False
        largest = rule.doubt_factor * rule.max_factor * self.unfused_max
        near = Part.MAX not in self.broken or self.excess < largest
        return near and self.fused_rms < rule.doubt_factor * self.rms_limit

    def __str__(self) -> str:
        state = "ok  " if self.ok else "FAIL"
        limit = f"in {self.pool}" if self.pool else f"{self.rms_limit:.3g}"
        head = f"{state} {self.name} {_short(self.dtype)} n={self.elements}"
        body = f"rms {self.fused_rms:.3g} (unfused {self.unfused_rms:.3g}, limit {limit}) "
        body += f"max {self.fused_max:.3g} (unfused {self.unfused_max:.3g}) gain {self.gain:+.1e}"
        lines = [f"{head}: {body}", *(f"     {reason}" for reason in self.reasons)]
        return "\n".join(lines + [f"       {w}" for w in self.witnesses if not self.ok])


def judge(samples: Iterable[Sample], *, require_finite: bool = False, rule: Rule = RULE) -> tuple[Verdict, ...]:
    """One verdict for every sample (already summed over seeds), and one for every pool of short samples.

    The RMS rule is applied to a tensor alone if it has ``rule.full_sample`` elements, else to the pool of its role
    and dtype; everything else is applied to each tensor alone.
    """
    listed = list(samples)
    small = [s for s in listed if s.dtype.is_floating_point and 0 < s.elements < rule.full_sample]
    keys = list(dict.fromkeys((s.role, s.dtype) for s in small))
    pools = [[s for s in small if (s.role, s.dtype) == key] for key in keys]
    pooled = {id(s) for pool in pools if len(pool) > 1 for s in pool}
    verdicts = [_judge_one(s, id(s) in pooled, require_finite, rule) for s in listed]
    return (*verdicts, *(_judge_pool(pool, rule) for pool in pools if len(pool) > 1))


def in_doubt(verdicts: Iterable[Verdict], rule: Rule = RULE) -> tuple[Verdict, ...]:
    """The failed verdicts, if there are any and each of them is in doubt; else none: there is nothing to ask again."""
    failed = tuple(v for v in verdicts if not v.ok)
    return failed if all(v.in_doubt(rule) for v in failed) else ()


def decided(doubts: Iterable[Verdict], further: Iterable[Verdict], rule: Rule = RULE) -> tuple[Verdict, ...]:
    """Verdicts ``further`` on fresh draws, which decide about ``doubts``, those that the first draws left.

    The largest error of the first draws is carried into the verdict on each tensor that broke the max rule there:
    else a fault that shows in few draws would be forgotten because the fresh ones missed it. And its largest errors
    must not be larger than the unfused ones draw by draw: else a fault that shows in all would be accepted because the
    unfused errors of some draws are as large. Such a tensor that the fresh draws do not have stays rejected.
    """
    broken = {v.name: v for v in doubts if Part.MAX in v.broken}
    fresh = [_carried(broken[v.name], v, rule) if v.name in broken else v for v in further]
    missing = broken.keys() - {v.name for v in fresh}
    return (*fresh, *(v for name, v in broken.items() if name in missing))


def _carried(first: Verdict, fresh: Verdict, rule: Rule) -> Verdict:
    """``fresh`` with the largest errors of all draws; see ``decided`` for what rejects it."""
    largest = {f: max(getattr(first, f), getattr(fresh, f)) for f in ("fused_max", "unfused_max", "excess")}
    total = replace(fresh, **largest)
    reasons = []
    if not first.excess <= rule.max_factor * total.unfused_max:
        allowed = f"{rule.max_factor:g} x {total.unfused_max:.3g} (unfused, all draws) + {rule.max_ulps:g} ulp"
        reasons.append(f"largest error {first.fused_max:.3g} of the first draws is over {allowed}")
    if fresh.larger >= max(1, rule.larger_share * fresh.draws):
        allowed = f"{rule.rms_factor:g} x the unfused one + {rule.max_ulps:g} ulp"
        reasons.append(f"largest error is over {allowed} in {fresh.larger} of {fresh.draws} further draws")
    if not reasons:
        return total
    return replace(
        total,
        broken=fresh.broken | {Part.MAX},
        reasons=(*fresh.reasons, *reasons),
        witnesses=(*first.witnesses, *fresh.witnesses),
    )


def _judge_one(sample: Sample, pooled: bool, require_finite: bool, rule: Rule) -> Verdict:
    if not sample.dtype.is_floating_point:
        wrong = [(Part.EXACT, f"{sample.mismatches} elements differ; integers must be equal")]
        return _verdict(sample, math.inf, math.inf, None, wrong if sample.mismatches else [], sample.bad_mask)
    limit = rule.rms_limit(sample.unfused_rms, sample.oracle_rms, sample.dtype, sample.elements)
    gain_limit = rule.gain_limit(sample.unfused_gain, sample.gain_error, sample.dtype)
    reasons = _finite_reasons(sample, require_finite)
    witnesses = sample.bad_mask
    if not pooled:
        reasons += _rms_reasons(sample, limit)
    if sample.excess > rule.max_factor * sample.unfused_max:
        allowed = f"{rule.max_factor:g} x {sample.unfused_max:.3g} (unfused) + {rule.max_ulps:g} ulp"
        reasons.append((Part.MAX, f"largest error {sample.fused_max:.3g} is over {allowed}"))
    if abs(sample.gain) > gain_limit:
        scaled = f"results are scaled by 1{sample.gain:+.3e}, limit {gain_limit:.1e}: a systematic error"
        reasons.append((Part.GAIN, scaled))
    if reasons and not witnesses:
        witnesses = tuple(w for _, w in sample.worst)
    pool = _pool_name(sample) if pooled else None
    larger = sum(excess > rule.rms_factor * unfused for excess, unfused in sample.largest)
    return replace(_verdict(sample, limit, gain_limit, pool, reasons, witnesses), larger=larger)


def _judge_pool(pool: Sequence[Sample], rule: Rule) -> Verdict:
    total = sum((_normalised(s) for s in pool[1:]), start=_normalised(pool[0]))
    total = replace(total, name=f"{_pool_name(total)} ({len(pool)} tensors, relative)")
    limit = rule.rms_limit(total.unfused_rms, total.oracle_rms, total.dtype, total.elements)
    reasons = _rms_reasons(total, limit)
    if reasons:
        worst = max(pool, key=lambda s: _normalised(s).fused_square)
        reasons.append((Part.RMS, f"most of it comes from {worst.name}"))
    return _verdict(total, limit, math.inf, None, reasons, ())


def _normalised(sample: Sample) -> Sample:
    """Sums in units of the tensor's scale: RMS(oracle), or RMS(unfused - oracle) / eps where the true value cancels.

    So no member dominates a pool because of its units, or because it is all rounding noise.
    """
    scale = max(sample.oracle_rms, sample.unfused_rms / precision(sample.dtype).eps) or 1.0
    squares = {f: getattr(sample, f) / scale**2 for f in ("fused_square", "unfused_square", "oracle_square")}
    peaks = {f: getattr(sample, f) / scale for f in ("fused_max", "unfused_max", "excess")}
    return replace(sample, **squares, **peaks, largest=(), column_cross=None, fused_cross=0.0, worst=())


def _finite_reasons(sample: Sample, require_finite: bool) -> list[_Reason]:
    reasons: list[_Reason] = []
    if sample.mask_errors:
        reasons.append((Part.MASK, f"NaN or Inf differ from the unfused module's at {sample.mask_errors} elements"))
    if require_finite and sample.nonfinite:
        reasons.append((Part.FINITE, f"{sample.nonfinite} elements are not finite"))
    return reasons


def _rms_reasons(sample: Sample, limit: float) -> list[_Reason]:
    if sample.fused_rms <= limit:
        return []
    error = f"RMS error {sample.fused_rms:.3g} is over {limit:.3g} (unfused {sample.unfused_rms:.3g})"
    return [(Part.RMS, error)]


def _verdict(
    sample: Sample,
    limit: float,
    gain_limit: float,
    pool: str | None,
    reasons: Sequence[_Reason],
    witnesses: Sequence[Witness],
) -> Verdict:
    return Verdict(
        name=sample.name,
        role=sample.role,
        dtype=sample.dtype,
        elements=sample.elements,
        fused_rms=sample.fused_rms,
        unfused_rms=sample.unfused_rms,
        rms_limit=limit,
        fused_max=sample.fused_max,
        unfused_max=sample.unfused_max,
        excess=sample.excess,
        gain=sample.gain,
        gain_limit=gain_limit,
        draws=len(sample.largest),
        pool=pool,
        broken=frozenset(part for part, _ in reasons),
        reasons=tuple(text for _, text in reasons),
        witnesses=tuple(witnesses),
    )


def _pool_name(sample: Sample) -> str:
    return f"pool of short tensors: {sample.role} {_short(sample.dtype)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
