"""Arithmetic of bf16 values two at a time.

Where the reference rounds a sum, difference or product of bf16 values to bf16, one packed instruction does the work
of two operations, a conversion and the widening of operands. The result is the same to the last bit: fp32 has more than
twice the bits of bf16 plus two, so rounding to fp32 first changes nothing (Figueroa, "When is double rounding
innocuous?", 1995).

``pack`` rewrites a phase: values that are bf16 numbers get a twin of that type, arithmetic that is rounded to bf16 at
once is done on twins, and only what other statements read is widened to fp32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from megafuse.codegen.program import Affine, Compute, Convert, Level, Note, Pass, Phase, Statement, Store
from megafuse.codegen.walk import has_cols, has_rows, reads, statements
from megafuse.core.dtypes import DType

_PACKED = frozenset({"add", "sub", "mul"})


def pack(phase: Phase, outside: Iterable[str] = ()) -> Phase:
    """The phase with bf16 arithmetic in pairs. Values of a single element, which make no pair, stay as they are.

    ``outside``: values that others than the phase's own statements read.
    """
    readers: dict[str, list[Statement]] = defaultdict(list)
    for name in outside:
        readers[name].append(Store("", Affine(()), name, Level.TILE))  # some use of the value as it is
    for statement in statements(phase):
        for name in reads(statement):
            readers[name].append(statement)
    packing = _Packing(phase, readers)
    for body in phase.passes:
        packing.look(body)
    return replace(phase, passes=tuple(packing.rewritten(body) for body in phase.passes))


@dataclass
class _Packing:
    """What was found.

    ``twins`` names the bf16 twin of an fp32 value, ``rounded`` that of a value which is rounded to bf16; ``absorbed``
    are results of arithmetic that is done on twins.
    """

    phase: Phase
    readers: dict[str, list[Statement]]
    makers: dict[str, Statement] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)
    absorbed: set[str] = field(default_factory=set)

    def look(self, body: Pass) -> None:
        """Find twins and packed arithmetic in one pass, in order."""
        for item in body.body:
            if isinstance(item, Convert) and isinstance(item.src, str):
                self._look_at(item, item.src)
            dst = getattr(item, "dst", None)
            if dst is not None and not isinstance(item, Note):
                self.makers[dst] = item

    def _look_at(self, node: Convert, src: str) -> None:
        if node.dtype is DType.F32 and node.src_dtype is DType.BF16 and node.through is None:
            self.twins[node.dst] = src
        elif _rounds(node) and self._in_pairs(node.level):
            made = self.makers.get(src)
            if isinstance(made, Compute) and self._can_join(made):
                self.absorbed.add(src)
            twin = self.rounded.setdefault(src, f"{node.dst}_half" if node.through else node.dst)
            if node.through is not None:
                self.twins[node.dst] = twin

    def _can_join(self, made: Compute) -> bool:
        """Arithmetic of two bf16 values that nothing but roundings to bf16 reads."""
        return (
            made.fn in _PACKED
            and made.dtype is DType.F32
            and all(isinstance(a, str) and a in self.twins for a in made.args)
            and all(isinstance(r, Convert) and _rounds(r) and r.level is made.level for r in self.readers[made.dst])
        )

    def _in_pairs(self, level: Level) -> bool:
        rows = self.phase.row_tile if has_rows(level) else 1
        widths = self.phase.pieces if has_cols(level) else (1,)
        return all(rows * width > 1 for width in widths)

    def rewritten(self, body: Pass) -> Pass:
        """The pass with what was found put in place."""
        items: list[Statement | Note] = []
        made: set[str] = set()
        for item in body.body:
            items += self._rewrite(item, made) if isinstance(item, Convert) else self._kept(item)
        return Pass(tuple(items))

    def _kept(self, item: Statement | Note) -> list[Statement | Note]:
        return [] if isinstance(item, Compute) and item.dst in self.absorbed else [item]

    def _rewrite(self, node: Convert, made: set[str]) -> list[Statement]:
        """A conversion: dropped where only twins are read, else made of the twin. ``made``: twins so far."""
        if node.through is None and node.dst in self.twins:
            return [node] if self._is_widened(node.dst) else []
        if not isinstance(node.src, str) or not self._needs_twin(node.src):
            return [node]
        twin = self.rounded[node.src]
        found = [] if twin in made else [self._rounding(node, node.src, twin)]
        made.add(twin)
        if node.through is None:
            return found if node.dst == twin else [*found, Convert(node.dst, twin, node.level, DType.BF16, DType.BF16)]
        if self._is_widened(node.dst):
            found.append(Convert(node.dst, twin, node.level, DType.BF16, DType.F32, DType.BF16))
        return found

    def _rounding(self, node: Convert, src: str, twin: str) -> Statement:
        """The statement that makes the twin of ``src``."""
        if src not in self.absorbed:
            return Convert(twin, src, node.level, DType.F32, DType.BF16, DType.BF16)
        made = self.makers[src]
        assert isinstance(made, Compute)
        args = tuple(self.twins[a] for a in made.args if isinstance(a, str))
        return Compute(twin, made.fn, args, made.level, DType.BF16, DType.BF16)

    def _needs_twin(self, src: str) -> bool:
        """A rounded value whose bf16 form is read: by packed arithmetic, as its result, or by a store beside others."""
        if src not in self.rounded:
            return False
        roundings = [r for r in self.readers[src] if isinstance(r, Convert) and _rounds(r)]
        paired = any(self._reads_twin(reader) for r in roundings for reader in self.readers[r.dst])
        return src in self.absorbed or len(roundings) > 1 or paired

    def _is_widened(self, name: str) -> bool:
        """Some statement reads the value in fp32."""
        return any(not self._reads_twin(r) for r in self.readers[name])

    def _reads_twin(self, reader: Statement) -> bool:
        return isinstance(reader, Compute) and reader.dst in self.absorbed


def _rounds(node: Convert) -> bool:
    return node.src_dtype is DType.F32 and DType.BF16 in (node.through, node.dtype)
