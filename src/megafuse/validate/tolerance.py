"""The one table of precisions and the one acceptance rule; docs/numerics.md derives every number here.

Nothing in this file may depend on which module, tensor or test is being judged: a rule that is loosened for one case
is no rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class Precision:
    """Spacing of one floating-point dtype: ``eps`` (ulp of 1.0) and ``tiny`` (smallest positive subnormal)."""

    eps: float
    tiny: float


#: Every dtype that can be judged. ``eps`` = 2**-(stored mantissa bits).
PRECISIONS: Mapping[torch.dtype, Precision] = MappingProxyType(
    {
        torch.bfloat16: Precision(eps=2.0**-7, tiny=2.0**-133),
        torch.float16: Precision(eps=2.0**-10, tiny=2.0**-24),
        torch.float32: Precision(eps=2.0**-23, tiny=2.0**-149),
        torch.float64: Precision(eps=2.0**-52, tiny=2.0**-1074),
    }
)

#: Scale of an fp64 error predicted from the same computation in fp32; sqrt(2) because the oracle errs as much.
SURROGATE_SCALE = math.sqrt(2.0) * PRECISIONS[torch.float64].eps / PRECISIONS[torch.float32].eps


@dataclass(frozen=True)
class Rule:
    """The acceptance rule. ``f``, ``u``, ``o`` are the fused, unfused and oracle values; ``R`` is RMS(o).

    * RMS:  RMS(f-o) <= rms_factor * widen(N) * RMS(u-o) + rms_ulps * ulp(R)
    * max:  |f-o| <= max_factor * max|u-o| + max_ulps * ulp(max(|o|, R))   at every element
    * gain: |g(f)| <= gain_factor * |g(u)| + gain_sigmas * se + gain_ulps * eps + gain_arithmetic,
      where g(a) = sum((a-o) * o) / sum(o * o) is the part of the error that scales the result, se its standard error

    What breaks no other part than RMS and max, in a sample shorter than ``full_sample``, with errors below
    ``doubt_factor`` times both limits (of the max rule, its part without ulps), is in doubt: ``further_draws`` times as
    many fresh draws decide, by the same rule. What broke the max rule is not forgotten: the error must be within
    ``max_factor`` times the largest unfused error of all draws, and in fewer than ``larger_share`` of the fresh draws
    may the largest error be over ``rms_factor`` times the unfused one of that draw, + max_ulps * ulp.
    """

    rms_factor: float = 1.5
    rms_ulps: float = 0.25
    max_factor: float = 4.0
    max_ulps: float = 4.0
    full_sample: int = 4096
    small_sample_sigmas: float = 4.0
    gain_factor: float = 1.5
    gain_sigmas: float = 4.0
    gain_ulps: float = 1.0 / 32.0
    gain_arithmetic: float = 4.0 * 2.0**-23
    doubt_factor: float = 4.0
    further_draws: int = 16
    larger_share: float = 0.5

    def widen(self, elements: int) -> float:
        """Factor for samples below ``full_sample``: the ratio of two RMS estimates has relative error 1/sqrt(N)."""
        if elements >= self.full_sample:
            return 1.0
        spread = 1.0 / math.sqrt(max(elements, 1)) - 1.0 / math.sqrt(self.full_sample)
        return 1.0 + self.small_sample_sigmas * spread

    def rms_limit(self, unfused_rms: float, oracle_rms: float, dtype: torch.dtype, elements: int) -> float:
        """Largest accepted RMS(f-o) for ``elements`` pooled elements."""
        slack = self.rms_ulps * ulp(oracle_rms, dtype)
        return self.rms_factor * self.widen(elements) * unfused_rms + slack

    def gain_limit(self, unfused_gain: float, standard_error: float, dtype: torch.dtype) -> float:
        """Largest accepted |g(f)|."""
        floor = self.gain_ulps * precision(dtype).eps + self.gain_arithmetic
        return self.gain_factor * abs(unfused_gain) + self.gain_sigmas * standard_error + floor


#: The rule in force everywhere.
RULE = Rule()


def precision(dtype: torch.dtype) -> Precision:
    """Row of the table for ``dtype``; raises ``KeyError`` with the known dtypes for anything else."""
    try:
        return PRECISIONS[dtype]
    except KeyError:
        known = ", ".join(str(name) for name in PRECISIONS)
        raise KeyError(f"no tolerance is defined for {dtype}; the table has {known}") from None


def ulp(scale: float, dtype: torch.dtype) -> float:
    """Smooth ulp: eps * |scale|, at least the smallest subnormal.

    Unlike eps * 2**floor(log2(scale)) it does not jump by two at powers of two, so verdicts do not depend on the units.
    """
    row = precision(dtype)
    return max(row.eps * abs(scale), row.tiny)
