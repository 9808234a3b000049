"""The frozen record of one check and its text."""

from __future__ import annotations

from dataclasses import dataclass

from megafuse.core.errors import CheckError
from megafuse.validate.verdict import Verdict

_HEADINGS = ("", "tensor", "dtype", "elements", "rms fused", "rms unfused", "limit", "max fused", "max unfused", "gain")

#: Ending of the names of results computed from scaled-down inputs.
SMALL = " (small inputs)"


@dataclass(frozen=True)
class CheckReport:
    """Result of ``check``.

    ``verdicts``: the acceptance rule, per tensor and per pool of small tensors. ``structure``: differences in shape,
    dtype, strides, requires_grad, unused gradients or plain values. ``determinism``: tensors that were not repeatable,
    and how. ``seeds``: inputs drawn; ``repeats``: runs compared bit by bit; ``poisoned``: allocations filled with NaN.
    ``notes``: what a reader of the verdict must know, as that nothing was fused. ``more_draws``: fresh draws, those of
    small inputs counted, that ``verdicts`` are about instead of the first ones (0: they are about the first), since
    those left the failed verdicts ``doubts``; where these broke the max rule, the first draws' largest errors count
    too. ``nothing_fused``: the original was compared with itself. A report is true where all is well.
    """

    subject: str
    seeds: int
    repeats: int
    poisoned: int
    verdicts: tuple[Verdict, ...]
    structure: tuple[str, ...] = ()
    determinism: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    more_draws: int = 0
    doubts: tuple[Verdict, ...] = ()
    nothing_fused: bool = False

    @property
    def ok(self) -> bool:
        """True if every comparison passed and something was compared."""
        return bool(self.verdicts) and not self.failures

    def __bool__(self) -> bool:
        """``ok``."""
        return self.ok

    @property
    def failures(self) -> tuple[str, ...]:
        """Every reason for failing, each naming its tensor."""
        numeric = [f"{v.name}: {reason}" for v in self.verdicts for reason in v.reasons]
        return (*self.structure, *self.determinism, *numeric)

    @property
    def asked_again(self) -> tuple[str, ...]:
        """Lines that say why further draws were made, and that they decide; none where the first ones did."""
        if not self.doubts:
            return ()
        found = (f"      {v.name}, {v.elements} elements: {'; '.join(v.reasons)}" for v in self.doubts)
        return (f"  ASKED AGAIN: {self.more_draws} fresh draws decide; the first ones left a doubt:", *found)

    def raise_if_failed(self) -> CheckReport:
        """Return the report if all is well; raise ``CheckError`` with its text if not."""
        if not self.ok:
            raise CheckError(str(self), hint="strict=True tells what is not fused; docs/numerics.md has the rule")
        return self

    def __str__(self) -> str:
        passed = "nothing was fused, and the original agrees with itself" if self.nothing_fused else "passed"
        state = passed if self.ok else "FAILED"
        counts = ((self.seeds, "seed"), (self.repeats, "repeat"), (self.poisoned, "poisoned allocation"))
        ran = ", ".join(f"{number} {what}" if number == 1 else f"{number} {what}s" for number, what in counts)
        shown = tuple(v for v in self.verdicts if not v.ok or SMALL not in v.role)
        lines = [f"check of {self.subject}: {state} ({ran})", *(f"  NOTE: {n}" for n in self.notes)]
        lines += [*self.asked_again, *_table(shown)]
        if len(shown) < len(self.verdicts):
            lines.append(f"  ok    and {len(self.verdicts) - len(shown)} results of small inputs")
        lines += [f"  structure: {text}" for text in self.structure]
        lines += [f"  not repeatable: {text}" for text in self.determinism]
        for verdict in (v for v in self.verdicts if not v.ok):
            lines += [f"  {verdict.name}: {reason}" for reason in verdict.reasons]
            lines += [f"      {witness}" for witness in verdict.witnesses]
        return "\n".join(lines if self.verdicts else [*lines, "  nothing was compared"])


def _table(verdicts: tuple[Verdict, ...]) -> list[str]:
    rows = [_HEADINGS, *(_row(v) for v in verdicts)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(v: Verdict) -> tuple[str, ...]:
    mark, dtype = ("ok" if v.ok else "FAIL"), str(v.dtype).removeprefix("torch.")
    if not v.dtype.is_floating_point:
        return (mark, v.name, dtype, str(v.elements), *["exact"] * 3, *[""] * 3)
    limit = "pooled" if v.pool else f"{v.rms_limit:.2e}"
    numbers = (f"{v.fused_rms:.2e}", f"{v.unfused_rms:.2e}", limit, f"{v.fused_max:.2e}", f"{v.unfused_max:.2e}")
    return (mark, v.name, dtype, str(v.elements), *numbers, f"{v.gain:+.1e}")
